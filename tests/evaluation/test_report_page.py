"""Pages of evaluations: every figure with its error and meaning, and nothing that a text could
smuggle in.
"""

from __future__ import annotations

import argparse
import re
from html import unescape

import numpy as np
import pytest

from mmldlm.commands.evaluate import add_arguments, main
from mmldlm.errors import UserError
from mmldlm.evaluation.gain_report import CLAIM_MEANINGS, PLOTS, ROWS, EvaluationReport
from mmldlm.evaluation.report import gain_verdict
from mmldlm.evaluation.statistics import Difference, Estimate
from mmldlm.evaluation.sts import StsReport, correlations
from mmldlm.evaluation.text_report import (
    OVERLAP_COLUMNS,
    OVERLAP_ROWS,
    SET_COLUMNS,
)

HOSTILE = "</td><script>window.broken=1</script> & <img src=x>"
UNITS = {"nelbo": "nats/token", "gain": "nats/token", "f1": "points", "recall": "share, of 40"}


@pytest.fixture
def report():
    """A different value for every figure; one hostile sample, note and store."""
    names = [key for key, *_ in ROWS]
    unit = {
        name: next((unit for start, unit in UNITS.items() if start in name), "cosine")
        for name in names
    }
    model = {name: Estimate(0.01 * i, 0.001, unit[name]) for i, name in enumerate(names, 1)}
    floors = {
        name: model.pop(name) for name in names if name.startswith(("mean_embedding", "chance"))
    }
    arms = {"model": model, "untrained": {"nelbo_right": Estimate(9.5, 0.1, "nats/token")}}
    arms |= {"untrained_random_gates": {}, "floors": floors}
    for number, (arm, *_) in enumerate(OVERLAP_ROWS, 1):
        found = {
            column.key: Estimate(number + 10.1 * i, 0.2, "points", 40)
            for i, column in enumerate(OVERLAP_COLUMNS)
        }
        arms.setdefault(arm, {}).update(found)
    for number, arm in enumerate(("model", "sentences")):
        found = {
            column.key: Estimate(number + 0.123 * i, 0.01, "", 40)
            for i, column in enumerate(SET_COLUMNS, 1)
        }
        arms.setdefault(arm, {}).update(found)
    arms["nearest_training_sentence"]["reencoded_cosine"] = model.pop("nearest_training_cosine")
    conditions = {
        "num_sentences": 40,
        "num_control_sentences": 10,
        "store": HOSTILE,
        "notes": [HOSTILE],
        "seed": 3,
    }
    conditions |= {"likelihood": "bound", "near_duplicates": {"count": 7, "cosine_above": 0.95}}
    differences = {
        "model_minus_nearest_training_sentence": {
            "word_f1": Difference(-3.25, -4.0, 1.5, "points", 40)
        }
    }
    samples = [{"sentence": f"The rows {HOSTILE}", "written": f"the row {HOSTILE}", "set_f1": 0.5}]
    return EvaluationReport(conditions, arms, samples, differences)


def words(page: str) -> str:
    """The text of a page without its markup."""
    return unescape(re.sub(r"<[^>]*>", "", page[page.index("<body>") :]))


def test_every_figure_has_its_error_and_its_meaning(report):
    page = words(report.page())
    table = report.figures()
    assert [column.heading for column in table.columns] == ["figure", "model", "untrained"]
    assert len(table.rows) == len(ROWS)
    for row, (label, own, _) in zip(ROWS, table.rows):
        assert (label.words, label.meaning) == (row.label, row.meaning)
        assert label.words.strip() + label.meaning + own.on_screen.replace("+-", "±") in page
    assert "9.500 ± 0.100" in page and "on 10 of the sentences" in page
    assert all(item["id"] + CLAIM_MEANINGS[item["id"]] in page for item in report.claims)


def test_written_strings_stand_beside_their_floors(report):
    page = words(report.page())
    for arm, label, meaning in OVERLAP_ROWS:
        cells = [f"{report.arms[arm][column.key].value:.1f} ± 0.2" for column in OVERLAP_COLUMNS]
        assert label.strip() + meaning + "".join(cells) in page
    for column in (*OVERLAP_COLUMNS, *SET_COLUMNS):
        assert column.label.replace("\n", " ") + column.meaning in page
    assert (
        "-3.2 points[-4.0, +1.5]" in page and "7 of 40 sentences have a training sentence" in page
    )


