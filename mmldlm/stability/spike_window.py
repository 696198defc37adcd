"""Detect spikes: values far above the mean of the last ones."""

from __future__ import annotations

import math
from collections import deque


class SpikeWindow:
    """The last `size` finite values that were not spikes.

    A value is a spike if it is more than sigma standard deviations above the mean of at least size
    / 2 values. This is OLMo's rule with two additions: non-finite values never enter, and the
    window is part of the checkpoint.
    """

    def __init__(self, size: int, sigma: float):
        self.size, self.sigma = size, sigma
        self.values: deque[float] = deque(maxlen=size)

    def threshold(self) -> float:
        """Return the value above which a value is a spike; inf with too few values."""
        count = len(self.values)
        if count < max(self.size // 2, 2):
            return math.inf
        mean = math.fsum(self.values) / count
        variance = math.fsum((value - mean) ** 2 for value in self.values) / count
        return mean + self.sigma * math.sqrt(variance)

    def is_spike(self, value: float) -> bool:
        """Whether a finite value is a spike. The window is not changed."""
        return value > self.threshold()

    def update(self, value: float) -> None:
        """Add a value to the window, unless it is not finite."""
        if math.isfinite(value):
            self.values.append(value)

    def state(self) -> list[float]:
        """Return the state for the checkpoint."""
        return list(self.values)

    def restore(self, values: list[float]) -> None:
        """Restore the state of a checkpoint."""
        self.values = deque(values, maxlen=self.size)
