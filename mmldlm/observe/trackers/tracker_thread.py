"""A thread per tracker, so that a service that stops answering delays neither a step nor the
end.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from mmldlm.observe.trackers.base import Tracker
from mmldlm.utils.formatting import first_line

FINISH_SECONDS = 60.0  # for the upload of what is left
STOP_SECONDS = 5.0  # the same, once the process was asked to end
OPEN_SECONDS = 180.0  # wandb's own limit is 90
_MAX_WAITING = 10_000  # records that a service which does not take them may leave waiting
_POLL = 0.2

Job = Callable[[], object]


class TrackerError(Exception):
    """A tracker raised an error, or does not answer."""


class TrackerThread:
    """A tracker, and the thread in which all its calls run.

    Args:
        name: Name of the tracker.
        start: Function that opens it.

    Raises:
        BaseException: what `start` raised.
        TrackerError: no answer within OPEN_SECONDS.
    """

    def __init__(self, name: str, start: Callable[[], Tracker]):
        self.name = name
        self._jobs: queue.Queue[Job | None] = queue.Queue(_MAX_WAITING)
        self._error: BaseException | None = None
        self._place: str | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        has_answered = threading.Event()

        def open_tracker() -> None:
            try:
                self._tracker = start()
            except BaseException as error:
                self._error = error
            has_answered.set()

        self._jobs.put(open_tracker)
        is_open = has_answered.wait(OPEN_SECONDS)
        if self._error is not None or not is_open:
            self._jobs.put(None)
            raise self._error or TrackerError(f"no answer within {OPEN_SECONDS:.0f} s")

    def submit(self, call: Callable[[Tracker], object]) -> None:
        """Let the thread make a call, after all earlier ones.

        Raises:
            TrackerError: an earlier call failed, or too many wait.
        """
        self._raise_error()
        try:
            self._jobs.put_nowait(lambda: call(self._tracker))
        except queue.Full:
            raise TrackerError(f"it takes no records: {_MAX_WAITING:,} are waiting") from None

    def finish(self, exit_code: int, stop: Callable[[], bool] = lambda: False) -> str | None:
        """Close the tracker within FINISH_SECONDS; return where its record is.

        Args:
            stop: Whether the process was asked to end; then it has STOP_SECONDS.

        Raises:
            TrackerError: it does not end in time, or an error.
        """
        started, limit = time.monotonic(), FINISH_SECONDS

        def close() -> None:
            self._place = self._tracker.finish(exit_code)

        jobs: list[Job | None] = [close, None]
        while self._thread.is_alive():
            while jobs and not self._jobs.full():
                self._jobs.put_nowait(jobs.pop(0))
            self._thread.join(_POLL)
            waited = time.monotonic() - started
            if stop():
                limit = min(limit, waited + STOP_SECONDS)
            if waited > limit and self._thread.is_alive():
                raise TrackerError(f"the upload did not end within {waited:.0f} s")
        self._raise_error()
        return self._place

    def _raise_error(self) -> None:
        if self._error is not None:
            raise TrackerError(first_line(self._error)) from self._error

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
        except BaseException as error:  # the run must not end by it, whatever it is
            self._error = error
