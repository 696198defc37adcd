"""Track the fraction of bad samples and stop the run when it is too high, as when storage
fails.
"""

from __future__ import annotations

from collections import deque

WINDOW = 100  # global batches
MIN_BATCHES = 20  # with fewer, one bad batch would be a high fraction


class BadSampleRate:
    """Fraction of bad samples in the last WINDOW global batches.

    It is part of the checkpoint, so that a resumed run stops at the same step as an uninterrupted
    one. A checkpoint never holds a window above the limit, because the run ends first: after the
    data is repaired, the run can resume.

    Args:
        limit: stability.max_bad_sample_fraction.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self._batches: deque[tuple[int, int]] = deque(maxlen=WINDOW)

    def update(self, num_bad: int, num_samples: int) -> None:
        """Count one global batch; both numbers are sums over all ranks."""
        self._batches.append((num_bad, num_samples))

    def check(self) -> str | None:
        """Return a message if the fraction in the window is above the limit, else None."""
        num_bad, num_samples = (
            (sum(column) for column in zip(*self._batches)) if self._batches else (0, 0)
        )
        if len(self._batches) < MIN_BATCHES or num_bad <= self.limit * num_samples:
            return None
        return (
            f"{num_bad} of the {num_samples} samples of the last {len(self._batches)} global"
            f" batches were bad ({num_bad / num_samples:.0%}, above"
            f" stability.max_bad_sample_fraction={self.limit:g})"
        )

    def state(self) -> list[tuple[int, int]]:
        """Return the state for the checkpoint."""
        return list(self._batches)

    def restore(self, batches: list[tuple[int, int]]) -> None:
        """Restore the state of a checkpoint."""
        self._batches = deque(map(tuple, batches), maxlen=WINDOW)
