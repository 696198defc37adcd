"""Estimates with their standard errors, and the pairing of sentences."""

from __future__ import annotations

import numpy as np
import pytest

from mmldlm.evaluation.statistics import (
    Estimate,
    derangement,
    mean,
    paired_bootstrap,
    ratio,
)


def test_ratio_and_its_error_match_repeated_sampling():
    rng = np.random.default_rng(0)

    def draw():
        lengths = rng.integers(3, 40, size=300).astype(float)
        return lengths * 2.0 + rng.standard_normal(300) * lengths**0.5, lengths

    found = [ratio(*draw()) for _ in range(400)]
    values, errors = (
        np.array([item.value for item in found]),
        np.array([item.se for item in found]),
    )
    assert abs(values.mean() - 2.0) < 0.002
    assert 0.85 < errors.mean() / values.std() < 1.15


def test_mean_and_its_error():
    found = mean(np.array([0.0, 1.0, 1.0, 0.0]), "share", scale=100)
    assert (
        found.value == 50
        and found.se == pytest.approx(100 * np.sqrt(1 / 3) / 2)
        and found.unit == "share"
    )


def test_zero_gain_counts_as_no_standard_errors():
    assert Estimate(0.0, 0.0).in_standard_errors == 0.0
    assert Estimate(-0.3, 0.1).in_standard_errors == pytest.approx(3)
    assert Estimate(0.3, 0.0).in_standard_errors == float("inf")


@pytest.mark.parametrize("count", [2, 3, 10, 1000])
def test_no_sentence_is_paired_with_itself(count):
    partner = derangement(count, seed=1)
    assert (partner != np.arange(count)).all() and sorted(partner) == list(range(count))
    assert (derangement(count, seed=1) == partner).all()


def test_equal_texts_are_not_paired():
    names = ["cat"] * 5 + ["dog"] * 4 + ["owl"]
    partner = derangement(10, 1, names)
    assert sorted(partner) == list(range(10)) and all(
        names[i] != names[j] for i, j in enumerate(partner)
    )
    assert (derangement(10, 1, [str(i) for i in range(10)]) == derangement(10, 1)).all()
    assert sorted(derangement(4, 1, ["one"] * 4)) == [0, 1, 2, 3]  # cannot be helped


def test_the_paired_bootstrap_of_known_data():
    """A constant difference has an interval of length 0, however much the sentences differ among
    themselves.
    """
    values = np.random.default_rng(0).standard_normal(200) * 50
    found = paired_bootstrap(values + 3, values)
    assert (found.value, found.low, found.high) == pytest.approx((3, 3, 3)) and found.n == 200
    assert found.as_dict()["ci95"] == [found.low, found.high]


def test_the_interval_of_the_bootstrap_is_that_of_the_normal_law():
    rng = np.random.default_rng(1)
    first, second = rng.standard_normal((2, 400))
    found, error = paired_bootstrap(first, second, seed=3), mean(first - second)
    assert found.value == pytest.approx(error.value)
    assert found.low == pytest.approx(error.value - 1.96 * error.se, abs=0.15 * error.se)
    assert found.high == pytest.approx(error.value + 1.96 * error.se, abs=0.15 * error.se)
    assert (
        found == paired_bootstrap(first, second, seed=3) != paired_bootstrap(first, second, seed=4)
    )


def test_the_bootstrap_of_a_figure_of_the_whole_set():
    counts = np.random.default_rng(2).integers(1, 9, (50, 2))
    found = paired_bootstrap(
        counts, counts[:, ::-1], statistic=lambda rows: rows[:, 0].sum() / rows[:, 1].sum()
    )
    total = counts.sum(0)
    assert found.value == pytest.approx(total[0] / total[1] - total[1] / total[0])
    assert found.low < found.value < found.high
