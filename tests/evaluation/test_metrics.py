"""Estimates, pairings and scores against what is known of them."""

from __future__ import annotations

import numpy as np
import pytest

from mmldlm.errors import UserError
from mmldlm.evaluation.metrics import retrieval, sts_benchmark, text_overlap
from mmldlm.evaluation.statistics import Estimate, derangement, mean, ratio


def test_ratio_and_its_error_match_repeated_sampling():
    rng = np.random.default_rng(0)

    def draw():
        lengths = rng.integers(3, 40, size=300).astype(float)
        return lengths * 2.0 + rng.standard_normal(300) * lengths**0.5, lengths

    found = [ratio(*draw()) for _ in range(400)]
    values, errors = np.array([item.value for item in found]), np.array([item.se for item in found])
    assert abs(values.mean() - 2.0) < 0.002
    assert 0.85 < errors.mean() / values.std() < 1.15


def test_mean_and_its_error():
    found = mean(np.array([0.0, 1.0, 1.0, 0.0]), "share", scale=100)
    assert found.value == 50 and found.se == pytest.approx(100 * np.sqrt(1 / 3) / 2) and found.unit == "share"


def test_zero_gain_counts_as_no_standard_errors():
    assert Estimate(0.0, 0.0).in_standard_errors == 0.0
    assert Estimate(-0.3, 0.1).in_standard_errors == pytest.approx(3)
    assert Estimate(0.3, 0.0).in_standard_errors == float("inf")


@pytest.mark.parametrize("count", [2, 3, 10, 1000])
def test_no_sentence_is_paired_with_itself(count):
    partner = derangement(count, seed=1)
    assert (partner != np.arange(count)).all() and sorted(partner) == list(range(count))
    assert (derangement(count, seed=1) == partner).all()


def test_set_f1():
    found = text_overlap.token_f1([[1, 2, 2, 3], [4], [], [5, 6]], [[3, 2, 9], [5], [1], [6, 5, 5]])
    np.testing.assert_allclose(found, [2 * 2 / 6, 0, 0, 1])


def test_exact_match_wants_the_order_too():
    assert text_overlap.exact_match([[1, 2], [1, 2]], [[1, 2], [2, 1]]).tolist() == [True, False]


def test_bleu_of_known_cases():
    reference = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11]]
    assert text_overlap.token_bleu(reference, reference).value == pytest.approx(100)
    assert text_overlap.token_bleu([[1, 1, 1, 1, 1], [9]], reference).value == 0
    # One word of twelve wrong in the middle: precisions 11/12, 9/11, 7/10, 5/9, no brevity.
    text = list(range(12))
    wrong = text.copy()
    wrong[5] = 99
    expected = 100 * np.prod([11 / 12, 9 / 11, 7 / 10, 5 / 9]) ** 0.25
    assert text_overlap.token_bleu([wrong], [text]).value == pytest.approx(expected)
    # A text cut to half pays exp(1 - 2) for brevity and nothing else.
    assert text_overlap.token_bleu([text[:6]], [text]).value == pytest.approx(100 * np.exp(-1))
    assert text_overlap.token_bleu([[1, 1, 1, 1, 1, 1]], [[1, 2, 3, 4, 5, 6]]).value == 0  # counts are clipped


def test_ranks_and_ties():
    pool = np.eye(4)
    assert retrieval.ranks(pool * 3, pool, np.arange(4)).tolist() == [0, 0, 0, 0]
    tilted = np.array([[0.5, 1.0, 0.2, 0.0]])
    assert [int(retrieval.ranks(tilted, pool, np.array([right]))[0]) for right in range(4)] == [1, 0, 2, 3]
    constant = np.ones((4, 4))
    assert retrieval.ranks(constant, pool, np.arange(4)).tolist() == [3, 3, 3, 3]  # alike vectors retrieve nothing
    assert retrieval.cosine_similarity(np.zeros((1, 4)), pool[:1]).tolist() == [0.0]


def test_correlations_of_known_vectors():
    x = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    assert sts_benchmark.spearman(x, np.exp(x)) == pytest.approx(1) and sts_benchmark.pearson(x, -x) == pytest.approx(
        -1
    )
    assert sts_benchmark.average_ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
    assert sts_benchmark.spearman(x, np.ones(5)) == 0.0


def test_sts_files_are_read_or_refused(tmp_path):
    path = tmp_path / "sts.csv"
    rows = (("5.000", 'A "man" runs.', "A man runs."), ("0.0", "One.", "Two words."), ("2", "a", "b"))
    path.write_text("\n".join("\t".join(("genre", "file", "year", "id", *row)) for row in rows))
    pairs = sts_benchmark.read_pairs(str(path))
    assert pairs.first[0] == 'A "man" runs.' and pairs.scores.tolist() == [5, 0, 2]
    assert sts_benchmark.bag_similarities(pairs, weighted=False)[0] == pytest.approx(1)
    path.write_text("a\tb\n")
    for bad in (path, tmp_path / "absent.csv"):
        with pytest.raises(UserError, match="STS Benchmark"):
            sts_benchmark.read_pairs(str(bad))
