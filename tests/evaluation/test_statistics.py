"""Estimates with their standard errors, and the pairing of sentences."""

from __future__ import annotations

import numpy as np
import pytest

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
