"""Work beside the training loop: a checkpoint on its way to the disk, or one whose bytes are checked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from mmldlm.checkpoints import commit
from mmldlm.engines.base import Engine
from mmldlm.errors import Interrupted, MmldlmError
from mmldlm.training.state import TrainingState

MIN_POLL, MAX_POLL = 0.005, 0.5  # seconds between two questions whether all ranks are done


class BackgroundTask:
    """A function in a thread of its own: `result` or `failure` when it is done."""

    def __init__(self, work: Callable[[], Any], device: torch.device):
        self.result: Any = None
        self.failure: BaseException | None = None
        self._work, self._device = work, device
        # A daemon: a rank that dies of something else must not wait for its disk.
        self._thread = threading.Thread(target=self._run, name="mmldlm-save", daemon=True)
        self._thread.start()

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":  # a new thread's is GPU 0, whichever rank this is
                torch.cuda.set_device(self._device)
            self.result = self._work()
        except BaseException as error:  # told to the ranks together; nothing may pass for success
            self.failure = error


class PendingSave:
    """One checkpoint on its way to the disk."""

    def __init__(self, pending: commit.PendingCheckpoint, state: TrainingState, work: list[Callable[[], None]], device):
        self.pending, self.step, self.consecutive_skips = pending, state.step, state.consecutive_skips
        self.started, self.stalled = time.perf_counter(), None
        self._background = BackgroundTask(lambda: [part() for part in work], device)

    @property
    def failure(self) -> BaseException | None:
        return self._background.failure

    def is_running(self) -> bool:
        return self._background.is_running()


def wait_on_all_ranks(
    engine: Engine,
    is_running: Callable[[], bool],
    what: str,
    timeout: float,
    still: Callable[[], None],
    asked_to_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Return when no rank is at it any more. Collective.

    Asks again and again instead of waiting in one collective, which engine.timeout would end.

    Args:
        still: says that this rank lives, engine.timeout or not. asked_to_stop: whether this rank got a stop signal.

    Raises:
        MmldlmError: on every rank, when one of them takes longer than timeout seconds.
        Interrupted: on every rank, when one of them was asked to stop.
    """
    started, pause = time.monotonic(), MIN_POLL
    while True:
        running = is_running()
        is_late = running and time.monotonic() - started > timeout
        told = engine.to_device([running, is_late, asked_to_stop()])
        num_running, num_late, num_stops = engine.sum_on_host(told)
        if not num_running:
            return
        if num_stops:
            raise Interrupted(f"stopped by a signal while {what}; the checkpoints are as they were")
        if num_late:
            late = engine.gather_messages(f"still at it after {timeout:g} s" if is_late else None)
            raise MmldlmError(
                f"{what} takes longer than checkpoints.save_timeout={timeout:g} s: {'; '.join(late[:4])}. Check the "
                "disk of logging.save_dir, or allow more."
            )
        still()
        time.sleep(pause)
        pause = min(2 * pause, MAX_POLL)