def test_what_a_search_found_stands_beside_what_was_written(report):
    report.examples[0]["searched"] = "rows of the table"
    report.conditions["search"] = {
        "what": "best of 4",
        "gflops": 2.5,
        "depth": 9,
        "judge_calls": 4.0,
    }
    report.conditions |= {"gflops_per_text": None, "most_passes": 6}
    report.differences["search_minus_model"] = {
        "judge_cosine": Difference(0.05, 0.04, 0.0625, "cosine", 40)
    }
    page = words(report.page())
    assert "written from its embeddingfound by the search" in page
    assert "model60" in page and "Search: best of 4." in page and "search2.594" in page
    assert "rows of the table" in page and "judge cosine+0.050 cosine[+0.040, +0.062]" in page


def test_a_model_without_latents_has_a_page(report):
    keep = {"nelbo_null": report.arms["model"]["nelbo_null"]}
    report.arms = {"model": keep, "untrained": keep, "untrained_random_gates": {}}
    report.examples, report.differences = [], {}
    page = report.page()
    assert "NELBO, nats/token" in page and "l2t" not in words(page)
    assert re.findall("<h2>(.*?)</h2>", page) == ["Figures of 40 unseen sentences", "Conditions"]


def test_plots_show_what_was_measured(report):
    page = report.page()
    assert all(caption in page for caption, _ in PLOTS)
    del report.arms["floors"], report.arms["model"]["recall_at_10"]
    assert PLOTS[-1][0] not in report.page()  # nothing is left to compare with


def test_a_hostile_text_stays_text(report, browser, tmp_path):
    page = report.page()
    assert "<script>window" not in page and "<img" not in page and HOSTILE in words(page)
    path = tmp_path / "page.html"
    path.write_text(page)
    browser.open(path)
    assert browser.problems == [] and browser.requests == [path.as_uri()]
    assert browser.run("window.broken") is None and browser.run("document.images.length") == 0
    for width in (320, 1200):
        browser.resize(width)
        assert browser.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(
    ("value", "se", "use"),
    [
        (-0.003, 0.007, "ignores"),
        (0.0, 0.0, "ignores"),
        (0.01, 0.007, "ignores"),
        (0.3, 0.01, "hardly uses"),
        (3.0, 0.2, "uses"),
    ],
)
def test_a_gain_is_one_sentence(value, se, use):
    """newcomer 2: 190 lines of figures, and none said that the model ignores its embedding."""
    verdict = gain_verdict(Estimate(value, se), "embedding", "another sentence's")
    assert verdict.startswith(f"the model {use} its embedding: ") and f"{value:.3f}" in verdict


def test_the_page_of_sts_has_its_intervals():
    scores = np.arange(20.0)
    rows = {
        "model (t2l)": correlations(scores**2, scores, 0),
        "floor: bag of words": correlations(-scores, scores, 0),
    }
    page = words(StsReport({"file": "sts-dev.csv", "num_pairs": 20, "notes": []}, rows).page())
    low, high = rows["model (t2l)"]["spearman"]["ci95"]
    assert f"1.000 [{low:.3f}, {high:.3f}]" in page and "floor: bag of words-1.000" in page
    assert "20 pairs of sts-dev.csv" in page


@pytest.mark.parametrize(
    "options, named",
    [
        (["--html", "page.txt"], "ends with .html"),
        (["--html", "{}/file/page.html"], "writable path"),
        (["--html", "{}/a.html", "--json", "{}/a.html"], "two files"),
    ],
)
def test_pages_that_cannot_be_written_are_refused_before_the_model_is_read(
    tmp_path, options, named
):
    (tmp_path / "file").write_text("")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = [
        "--checkpoint",
        "absent",
        "--data",
        "absent",
        *(option.format(tmp_path) for option in options),
    ]
    with pytest.raises(UserError, match=named) as error:
        main(parser.parse_args(words))
    assert error.value.exit_code == 2
