"""Correlations, and files of the STS Benchmark."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mmldlm.errors import UserError
from mmldlm.evaluation import sts


def test_correlations_of_known_vectors():
    x = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    assert sts.spearman(x, np.exp(x)) == pytest.approx(1) and sts.pearson(x, -x) == pytest.approx(
        -1
    )
    assert sts.average_ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [
        3.5,
        1.0,
        3.5,
        2.0,
    ]
    assert sts.spearman(x, np.ones(5)) == 0.0


def test_sts_files_are_read_or_refused(tmp_path):
    path = tmp_path / "sts.csv"
    rows = (
        ("5.000", 'A "man" runs.', "A man runs."),
        ("0.0", "One.", "Two words."),
        ("2", "a", "b"),
    )
    path.write_text("\n".join("\t".join(("genre", "file", "year", "id", *row)) for row in rows))
    pairs = sts.read_pairs(str(path))
    assert pairs.first[0] == 'A "man" runs.' and pairs.scores.tolist() == [5, 0, 2]
    assert pairs.sources == ["file"] * 3
    assert sts.bag_similarities(pairs, weighted=False)[0] == pytest.approx(1)
    path.write_text("a\tb\n")
    for bad in (path, tmp_path / "absent.csv"):
        with pytest.raises(UserError, match="STS Benchmark"):
            sts.read_pairs(str(bad))


_ROWS = (
    ("4.2", "A cat sits.", "A cat sat."),
    ("0.2", "A dog runs.", "A plane lands."),
    ("1", "Open it.", "Shut it."),
)
_GLUE = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore"


def _glue() -> list[str]:
    return [
        f"{i}\tmain\tMSRvid\t2012\t1\tnone\tnone\t{a}\t{b}\t{score}"
        for i, (score, a, b) in enumerate(_ROWS)
    ]


def test_glues_header_is_read(tmp_path):
    """public-reports B 19"""
    (tmp_path / "dev.tsv").write_text(
        "\ufeff" + "\r\n".join([_GLUE, *_glue()]) + "\r\n", encoding="utf-8"
    )
    pairs = sts.read_pairs(str(tmp_path / "dev.tsv"))
    assert pairs.scores.tolist() == [4.2, 0.2, 1.0] and pairs.sources == ["MSRvid"] * 3
    assert pairs.first[1] == "A dog runs." and pairs.second[1] == "A plane lands."


@pytest.mark.parametrize("score", ["84", "-1", "nan", "inf", "", "none"])
def test_scores_are_from_0_to_5(score, tmp_path):
    """public-reports B 19"""
    rows = [*_ROWS, (score, "c", "d")]
    path = tmp_path / "sts.csv"
    path.write_text("\n".join("\t".join(("genre", "file", "year", "id", *row)) for row in rows))
    with pytest.raises(UserError, match="line 4"):
        sts.read_pairs(str(path))


@pytest.mark.parametrize(
    "lines",
    [
        _glue(),
        [_GLUE.removesuffix("\tscore"), *(line.rsplit("\t", 1)[0] for line in _glue())],
        [f"main\tfile\t2012\t1\t{score}\tnone\tnone" for score in "1234"],
        [f"main\tfile\t2012\t1\t3\t{a}\t{b}" for _, a, b in _ROWS],
    ],
    ids=["no header", "no scores", "equal sentences", "equal scores"],
)
def test_other_tables_are_refused(lines, tmp_path):
    """public-reports B 19"""
    (tmp_path / "dev.tsv").write_text("\n".join(lines))
    with pytest.raises(UserError, match="STS Benchmark"):
        sts.read_pairs(str(tmp_path / "dev.tsv"))


def test_differences_are_paired_and_sources_apart(capsys, monkeypatch):
    """The model is the score with noise; one source of the two is all noise."""
    monkeypatch.setattr(sts, "_RESAMPLES", 100)
    rng = np.random.default_rng(0)
    scores, sources = rng.uniform(0, 5, 120), ["images"] * 60 + ["headlines"] * 60
    model = scores + 0.3 * rng.standard_normal(120)
    model[60:] = rng.standard_normal(60)
    arms = {
        sts.MODEL: model,
        sts.TF_IDF: rng.standard_normal(120),
        sts.CEILING: model,
    }
    pairs = sts.Pairs(["a"] * 120, ["b"] * 120, scores, "sts.csv", sources)
    found = sts.differences(arms, scores, seed=0)
    own, floor = (sts.spearman(arms[name], scores) for name in (sts.MODEL, sts.TF_IDF))
    assert found["model_minus_tf_idf"].value == pytest.approx(own - floor)
    assert found["model_minus_tf_idf"].low < own - floor < found["model_minus_tf_idf"].high
    same = found["encoder_minus_model"]
    assert (same.value, same.low, same.high) == (0, 0, 0)
    apart = sts.by_source(arms, pairs, seed=0)
    assert apart["images"]["num_pairs"] == 60 and apart["images"][sts.MODEL]["value"] > 0.9
    assert apart["headlines"][sts.MODEL]["value"] < 0.5
    rows = {name: sts.correlations(values, scores, 0) for name, values in arms.items()}
    report = sts.StsReport({"file": "sts.csv", "num_pairs": 120, "notes": []}, rows, found, apart)
    assert set(report.as_dict()["details"]) == {*arms, "differences", "by_source"}
    report.show()
    shown = capsys.readouterr().out
    assert "model - tf idf" in shown and "headlines" in shown


def test_without_the_encoder_a_note_stands_for_the_ceiling(pretrained, monkeypatch, capsys):
    monkeypatch.setattr(
        sts, "tokenize_texts", lambda texts, _: [[4 + len(text) % 20] for text in texts]
    )

    def missing(*_):
        raise UserError("encoder 'gone'", "no such folder", "install it")

    monkeypatch.setattr(sts, "encode_texts", missing)
    monkeypatch.setattr(sts, "_RESAMPLES", 20)
    texts = ["a", "a cat", "a small cat", "two small cats"]
    pairs = sts.Pairs(texts, texts[::-1], np.arange(4.0), "sts.csv", ["images"] * 4)
    report = sts.evaluate(replace(pretrained, encoder={"name": "gone"}), pairs)
    assert sts.MODEL in report.rows and sts.CEILING not in report.rows
    (note,) = report.conditions["notes"]
    assert "no such folder" in note and note in report.page()
    report.show()
    assert "no such folder" in capsys.readouterr().out
