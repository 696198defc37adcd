"""Figures of strings: known values, sacrebleu's own results, and what the definitions
leave out.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest

from mmldlm.errors import UserError
from mmldlm.evaluation import metrics

REFERENCES = [
    "Return the number of rows, if any.",
    "The index of the padding token in the vocabulary.",
    "a b c",
    "Raise an error.",
]
WRITTEN = [
    "return the number of the rows.",
    "The index of the the padding token in a vocabulary.",
    "a b c",
    "",
]


@pytest.fixture(scope="module")
def sacrebleu():
    return pytest.importorskip("sacrebleu", reason="the extra eval is not installed")


def test_sentence_bleu_is_what_vec2text_reports(sacrebleu):
    """vec2text calls corpus_bleu of sacrebleu on each pair, with its default settings."""
    counts = metrics.bleu_counts(WRITTEN, REFERENCES)
    expected = [
        sacrebleu.corpus_bleu([text], [[other]]).score for text, other in zip(WRITTEN, REFERENCES)
    ]
    assert metrics.sentence_bleu(counts) == pytest.approx(expected)
    effective = [
        sacrebleu.sentence_bleu(text, [other], use_effective_order=True).score
        for text, other in zip(WRITTEN, REFERENCES)
    ]
    assert metrics.sentence_bleu(counts, effective_order=True) == pytest.approx(effective)
    assert expected[0] > 0 and expected[3] == 0


def test_a_right_text_of_three_words_scores_nothing_without_effective_order(sacrebleu):
    counts = metrics.bleu_counts(["a b c"], ["a b c"])
    assert metrics.sentence_bleu(counts).tolist() == [0]
    assert metrics.sentence_bleu(counts, effective_order=True) == pytest.approx([100])


def test_corpus_bleu_is_that_of_sacrebleu(sacrebleu):
    found = metrics.corpus_bleu(metrics.bleu_counts(WRITTEN, REFERENCES))
    assert found.value == pytest.approx(sacrebleu.corpus_bleu(WRITTEN, [REFERENCES]).score)
    assert found.se > 0 and found.n == 4


def test_the_signatures_name_the_definition(sacrebleu):
    found = metrics.bleu_signatures()
    assert (
        found["bleu"]
        == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"
    )
    assert "eff:yes" in found["bleu_effective_order"]


def test_without_sacrebleu_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    with pytest.raises(UserError, match=r"mmldlm\[eval\]"):
        metrics.compare(WRITTEN, REFERENCES)
    assert set(metrics.compare(WRITTEN, REFERENCES, with_bleu=False).estimates()) == {
        "word_f1", "word_set_f1", "exact_match",
    }  # fmt: skip


def test_words_keep_their_case_and_split_at_punctuation():
    assert metrics.words("Don't  use num_rows, see a.b!") == [
        "Don", "'", "t", "use", "num_rows", ",", "see", "a", ".", "b", "!",
    ]  # fmt: skip


def test_only_the_multiset_counts_repeats():
    """A text that drops the second "the" is right as a set and wrong as a multiset."""
    found = metrics.compare(
        ["the row of table", "the the the"], ["the row of the table", "the row"], with_bleu=False
    )
    assert found.word_set_f1 == pytest.approx([1, 2 / 3])
    assert found.word_f1 == pytest.approx([2 * 4 / 9, 2 / 5])
    assert not found.exact_match.any()


def test_exact_match_keeps_case_and_order():
    found = metrics.compare(["A b", "a b", "b a"], ["A b", "A b", "a b"], with_bleu=False)
    assert found.exact_match.tolist() == [True, False, False]
    assert found.word_f1[2] == 1


def test_every_figure_has_an_error_and_a_number_of_texts(sacrebleu):
    overlap = metrics.compare(WRITTEN, REFERENCES)
    for found in (overlap.estimates(), metrics.set_figures(WRITTEN)):
        assert all(
            estimate.n == 4 and estimate.se >= 0 and estimate.unit for estimate in found.values()
        )
    some = overlap.rows(np.array([True, False, True, False])).estimates()
    assert some["word_f1"].n == 2 and some["word_f1"].value == pytest.approx(
        50 * (overlap.word_f1[[0, 2]].sum())
    )


def test_figures_of_a_set_of_known_texts():
    found = {
        name: estimate.value
        for name, estimate in metrics.set_figures(["a a a", "a b", ""]).items()
    }
    assert found["adjacent_repeats"] == pytest.approx(2 / 3)  # of three places after a word
    assert found["repeated_bigrams"] == pytest.approx(0.5 / 3)  # "a a" twice in the first text
    assert found["distinct_2"] == pytest.approx(2 / 3)
    shares = np.array([4, 1]) / 5
    assert found["unigram_entropy"] == pytest.approx(-(shares * np.log(shares)).sum())
    assert found["words_per_text"] == pytest.approx(5 / 3)


def test_sets_without_words_have_figures_too():
    assert {estimate.value for estimate in metrics.set_figures(["", ""]).values()} == {0}


def test_the_jackknife_error_is_that_of_leaving_each_text_out():
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{word}" for word in rng.integers(0, 12, 9)) for _ in range(30)]
    found = metrics.set_figures(texts)
    for name in ("distinct_2", "unigram_entropy"):
        left = [metrics.set_figures(texts[:i] + texts[i + 1 :])[name].value for i in range(30)]
        assert found[name].se == pytest.approx(np.std(left) * np.sqrt(29))
