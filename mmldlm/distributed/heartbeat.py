"""Heartbeats: detect a stalled or dead rank, report it, and terminate the job.

Each rank has two threads in addition to its main one. The publishing thread talks to the job's
store (a TCPStore, through its own connection) and publishes this rank's HeartbeatRecord every
interval. On rank 0 it also reads the records of all ranks and looks for failed ones
(`find_failed_ranks`); on the others it reads rank 0's, which holds the result. So N ranks make
O(N) requests per interval. The watchdog thread makes no requests: it ends this process when a
failure is announced, or when rank 0 or the store has been silent too long. A blocking store cannot
stop it.

The store is in rank 0's process, or in torchrun's agent on rank 0's node. Nothing here is a
collective, and the main thread never waits for the store while it trains.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from mmldlm.distributed.collectives import broadcast_object
from mmldlm.distributed.failure_attribution import (
    COLLECTIVE_FAILED,
    EXITED,
    FAILED,
    RUNNING,
    FailureReport,
    HeartbeatRecord,
    Observation,
    Timeouts,
    describe_missing,
    find_failed_ranks,
    report_failed_ranks,
)
from mmldlm.distributed.process_group import limit_collectives
from mmldlm.distributed.stack_dump import (
    current_location,
    describe_error,
    exit_with_stacks,
    is_collective_error,
)
from mmldlm.errors import MmldlmError
from mmldlm.utils.environment import int_from_env
from mmldlm.utils.formatting import first_line, join_some

_KEY = "mmldlm/heartbeat"
_MAX_INTERVAL = 2.0  # seconds between two heartbeats
# Six of them are left for the report to travel, so that the job ends within the timeout.
_INTERVALS_IN_TIMEOUT = 15
MAX_CONNECT_FAILURES = 3  # refused connections after which the store counts as dead
SHUTDOWN_TIMEOUT = 30.0  # seconds from the error to the end of the process
# Seconds without a heartbeat: the publishing thread waits for no rank, so its process died
DEAD_RANK_TIMEOUT = 120.0
# Distance of two rounds of the watchdog, in intervals, above which the process was suspended
_LONGEST_ROUND = 3.0
_POLL = 0.02  # polling interval in seconds


class _Progress(NamedTuple):
    """Last report of the main thread."""

    step: int
    phase: str
    counter: int
    timeout_factor: float
    reported_at: float


class Heartbeat:
    """Heartbeats of this rank and a watchdog over the others, from `__init__` to `close`. Use as a
    context manager.

    The time limit holds for a phase without a report: work that takes longer (evaluation, a save)
    calls `touch`. A rank that waits in a collective for one that still reports is not ended. One
    that waits for a stalled rank is ended together with it, within `timeout` of that rank's last
    report. A phase that cannot report (the compilation in the first step) gets a `timeout_factor`.
    With one rank nothing is watched.

    Leaving the context without an error, or with an MmldlmError (raised by all ranks together), is
    an orderly exit. Any other error is attributed to a rank (`attribute_error`), the result is
    printed, and all ranks end.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout: float,
        logs: Path | None = None,
    ):
        """Connect, and publish the first heartbeat. Collective in that all ranks do it in the same
        order.

        Args:
            rank: Rank of this process.
            world_size: Number of ranks.
            timeout: Time limit in seconds (engine.collective_timeout).
            logs: Folder for the stacks (stack_rank{N}.txt) and the flight recorder's files of a
                rank that is ended.

        Raises:
            torch.distributed.DistError: the store that init_process_group has left at
                MASTER_ADDR:MASTER_PORT cannot be reached.
        """
        self.rank, self.world_size, self.logs = rank, world_size, logs
        self.interval = min(_MAX_INTERVAL, timeout / _INTERVALS_IN_TIMEOUT)
        stalled, unseen = timeout - 6 * self.interval, 4 * self.interval
        self.limits = Timeouts(
            stalled, unseen, grace=7 * self.interval, dead=min(stalled, DEAD_RANK_TIMEOUT)
        )
        self.failure: FailureReport | None = None
        # Alone: by this rank, without rank 0.
        self._failed_at, self._found_alone = 0.0, False
        # Written by the watchdog alone: (time of its last round, seconds not counted until then).
        self._clock = time.monotonic(), 0.0
        self._progress = _Progress(0, "start", 0, 1.0, self._now())
        self._state, self._message = RUNNING, ""
        self._collective_failed_at: float | None = None
        self._main_thread = threading.get_ident()
        self._observations: dict[int, Observation] = {}
        self._printed = threading.Lock()
        self._threads: list[threading.Thread] = []
        if world_size == 1:
            return
        self._stop_publish, self._stop_watchdog, self._wake = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self._deadline: float | None = None  # deadline of a main thread that is exiting
        self._num_published, self._last_contact, self._connect_failures = 0, self._now(), 0
        self._opened_at = self._last_contact
        self._identity = HeartbeatRecord(rank, socket.gethostname(), os.getpid())
        self._address = (
            os.environ.get("MASTER_ADDR", "127.0.0.1"),
            int_from_env("MASTER_PORT", 0),
        )
        self._store = self._connect(timeout)
        self._store.set_timeout(timedelta(seconds=timeout))
        # A process that trains twice, and a restarted attempt under torchrun, find earlier
        # heartbeats in the store.
        self._prefix = f"{_KEY}/{broadcast_object(uuid.uuid4().hex, world_size)}"
        self._publish()
        # Rank 0's host and pid are then known, whatever happens to it next.
        if rank != 0:
            first = HeartbeatRecord.from_text(self._store.get(f"{self._prefix}/0"))
            self._observations[0] = Observation(first, self._now())
        for loop in (self._publish_loop, self._watchdog_loop):
            thread = threading.Thread(target=loop, name=f"heartbeat{loop.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)
        limit_collectives(timeout)  # from here on the watchdog enforces it

    # -- for the main thread ----------------------------------------------------------------------

    def enter_phase(self, step: int, phase: str, timeout_factor: float = 1.0) -> None:
        """Report progress of the main thread. Costs a tuple; no lock, no request, no
        synchronization.

        Args:
            step: Last finished optimizer step.
            phase: Name of what comes now, one word. All ranks must go through the same (step,
                phase) pairs in the same order: they determine which rank is furthest behind. Work
                of one rank only repeats the present pair.
            timeout_factor: Factor on the time limit of this phase (math.inf: no limit, if no rank
                waits for it).
        """
        last = self._progress
        counter = last.counter + ((step, phase) != (last.step, last.phase))
        self._progress = _Progress(step, phase, counter, timeout_factor, self._now())

    def touch(self) -> None:
        """Report progress of the main thread within its present phase."""
        last = self._progress
        self.enter_phase(last.step, last.phase, last.timeout_factor)

    def attribute_error(self, error: BaseException) -> str:
        """Return which rank caused an error that ends this one: a sentence with host, pid and last
        step.

        Takes seconds at most (bounded by a few intervals), makes no collective, and works without
        the store: if rank 0 died with it, rank 0 is named. An error that is not of a collective is
        this rank's own.
        """
        is_own = not is_collective_error(error)
        self._state, self._message = FAILED if is_own else COLLECTIVE_FAILED, describe_error(error)
        self._deadline = time.monotonic() + max(self.limits.stalled, 12 * self.interval)
        self._wait_until(
            lambda: self.failure is not None, intervals=2 if is_own and self.rank else 12
        )
        failure = self.failure
        if failure is None:
            name, last = self._snapshot().name(), self._progress
            if is_own:
                sentence = (
                    f"{name} failed at step {last.step}, phase '{last.phase}': {self._message}"
                )
                failure = FailureReport(sentence, (self.rank,))
            else:
                sentence = (
                    f"a collective failed and the responsible rank is not known; {name} saw:"
                    f" {self._message}"
                )
                failure = FailureReport(sentence)
        if self.rank == 0:
            # The other ranks read it here, and the store may be in this process.
            self._wait_until(
                lambda: self._seconds_since_failure() > 3 * self.interval, intervals=4
            )
        return failure.sentence

    def close(self, error: BaseException | None = None) -> None:
        """Stop, after announcing an orderly exit (with the error that all ranks have)."""
        if self.world_size == 1 or self._stop_publish.is_set():
            return
        if self._state == RUNNING:
            self._message = "" if error is None else first_line(error)
            self._state = EXITED
            num_before = self._num_published
            self._wait_until(
                lambda: self._num_published > num_before + 1 or self._connect_failures > 0,
                intervals=2,
                wake_every=_POLL,
            )
            if self.rank == 0:
                # Rank 0's process may hold the store: later ranks must find this last record in
                # it.
                self._wait_until(
                    self._all_ranks_done,
                    intervals=4,
                    wake_every=_POLL * max(1, self.world_size // 32),
                )
        self._stop_watchdog.set()
        self._stop_publishing()
        self._threads[1].join(self.interval)

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, MmldlmError) or self.world_size == 1:
            self.close(error)
            return
        self._print_failure(self.attribute_error(error))
        # For report_traceback: the screen has its message.
        error.is_attributed = True  # type: ignore[attr-defined]
        # The watchdog stays: it ends this process if the exit hangs.
        self._deadline = time.monotonic() + min(self.limits.stalled, SHUTDOWN_TIMEOUT)
        self._stop_publishing()

    # -- the publishing thread --------------------------------------------------------------------

    def _publish_loop(self) -> None:
        while not self._stop_publish.is_set():
            try:
                if self._connect_failures:
                    self._store = self._reconnect()
                self._publish()
                self._read()
                self._last_contact, self._connect_failures = self._now(), 0
            except (RuntimeError, OSError):
                # DistError is a RuntimeError: the store is dead, or not reachable now.
                self._connect_failures += 1
            self._wake.wait(self.interval)
            self._wake.clear()

    def _publish(self) -> None:
        self._store.set(f"{self._prefix}/{self.rank}", self._snapshot().to_text())
        self._num_published += 1

    def _snapshot(self) -> HeartbeatRecord:
        step, phase, counter, timeout_factor, reported_at = self._progress
        age = self._now() - reported_at
        location, in_collective = "", False
        if age > self.limits.stalled / 2:
            location, in_collective = current_location(self._main_thread)
        failure = (
            None if self.failure is None else (self.failure.sentence, list(self.failure.ranks))
        )
        return replace(
            self._identity,
            number=self._num_published,
            step=step,
            phase=phase,
            progress_counter=counter,
            age=age,
            timeout_factor=timeout_factor,
            state=self._state,
            message=self._message,
            location=location,
            in_collective=in_collective,
            failure=failure,
        )

    def _read(self) -> None:
        """Rank 0: all records, and the failed ranks among them.

        Other ranks: rank 0's record with its result.
        """
        now = self._observe()
        expected = range(self.world_size) if self.rank == 0 else (0,)
        missing = [rank for rank in expected if rank not in self._observations]
        if missing and now - self._opened_at > self.limits.stalled:
            names = join_some(map(str, missing), 8)
            self._announce_failure(
                FailureReport(f"rank {names} never sent a heartbeat", tuple(missing))
            )
        elif self.rank == 0:
            observations = self._observations.values()
            if self._collective_failed_at is None and any(
                o.beat.state == COLLECTIVE_FAILED for o in observations
            ):
                self._collective_failed_at = now
            self._announce_failure(
                find_failed_ranks(observations, now, self.limits, self._collective_failed_at)
            )
        elif self._observations[0].beat.failure is not None:
            sentence, ranks = self._observations[0].beat.failure
            self._announce_failure(FailureReport(sentence, tuple(ranks)))
        if self.rank == 0 and self.failure is not None:
            self._publish()

    def _observe(self) -> float:
        """Read the records of the watched ranks; returns when (monotonic seconds)."""
        watched = range(self.world_size) if self.rank == 0 else (0,)
        # Reading a missing key would block: a rank may be late to its first heartbeat.
        known = [
            r
            for r in watched
            if r in self._observations or self._store.check([f"{self._prefix}/{r}"])
        ]
        texts = (
            self._store.multi_get([f"{self._prefix}/{rank}" for rank in known]) if known else []
        )
        now = self._now()
        for rank, text in zip(known, texts, strict=True):
            beat, last = HeartbeatRecord.from_text(text), self._observations.get(rank)
            if last is None or beat.number != last.beat.number:
                self._observations[rank] = Observation(beat, now)
        return now

    def _connect(self, timeout: float) -> torch.distributed.TCPStore:
        return torch.distributed.TCPStore(
            *self._address,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
        )

    def _reconnect(self) -> torch.distributed.TCPStore:
        wait = max(self.interval, 1.0)
        # torch warns on stderr for every failed attempt; a plain socket finds out quietly.
        socket.create_connection(self._address, timeout=wait).close()
        store = self._connect(wait)
        # The watchdog limits how long an answer takes.
        store.set_timeout(timedelta(seconds=self.limits.stalled))
        return store

    # -- the watchdog thread ----------------------------------------------------------------------

    def _watchdog_loop(self) -> None:
        while not self._stop_watchdog.wait(self.interval / 2):
            now = self._tick()
            if self._deadline is not None:
                if time.monotonic() > self._deadline:
                    exit_with_stacks(self.rank, self.logs)
                elif self.rank and self.failure is None:
                    self._check_rank_0(now)
                continue  # the main thread is exiting, and prints the reason itself
            if self._state == EXITED:
                continue
            if self.failure is None:
                self._check_rank_0(now)
            if self.failure is None:
                continue
            # At once: when the first rank exits, launchers end the others.
            self._print_failure(self.failure.sentence)
            report_failed_ranks(self.failure)
            # Rank 0 stays until all have read the result; failed ranks exit first, so that the
            # launcher reports them.
            wait = (
                3 * self.interval
                if self.rank == 0
                else self.interval * (self.rank not in self.failure.ranks)
            )
            if self._seconds_since_failure() >= wait and self._deadline is None:
                exit_with_stacks(self.rank, self.logs)

    def _check_rank_0(self, now: float) -> None:
        """Announce what only this rank can see: that rank 0, or the store, is silent."""
        first, last = self._observations.get(0), self._progress
        if first is not None and first.beat.state == EXITED:
            if (
                first.beat.message
                and now - last.reported_at > self.limits.stalled * last.timeout_factor
            ):
                self._announce_failure(
                    FailureReport(f"{first.beat.name()} exited: {first.beat.message}", (0,))
                )
            return
        limit = self.limits.unseen if self._state == COLLECTIVE_FAILED else self.limits.stalled
        is_refused = self._connect_failures >= MAX_CONNECT_FAILURES
        if is_refused or now - self._last_contact > limit:
            in_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            holder = f"torchrun's agent on {self._address[0]}" if in_agent else "its process"
            reason = (
                f": the job's store, in {holder}, {'is down' if is_refused else 'does not answer'}"
            )
        elif first is not None and self.rank and _is_silent(first, now, limit):
            reason = ""
        else:
            return
        name = "rank 0" if first is None else f"{first.beat.name()} {describe_missing(first, now)}"
        self._found_alone = True
        self._announce_failure(FailureReport(name + reason, (0,)))

    def _announce_failure(self, failure: FailureReport | None) -> None:
        if self.failure is None and failure is not None:
            self._failed_at = time.monotonic()
            self.failure = failure

    def _seconds_since_failure(self) -> float:
        return 0.0 if self.failure is None else time.monotonic() - self._failed_at

    # -- the clock of the time limits -------------------------------------------------------------

    def _now(self) -> float:
        """Seconds in which this process ran, on the clock of `time.monotonic`.

        A job that was suspended (by Slurm's preemption, `docker pause`, SIGSTOP) has not stalled:
        between two rounds of the watchdog, no more counts than their longest distance.
        """
        now, (last_round, not_counted) = time.monotonic(), self._clock
        return now - not_counted - max(now - last_round - _LONGEST_ROUND * self.interval, 0.0)

    def _tick(self) -> float:
        """Begin a round of the watchdog; return `_now()`."""
        counted, now = self._now(), time.monotonic()
        self._clock = now, now - counted
        return counted

    # -- helpers ----------------------------------------------------------------------------------

    def _print_failure(self, sentence: str) -> None:
        """One line per node on stderr, past Python's buffers and locks: the main thread may hold
        them.
        """
        local_rank = int_from_env("LOCAL_RANK", self.rank)
        # If rank 0 cannot print for its node, local rank 1 does.
        if (local_rank == 0 or (local_rank == 1 and self._found_alone)) and self._printed.acquire(
            blocking=False
        ):
            line = f"ERROR: {sentence}; the job ends after step {self._progress.step}"
            if self.logs is not None:
                line += f"; stacks, and NCCL's last collectives, of the ranks: {self.logs}"
            with contextlib.suppress(OSError):  # the terminal was closed; the job still has to end
                os.write(2, f"{line}\n".encode(errors="backslashreplace"))

    def _all_ranks_done(self) -> bool:
        others = [
            observation.beat.state
            for rank, observation in list(self._observations.items())
            if rank
        ]
        return len(others) == self.world_size - 1 and RUNNING not in others

    def _wait_until(
        self, is_done: Callable[[], bool], intervals: float, wake_every: float = math.inf
    ) -> None:
        """Wait for at most a number of intervals; wake the publishing thread at least four times
        per interval.
        """
        now = time.monotonic()
        end, wake = now + intervals * self.interval, now
        while not is_done() and now < end:
            if now >= wake:
                self._wake.set()
                wake = now + min(self.interval / 4, wake_every)
            time.sleep(_POLL)
            now = time.monotonic()

    def _stop_publishing(self) -> None:
        """Before the interpreter ends: a thread that returns from the store then would crash the
        process.
        """
        self._stop_publish.set()
        self._wake.set()
        self._threads[0].join(2 * self.interval)


def _is_silent(observation: Observation, now: float, limit: float) -> bool:
    return observation.seconds_since_seen(now) > limit * max(observation.beat.timeout_factor, 1.0)
