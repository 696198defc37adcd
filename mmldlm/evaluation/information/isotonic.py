"""Isotonic regression: the nearest curve that never rises."""

from __future__ import annotations

import numpy as np


def decreasing_fit(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the weighted least-squares fit that never rises: [N] fp64.

    Pool adjacent violators (Ayer et al., 1955): neighbors in the wrong order get their common
    mean.

    Args:
        values: [N].
        weights: [N], positive.
    """
    blocks: list[tuple[float, float, int]] = []  # mean, weight, size
    for value, weight in zip(
        np.asarray(values, np.float64), np.asarray(weights, np.float64), strict=True
    ):
        mean, total, size = float(value), float(weight), 1
        while blocks and blocks[-1][0] < mean:
            before, own, count = blocks.pop()
            mean = (mean * total + before * own) / (total + own)
            total, size = total + own, size + count
        blocks.append((mean, total, size))
    return np.repeat([block[0] for block in blocks], [block[2] for block in blocks])
