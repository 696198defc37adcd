"""Estimates with their standard errors over sentences, paired differences, and the pairing of the
shuffled control.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from mmldlm.utils.counter_rng import Stream, generator

BOOTSTRAP_DRAWS = 2000


@dataclass(frozen=True)
class Estimate:
    """A value, its standard error over sentences, its unit, and the number of sentences (None: not
    from sentences).
    """

    value: float
    se: float
    unit: str = ""
    n: int | None = None

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready dict."""
        return asdict(self)

    @property
    def in_standard_errors(self) -> float:
        """|value| / se; 0 if the value is exactly 0 (an untrained adaLN-Zero model ignores its
        condition exactly).
        """
        if self.value == 0:
            return 0.0
        return abs(self.value) / self.se if self.se > 0 else float("inf")


@dataclass(frozen=True)
class Difference:
    """A paired difference between two arms: its value, the 95 % interval of the bootstrap, its
    unit, and n pairs.
    """

    value: float
    low: float
    high: float
    unit: str = ""
    n: int | None = None

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready dict."""
        return {"value": self.value, "ci95": [self.low, self.high], "unit": self.unit, "n": self.n}


def mean(values: np.ndarray, unit: str = "", scale: float = 1.0) -> Estimate:
    """Return the mean of [N] values, numbers or bools, of independent sentences, N >= 2."""
    values = np.asarray(values, dtype=np.float64) * scale
    return Estimate(
        float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))), unit, len(values)
    )


def ratio(numerator: np.ndarray, denominator: np.ndarray, unit: str = "") -> Estimate:
    """Return sum(numerator) / sum(denominator) over sentences, both [N]; standard error by the
    delta method.
    """
    numerator, denominator = (
        np.asarray(numerator, dtype=np.float64),
        np.asarray(denominator, dtype=np.float64),
    )
    total = denominator.sum()
    if total == 0:
        return Estimate(0.0, 0.0, unit)
    value = numerator.sum() / total
    residual = numerator - value * denominator
    return Estimate(
        float(value),
        float(residual.std(ddof=1) * np.sqrt(len(residual)) / total),
        unit,
        len(residual),
    )


def paired_bootstrap(
    first: np.ndarray,
    second: np.ndarray,
    seed: int = 0,
    statistic: Callable[[np.ndarray], float] = np.mean,
    unit: str = "",
) -> Difference:
    """Return statistic(first) - statistic(second), with the interval of the percentiles 2.5 and
    97.5.

    Every draw takes the same sentences with replacement in both arms (Koehn, EMNLP 2004), so that
    what is hard for both does not widen the interval. Another batch of sentences is covered;
    another training seed is not.

    Args:
        first, second: [N] or [N, K] figures of the same N sentences.
        seed: Seed of the draws, which are the same for the same N.
        statistic: Function from rows of either to a number.
    """
    assert len(first) == len(second) > 1
    choose, count = generator(seed, Stream.PAIRED_BOOTSTRAP), len(first)
    found = np.empty(BOOTSTRAP_DRAWS)
    for draw in range(BOOTSTRAP_DRAWS):
        rows = choose.integers(0, count, count)
        found[draw] = statistic(first[rows]) - statistic(second[rows])
    low, high = np.percentile(found, [2.5, 97.5])
    return Difference(
        float(statistic(first) - statistic(second)), float(low), float(high), unit, count
    )


def derangement(count: int, seed: int, names: Sequence[str] | None = None) -> np.ndarray:
    """Return a permutation [count] int64 without fixed points; count >= 2.

    Args:
        names: Names of what is permuted; if possible, none gets a partner of its own name.
    """
    assert count >= 2
    order = generator(seed, Stream.SHUFFLED_PARTNERS).permutation(count)
    result = np.empty(count, dtype=np.int64)
    result[order] = np.roll(order, -1)
    if names is not None and len(set(names)) < count:
        _part_equal_names(result, names)
    return result


def _part_equal_names(partners: np.ndarray, names: Sequence[str]) -> None:
    """Exchange partners that have the name of what they are paired with, so that both have another
    one.
    """
    for position in range(len(partners)):
        for other in range(len(partners)):
            if names[position] != names[partners[position]]:
                break
            if (
                names[partners[position]] != names[other]
                and names[partners[other]] != names[position]
            ):
                partners[[position, other]] = partners[[other, position]]
