"""Ranks that prepare data together: they claim tasks from a shared counter, wait for each other,
and fail together.

Claims are kept in the key-value store of the launch (torchrun's, or rank 0's) and end with the
attempt; results are files. So a killed attempt leaves no claims behind, and the next one may have
any number of ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from mmldlm.errors import EXIT_FAILED, EXIT_INTERRUPTED, MmldlmError
from mmldlm.utils.environment import int_from_env
from mmldlm.utils.job_store import connect_job_store
from mmldlm.utils.streams import print_line

# In seconds.
_POLL = 0.1
_FAILED_KEY, _DONE_KEY = "failed", "gone"
# Seconds that a failing rank 0 keeps the store, so that the other ranks can read the reason.
SHUTDOWN_DELAY = 3.0


class RankFailed(MmldlmError):
    """Another rank failed.

    Attributes:
        already_reported: Whether that rank reports the error itself.
    """

    def __init__(self, message: str, exit_code: int, already_reported: bool):
        self.exit_code, self.already_reported = exit_code, already_reported
        super().__init__(message)


class TaskQueue:
    """The tasks of a process that works alone.

    Attributes:
        rank, world_size, local_rank: Position of this process among the ranks.
    """

    rank, world_size, local_rank = 0, 1, 0

    def __init__(self):
        self._counts: dict[str, int] = {}

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter that all ranks share; return its new value."""
        self._counts[key] = self._counts.get(key, 0) + amount
        return self._counts[key]

    def claim(self, stage: str, count: int) -> Iterator[int]:
        """Yield tasks of range(count) in order, each on one rank only."""
        while (task := self.add(f"{stage}/next") - 1) < count:
            self.check()
            yield task

    def check(self) -> None:
        """Raise if another rank has failed; called between two batches of work.

        Raises:
            RankFailed: another rank has failed or was interrupted.
        """

    def barrier(self, stage: str) -> None:
        """Wait until every rank has called this; each name may be used once."""

    def rank_0_first(self, stage: str, work: Callable[[], None]) -> None:
        """Run `work` on rank 0 while the other ranks wait for it."""
        work()

    def announce_failure(self, error: BaseException) -> None:
        """Report to the other ranks that this rank has failed, if it is not them that have, and
        wait on rank 0 until they leave.
        """

    def is_reporter(self) -> bool:
        """Whether this rank prints its error: of several ranks with the same error only the first
        does.
        """
        return True

    def close(self) -> None:
        """Wait, on rank 0, until the other ranks do not need the store any more."""


class StoreTaskQueue(TaskQueue):
    """The tasks of the ranks of one launch (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), in a
    key-value store.

    Raises:
        RankFailed: in every method that waits, as soon as another rank has failed or rank 0 is
            gone.
    """

    def __init__(self, timeout: float = 1800.0):
        self._has_failed = False
        self._store, self.rank, self.world_size = connect_job_store(
            timeout, lambda line: print_line(line, sys.stderr)
        )
        self.local_rank = int_from_env("LOCAL_RANK", 0)

    def add(self, key: str, amount: int = 1) -> int:
        return self._call(lambda: self._store.add(key, amount))

    def barrier(self, stage: str) -> None:
        arrived = self.add(f"{stage}/arrived")
        while arrived < self.world_size:
            self.check()
            time.sleep(_POLL)
            arrived = self.add(f"{stage}/arrived", 0)

    def rank_0_first(self, stage: str, work: Callable[[], None]) -> None:
        if self.rank == 0:
            work()
        self.barrier(stage)

    def announce_failure(self, error: BaseException) -> None:
        if self._has_failed:
            return
        self._has_failed = True
        code = (
            EXIT_INTERRUPTED
            if isinstance(error, KeyboardInterrupt)
            else getattr(error, "exit_code", EXIT_FAILED)
        )
        first = (str(error).splitlines() or [type(error).__name__])[0]
        try:
            if not isinstance(error, RankFailed):
                self._store.set(_FAILED_KEY, f"{code} rank {self.rank}: {first}")
                self._store.add(_DONE_KEY, 1)
            deadline = time.monotonic() + SHUTDOWN_DELAY
            while (
                self.rank == 0
                and self._store.add(_DONE_KEY, 0) < self.world_size
                and time.monotonic() < deadline
            ):
                time.sleep(_POLL)
        except Exception:
            # Rank 0, which keeps the store, is gone: the other ranks notice it themselves.
            pass

    def is_reporter(self) -> bool:
        try:
            return self._store.add("reporters", 1) == 1
        except Exception:
            return True

    def close(self) -> None:
        num_done = self.add(_DONE_KEY)
        while self.rank == 0 and num_done < self.world_size:
            self.check()
            time.sleep(_POLL)
            num_done = self.add(_DONE_KEY, 0)

    def check(self) -> None:
        if self._call(lambda: self._store.check([_FAILED_KEY])):
            code, message = self._call(lambda: self._store.get(_FAILED_KEY)).decode().split(" ", 1)
            self.add(_DONE_KEY)
            raise RankFailed(message, int(code), already_reported=True)

    def _call(self, operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except Exception as error:
            # The store raises many types, all of them for a lost connection.
            raise RankFailed(
                f"rank 0 is gone ({type(error).__name__})", EXIT_FAILED, already_reported=False
            ) from error


def connect() -> TaskQueue:
    """Connect the ranks of this launch: torchrun's or `mmldlm prepare --num-procs`; else this
    process alone.
    """
    return StoreTaskQueue() if int_from_env("WORLD_SIZE", 1) > 1 else TaskQueue()
