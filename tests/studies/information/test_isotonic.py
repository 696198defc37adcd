"""Isotonic regression against its definition."""

from __future__ import annotations

import numpy as np
import pytest

from studies.information.curve import decreasing_fit


def test_a_falling_curve_stays_and_a_rising_one_becomes_its_mean():
    values, weights = np.array([5.0, 3.0, 3.0, 1.0]), np.array([1.0, 2.0, 1.0, 4.0])
    assert (decreasing_fit(values, weights) == values).all()
    assert decreasing_fit(values[::-1], weights) == pytest.approx(
        np.full(4, np.average(values[::-1], weights=weights))
    )


def test_the_fit_meets_the_conditions_of_the_optimum():
    """Least squares over a convex cone: the residual is orthogonal to the fit, and no falling step
    can improve it.
    """
    rng = np.random.default_rng(0)
    for _ in range(20):
        values, weights = rng.normal(size=30) - np.linspace(0, 2, 30), rng.gamma(2.0, size=30)
        fit = decreasing_fit(values, weights)
        assert (np.diff(fit) <= 0).all()
        residual = weights * (values - fit)
        assert residual @ fit == pytest.approx(0, abs=1e-9) and residual.sum() == pytest.approx(
            0, abs=1e-9
        )
        # Directions (1, .., 1, 0, .., 0) generate the falling curves.
        assert (np.cumsum(residual) <= 1e-9).all()
