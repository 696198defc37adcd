"""How much of the data is bad: one sample is left out and named, a file system that is gone must end the run."""

from __future__ import annotations

from collections import deque

WINDOW = 100  # global batches
MIN_BATCHES = 20  # before so many are known, an unlucky batch would be a high share


class BadSampleRate:
    """Bad samples among all samples of the last WINDOW global batches.

    It is part of the checkpoint, so that a resumed run stops where an uninterrupted one does. A checkpoint never holds
    one above the limit (the run has ended by then): after the data is mended, a resume is not refused by its past.

    Args:
        limit: stability.max_bad_share.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self._batches: deque[tuple[int, int]] = deque(maxlen=WINDOW)

    def admit(self, num_bad: int, num_samples: int) -> None:
        """Count one global batch; both numbers are of all ranks."""
        self._batches.append((num_bad, num_samples))

    def trouble(self) -> str | None:
        """One sentence when more than the limit of the window is bad, else None."""
        num_bad, num_samples = (sum(column) for column in zip(*self._batches)) if self._batches else (0, 0)
        if len(self._batches) < MIN_BATCHES or num_bad <= self.limit * num_samples:
            return None
        return (
            f"{num_bad} of the {num_samples} samples of the last {len(self._batches)} global batches were bad "
            f"({num_bad / num_samples:.0%}, above stability.max_bad_share={self.limit:g})"
        )

    def state(self) -> list[tuple[int, int]]:
        """For the checkpoint."""
        return list(self._batches)

    def restore(self, batches: list[tuple[int, int]]) -> None:
        """From a checkpoint."""
        self._batches = deque(map(tuple, batches), maxlen=WINDOW)
