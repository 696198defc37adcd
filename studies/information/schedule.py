"""Schedules of T passes in a random order: the even one, and the best one for a measured curve."""

from __future__ import annotations

import numpy as np


def even_schedule(length: int, passes: int) -> list[int]:
    """Return the positions of each pass, as even as possible, the larger ones first; min(passes,
    length) passes.

    After pass k of T, ceil(k L / T) positions are filled, as by the sampler `confidence` on a
    log-linear schedule.
    """
    passes = min(passes, length)
    filled = [-(-length * k // passes) for k in range(passes + 1)]
    return np.diff(filled).tolist()


def schedule_cost(curve: np.ndarray, counts: list[int]) -> float:
    """Return NELBO_T = sum_i n_i c(r_i) in nats: r_i positions are known before pass i, which
    fills n_i.

    Args:
        curve: c(j). [L]
        counts: n_1 .. n_T, positive, of sum L.
    """
    known = np.cumsum([0, *counts[:-1]])
    return float(np.dot(counts, curve[known]))


def optimal_schedules(curve: np.ndarray, passes: int) -> dict[int, list[int]]:
    """Return the cheapest schedule of every number of passes up to `passes` (at most L), by
    dynamic programming.

    With best[t][r] the least cost of filling r positions in t passes, best[t + 1][s] is the
    minimum over r < s of best[t][r] + (s - r) c(r): O(T L^2). Of equal costs, the schedule whose
    last passes are the smallest.

    Args:
        curve: c(j). [L]
    """
    length = len(curve)
    filled = np.arange(length + 1)
    # step[r, s]: cost of filling positions r .. s - 1 in one pass.
    step = np.where(
        filled > filled[:-1, None], (filled - filled[:-1, None]) * curve[:, None], np.inf
    )
    best = np.full(length + 1, np.inf)
    best[0] = 0.0
    origins, schedules = [], {}
    for number in range(1, min(passes, length) + 1):
        costs = best[:-1, None] + step
        origin = length - 1 - costs[::-1].argmin(0)  # the last of equals
        best = costs[origin, filled]
        origins.append(origin)
        schedules[number] = _trace_back(origins, length)
    return schedules


def _trace_back(origins: list[np.ndarray], length: int) -> list[int]:
    counts, at = [], length
    for origin in reversed(origins):
        counts.append(int(at - origin[at]))
        at = int(origin[at])
    return counts[::-1]
