"""Heartbeats of a training script of the user's own: `mmldlm.heartbeat(step)` sends them, and the
watcher finds the ranks that have stopped.

A thread of the rank writes them into a small file that the node agent reads. There is no
collective and no store, so that a script may send them without a process group, or from some ranks
alone; a run of mmldlm has distributed/heartbeat.py.
"""

from __future__ import annotations

import functools
import math
import os
import socket
import threading
import time
from dataclasses import replace

from mmldlm.distributed.failure_attribution import (
    EXITED,
    FailureReport,
    HeartbeatRecord,
    Observation,
    Timeouts,
    find_failed_ranks,
)
from mmldlm.errors import EXIT_DONE
from mmldlm.launch import state_files
from mmldlm.launch.rank_wrapper import LAUNCH_ID_VAR, heartbeat_file, rank_from_environment
from mmldlm.utils.formatting import join_some

# Seconds, as engine.collective_timeout of mmldlm's own runs.
HEARTBEAT_TIMEOUT = 600.0
# Seconds between two looks at the main thread.
_INTERVAL = 1.0


class _Reporter:
    """Keeps the file of this rank true; watches the thread that creates it."""

    def __init__(self) -> None:
        self._identity = HeartbeatRecord(
            rank_from_environment(), socket.gethostname(), os.getpid(), phase=""
        )
        self._watched = threading.get_ident()
        self._launch = os.environ[LAUNCH_ID_VAR]
        # The last step, and how many heartbeats there have been.
        self._last = 0, 0
        self._written: HeartbeatRecord | None = None
        threading.Thread(target=self._loop, name="heartbeat", daemon=True).start()

    def beat(self, step: int) -> None:
        """Costs a tuple; no lock, no file."""
        self._last = int(step), self._last[1] + 1

    def _loop(self) -> None:
        while True:
            time.sleep(_INTERVAL)
            self._write()

    def _write(self) -> None:
        step, number = self._last
        record = replace(self._identity, number=number, step=step, progress_counter=step)
        if self._written is not None and number == self._written.number:
            # Here, because a script that sends none needs no torch.
            from mmldlm.distributed.stack_dump import current_location

            location, in_collective = current_location(self._watched)
            record = replace(record, location=location, in_collective=in_collective)
        if record != self._written:
            self._written = record
            name = heartbeat_file(socket.gethostname(), record.rank)
            state_files.write_anywhere(self._launch, name, record.to_text())


@functools.cache
def reporter() -> _Reporter:
    """Return the reporter of this rank, under `mmldlm launch`."""
    return _Reporter()


class HangWatch:
    """The ranks that have sent a heartbeat, and since when each has sent no other.

    Args:
        limit: Seconds without a heartbeat after which a rank counts as hung.
    """

    def __init__(self, limit: float):
        self._limits = Timeouts(limit, unseen=math.inf, grace=math.inf)
        self._observations: dict[int, Observation] = {}

    def find_hung(self, views: dict[str, dict], now: float) -> FailureReport | None:
        """Return the ranks furthest behind, once none of them has sent a heartbeat for the limit:
        those ahead wait for them. A rank that never sent one is not watched, and the report says
        so.

        Args:
            views: Answers of the nodes (see outcome.py).
            now: Time in monotonic seconds.
        """
        silent = []
        for node, view in views.items():
            for state in view["ranks"]:
                if state.get("heartbeat") is None:
                    silent.append(state["rank"])
                else:
                    self._observe(node, state, now)
        found = find_failed_ranks(self._observations.values(), now, self._limits)
        if found is None or not silent:
            return found
        never = f"; no heartbeat ever came from rank {join_some(sorted(silent), 8)}"
        return replace(found, sentence=found.sentence + never)

    def _observe(self, node: str, state: dict, now: float) -> None:
        beat = replace(HeartbeatRecord(**state["heartbeat"]), host=node)
        if state["exit"] == EXIT_DONE:
            beat = replace(beat, state=EXITED)
        seen_at = now
        if (before := self._observations.get(beat.rank)) and before.beat.number == beat.number:
            seen_at = before.seen_at
        self._observations[beat.rank] = Observation(beat, seen_at)
