"""Work in threads next to the training loop: writing a checkpoint, or checking one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mmldlm.checkpoints import commit
from mmldlm.engines.base import Engine
from mmldlm.errors import Interrupted, MmldlmError
from mmldlm.training.state import TrainingState

MIN_POLL, MAX_POLL = 0.005, 0.5  # seconds between two checks whether all ranks are done


class BackgroundTask:
    """A function in a thread; sets `result` or `failure` when it has finished."""

    def __init__(self, work: Callable[[], Any], device: torch.device):
        self.result: Any = None
        self.failure: BaseException | None = None
        self._work, self._device = work, device
        # A daemon thread: a rank that fails for another reason must not wait for its disk.
        self._thread = threading.Thread(target=self._run, name="mmldlm-save", daemon=True)
        self._thread.start()

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            # A new thread starts on GPU 0.
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self.result = self._work()
        except BaseException as error:
            # Whatever fails here is raised on all ranks together.
            self.failure = error


class PendingSave(BackgroundTask):
    """A checkpoint that is being written.

    Args:
        work: Functions that write files of this rank and return their paths.
        metadata: Further entries of the manifest.
    """

    def __init__(
        self,
        pending: commit.PendingCheckpoint,
        state: TrainingState,
        work: list[Callable[[], list[Path]]],
        device: torch.device,
        metadata: dict[str, Any],
    ):
        self.pending, self.metadata = pending, metadata
        self.step, self.consecutive_skips = state.step, state.consecutive_skips
        self.started = time.perf_counter()
        self.stalled: float | None = None  # seconds for which training waited

        def write() -> None:
            pending.write_manifest_entry([path for part in work for path in part()])

        super().__init__(write, device)


def wait_on_all_ranks(
    engine: Engine,
    is_running: Callable[[], bool],
    what: str,
    timeout: float,
    heartbeat: Callable[[], None],
    stop_requested: Callable[[], bool] = lambda: False,
) -> None:
    """Return when the work is finished on all ranks. Collective.

    Polls instead of waiting in one collective, which engine.collective_timeout would end.

    Args:
        is_running: Function that returns whether this rank's work is running.
        what: Name of the work, for errors.
        timeout: Longest wait in seconds.
        heartbeat: Function called between polls.
        stop_requested: Function that returns whether this rank got a stop signal.

    Raises:
        MmldlmError: on every rank, when one of them takes longer than the timeout.
        Interrupted: on every rank, when one of them was asked to stop.
    """
    started, pause = time.monotonic(), MIN_POLL
    while True:
        running = is_running()
        is_late = running and time.monotonic() - started > timeout
        local = engine.to_device([running, is_late, stop_requested()])
        num_running, num_late, num_stops = engine.sum_on_host(local)
        if not num_running:
            return
        if num_stops:
            raise Interrupted(
                f"stopped by a signal while {what}; the checkpoints are as they were"
            )
        if num_late:
            late = engine.gather_messages(f"not finished after {timeout:g} s" if is_late else None)
            raise MmldlmError(
                f"{what} takes longer than checkpoints.save_timeout={timeout:g} s:"
                f" {'; '.join(late[:4])}. Check the disk of logging.save_dir, or allow more."
            )
        heartbeat()
        time.sleep(pause)
        pause = min(2 * pause, MAX_POLL)
