"""Mean and spread of the last finite values: what "a spike" is measured against."""

from __future__ import annotations

import math
from collections import deque


class SpikeWindow:
    """The last `size` values that were finite and no spikes.

    A value is a spike when it lies more than sigma standard deviations above the mean of at least size / 2 values
    (OLMo's rule, with two gaps closed: a non-finite value never enters, and the window is part of the checkpoint).
    """

    def __init__(self, size: int, sigma: float):
        self.size, self.sigma = size, sigma
        self.values: deque[float] = deque(maxlen=size)

    def limit(self) -> float:
        """Above this a value is a spike; inf while too few values are known."""
        count = len(self.values)
        if count < max(self.size // 2, 2):
            return math.inf
        mean = math.fsum(self.values) / count
        variance = math.fsum((value - mean) ** 2 for value in self.values) / count
        return mean + self.sigma * math.sqrt(variance)

    def is_spike(self, value: float) -> bool:
        """Whether a finite value is one; it does not enter the window."""
        return value > self.limit()

    def admit(self, value: float) -> None:
        """Let a value into the window; non-finite ones are left out."""
        if math.isfinite(value):
            self.values.append(value)

    def state(self) -> list[float]:
        """For the checkpoint."""
        return list(self.values)

    def restore(self, values: list[float]) -> None:
        """From a checkpoint."""
        self.values = deque(values, maxlen=self.size)
