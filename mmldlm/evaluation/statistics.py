"""Estimates with their standard errors over sentences, and the pairing for the shuffled control."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from mmldlm.utils.counter_rng import Stream, generator


@dataclass(frozen=True)
class Estimate:
    """A value, its standard error over sentences, and its unit."""

    value: float
    se: float
    unit: str = ""

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready dict."""
        return asdict(self)

    @property
    def in_standard_errors(self) -> float:
        """|value| / se; 0 if the value is exactly 0 (an untrained adaLN-Zero model ignores its condition exactly)."""
        if self.value == 0:
            return 0.0
        return abs(self.value) / self.se if self.se > 0 else float("inf")


def mean(values: np.ndarray, unit: str = "", scale: float = 1.0) -> Estimate:
    """Return the mean of [N] values of independent sentences, N >= 2."""
    values = np.asarray(values, dtype=np.float64) * scale
    return Estimate(float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))), unit)


def ratio(numerator: np.ndarray, denominator: np.ndarray, unit: str = "") -> Estimate:
    """Return sum(numerator) / sum(denominator) over sentences, both [N]; standard error by the delta method."""
    numerator, denominator = np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    total = denominator.sum()
    if total == 0:
        return Estimate(0.0, 0.0, unit)
    value = numerator.sum() / total
    residual = numerator - value * denominator
    return Estimate(float(value), float(residual.std(ddof=1) * np.sqrt(len(residual)) / total), unit)


def proportion(successes: np.ndarray, unit: str = "") -> Estimate:
    """Return the fraction of True in [N] bool."""
    return mean(successes.astype(np.float64), unit)


def derangement(count: int, seed: int) -> np.ndarray:
    """Return a permutation [count] int64 without fixed points; count >= 2."""
    assert count >= 2
    order = generator(seed, Stream.SHUFFLED_PARTNERS).permutation(count)
    result = np.empty(count, dtype=np.int64)
    result[order] = np.roll(order, -1)
    return result
