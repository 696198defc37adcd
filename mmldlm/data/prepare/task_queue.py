"""The ranks that prepare data together: they claim tasks from a counter, wait for one another, and fail as one.

What is claimed lives in the launch's key-value store (torchrun's, or rank 0's) and dies with the launch; what is done
lives on the disk. So a killed launch leaves no claim behind, and the next one may have any number of ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from mmldlm.errors import EXIT_FAILED, EXIT_INTERRUPTED, MmldlmError

_POLL = 0.1  # seconds
_FAILED, _GONE = "failed", "gone"
SHUTDOWN_DELAY = 3.0  # seconds that a failing rank 0 keeps the store for those who still have to read why


class RankFailed(MmldlmError):
    """Another rank failed.

    Attributes:
        is_told: that rank reports it itself.
    """

    def __init__(self, message: str, exit_code: int, is_told: bool):
        self.exit_code, self.is_told = exit_code, is_told
        super().__init__(message)


class TaskQueue:
    """One process that works alone.

    Attributes:
        rank, world_size, local_rank: of this process.
    """

    rank, world_size, local_rank = 0, 1, 0

    def __init__(self):
        self._counts: dict[str, int] = {}

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter that all ranks share; returns its new value."""
        self._counts[key] = self._counts.get(key, 0) + amount
        return self._counts[key]

    def claim(self, stage: str, count: int) -> Iterator[int]:
        """Tasks of range(count), each given to one rank only, in order."""
        while (task := self.add(f"{stage}/next") - 1) < count:
            self.check()
            yield task

    def check(self) -> None:
        """Leave with the others: called between two batches of work.

        Raises:
            RankFailed: another rank has failed, or was asked to stop.
        """

    def barrier(self, stage: str) -> None:
        """Wait until every rank has come here; each name may be used once."""

    def first_alone(self, stage: str, work: Callable[[], None]) -> None:
        """Rank 0 does `work` while the others wait for it."""
        work()

    def failed(self, error: BaseException) -> None:
        """Tell the waiting ranks that this one will not come."""

    def speaks(self) -> bool:
        """Whether this rank reports its failure: of several that found the same mistake only the first does."""
        return True

    def close(self) -> None:
        """Rank 0 keeps the store until the others have read what they wait for."""


class StoreTaskQueue(TaskQueue):
    """Ranks of one launch (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), tied by a key-value store and nothing else.

    Raises:
        RankFailed: in every method that waits, as soon as another rank has failed or rank 0 is gone.
    """

    def __init__(self, timeout: float = 1800.0):
        import torch.distributed as dist

        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self._has_failed = False
        self._store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))

    def add(self, key: str, amount: int = 1) -> int:
        return self._ask(lambda: self._store.add(key, amount))

    def barrier(self, stage: str) -> None:
        arrived = self.add(f"{stage}/arrived")
        while arrived < self.world_size:
            self.check()
            time.sleep(_POLL)
            arrived = self.add(f"{stage}/arrived", 0)

    def first_alone(self, stage: str, work: Callable[[], None]) -> None:
        if self.rank == 0:
            work()
        self.barrier(stage)

    def failed(self, error: BaseException) -> None:
        if self._has_failed:
            return
        self._has_failed = True
        code = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", EXIT_FAILED)
        first = (str(error).splitlines() or [type(error).__name__])[0]
        try:
            self._store.set(_FAILED, f"{code} rank {self.rank}: {first}")
            self._store.add(_GONE, 1)
            deadline = time.monotonic() + SHUTDOWN_DELAY
            while self.rank == 0 and self._store.add(_GONE, 0) < self.world_size and time.monotonic() < deadline:
                time.sleep(_POLL)
        except Exception:  # rank 0, which keeps the store, is gone: the others see that by themselves
            pass

    def speaks(self) -> bool:
        try:
            return self._store.add("spoke", 1) == 1
        except Exception:
            return True

    def close(self) -> None:
        gone = self.add(_GONE)
        while self.rank == 0 and gone < self.world_size:
            self.check()
            time.sleep(_POLL)
            gone = self.add(_GONE, 0)

    def check(self) -> None:
        if self._ask(lambda: self._store.check([_FAILED])):
            code, message = self._ask(lambda: self._store.get(_FAILED)).decode().split(" ", 1)
            self.add(_GONE)
            raise RankFailed(message, int(code), is_told=True)

    def _ask(self, question: Callable):
        try:
            return question()
        except Exception as error:  # the store's errors are of many kinds, all of them mean this
            raise RankFailed(f"rank 0 is gone ({type(error).__name__})", EXIT_FAILED, is_told=False) from error


def connect() -> TaskQueue:
    """The ranks of this launch: several under torchrun or `mmldlm prepare --num-procs`, else this process alone."""
    return StoreTaskQueue() if int(os.environ.get("WORLD_SIZE", 1)) > 1 else TaskQueue()
