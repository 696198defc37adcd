"""No rank hangs unnamed: every rank gives signs of life, and a job in which one stands still ends, saying which.

Each rank has two threads beside its main one. The first talks to the job's store (a TCPStore, through a connection of
its own): it publishes this rank's Beat every interval; on rank 0 it also reads the beats of all ranks and judges them
(culprit.judge), on the others it reads only rank 0's, where the judgement stands. So N ranks make O(N) requests an
interval. The second thread never talks to anyone: it ends this process when a verdict is there, or when rank 0, or the
store, has been silent too long; a store that blocks the first thread cannot stop it.

The store lives in rank 0's process, or in torchrun's agent on rank 0's node. Nothing here is a collective, and the main
thread never waits for the store while it trains.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

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
from mmldlm.distributed.stack_dump import current_location, describe_error, exit_with_stacks, is_collective_error
from mmldlm.errors import MmldlmError

_KEY = "mmldlm/liveness"
_LONGEST_INTERVAL = 2.0  # seconds between two signs of life
_INTERVALS_IN_TIMEOUT = 15  # of which six are left for the news to travel, so that the job ends within the timeout
MAX_CONNECT_FAILURES = 3  # connections that the store's host refuses before the store counts as dead
SHUTDOWN_TIMEOUT = 30.0  # seconds from the error to the end of the process
DEAD_RANK_TIMEOUT = 120.0  # seconds without a beat of the talking thread, which waits for no other: its process is gone
_POLL = 0.02  # seconds between two looks at whether something awaited has come


class Heartbeat:
    """Signs of life of this rank and a watch over the others, from `__init__` to `close`. Use as a context manager.

    The time limit holds for a phase without a beat: whatever legitimately takes longer (evaluation, a save) beats
    while it works. A rank that waits in a collective for one that still beats is not ended; one that waits for a rank
    which stands still is ended together with it, within `timeout` of its last beat. Where a phase cannot beat (the
    compilation in the first step), `beat` takes more patience. With one rank nobody waits, and nothing is watched.

    Leaving the context: without an error, or with an MmldlmError (by ARCHITECTURE raised by all ranks together), the
    rank has left in order. Any other error is looked into (`name_the_culprit`), the answer is printed, and all ends.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout: float,
        store: torch.distributed.TCPStore | None = None,
        logs: Path | None = None,
    ):
        """Connect, and publish the first beat. Collective in that all ranks do it in the same order.

        Args:
            rank, world_size: of this process. timeout: engine.timeout, seconds.
            store: a client connection that nobody else uses; None connects to MASTER_ADDR:MASTER_PORT, where
                init_process_group has left a store.
            logs: folder for the stacks (stack_rank{N}.txt) and the flight recorder's files of a rank that is ended.

        Raises:
            torch.distributed.DistError: the store cannot be reached.
        """
        self.rank, self.world_size, self.logs = rank, world_size, logs
        self.interval = min(_LONGEST_INTERVAL, timeout / _INTERVALS_IN_TIMEOUT)
        stand, quiet = timeout - 6 * self.interval, 4 * self.interval
        self.limits = Timeouts(stand, quiet, inquiry=7 * self.interval, silent=min(stand, DEAD_RANK_TIMEOUT))
        self.verdict: FailureReport | None = None
        self._judged_at, self._alone = 0.0, False  # alone: judged by this rank without rank 0
        self._last = (0, "start", 0, 1.0, time.monotonic())  # step, phase, moves, patience, when
        self._state, self._note, self._first_hit = RUNNING, "", None
        self._main_thread = threading.get_ident()
        self._sightings: dict[int, Observation] = {}
        self._said = threading.Lock()
        self._threads: list[threading.Thread] = []
        if world_size == 1:
            return
        self._stop_talk, self._stop_guard, self._wake = threading.Event(), threading.Event(), threading.Event()
        self._deadline: float | None = None  # for a main thread that is on its way out
        self._published, self._heard, self._refusals = 0, time.monotonic(), 0
        self._opened = self._heard
        self._me = HeartbeatRecord(rank, socket.gethostname(), os.getpid())
        self._address = (os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", 0)))
        self._store = store if store is not None else self._connect(timeout)
        self._store.set_timeout(timedelta(seconds=timeout))
        # A process that trains twice finds the beats of the first time in the store: each time has its own keys.
        self._prefix = f"{_KEY}/{self._store.add(f'{_KEY}/times/{rank}', 1)}"
        self._publish()
        if rank != 0:  # so that rank 0's host and pid are known, whatever happens to it next
            self._sightings[0] = Observation(
                HeartbeatRecord.from_text(self._store.get(f"{self._prefix}/0")), time.monotonic()
            )
        for work in (self._publish_loop, self._watchdog_loop):
            thread = threading.Thread(target=work, name=f"liveness{work.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    # -- what the main thread calls ----------------------------------------------------------------------------------

    def beat(self, step: int, phase: str, patience: float = 1.0) -> None:
        """Say that the main thread moves. Costs a tuple; no lock, no request, no synchronisation.

        Args:
            step: last finished optimizer step. phase: what comes now, one word. All ranks must go through the same
                (step, phase) pairs in the same order, for who is furthest behind is told by them; work that only one
                rank has to do repeats the present pair. patience: this phase's share of the time limit (math.inf: no
                limit, for what nobody waits for).
        """
        last_step, last_phase, moves, _, _ = self._last
        self._last = (step, phase, moves + ((step, phase) != (last_step, last_phase)), patience, time.monotonic())

    def touch(self) -> None:
        """Say that the main thread moves, in the phase that it is in."""
        step, phase, _, patience, _ = self._last
        self.beat(step, phase, patience)

    def attribute_error(self, error: BaseException) -> str:
        """On the way out of an error: which rank is to blame, in one sentence with host, pid and last step.

        Takes seconds at most (bounded by a few intervals), makes no collective, and works when the store is gone:
        then rank 0, with which it goes, is the one. An error that is not of a collective is this rank's own.
        """
        if self.world_size == 1:
            return f"failed {describe_error(error)}"
        own = not is_collective_error(error)
        self._state, self._note = FAILED if own else COLLECTIVE_FAILED, describe_error(error)
        self._deadline = time.monotonic() + max(self.limits.stand, 12 * self.interval)
        self._wait(lambda: self.verdict is not None, intervals=2 if own and self.rank else 12)
        verdict = self.verdict
        if verdict is None:
            verdict = FailureReport(
                f"{self._snapshot().name()} failed at step {self._last[0]}, phase '{self._last[1]}': {self._note}"
                if own
                else f"a collective failed and no rank is known to be to blame; {self._snapshot().name()} saw: "
                f"{self._note}",
                (self.rank,) if own else (),
            )
        if self.rank == 0:
            # The others learn it from here, and the store may live in this process.
            self._wait(lambda: self._seconds_since_failure() > 3 * self.interval, intervals=4)
        return verdict.sentence

    def close(self, error: BaseException | None = None) -> None:
        """Stop, having said to the others that this rank leaves in order (with the error that all of them have)."""
        if self.world_size == 1 or self._stop_talk.is_set():
            return
        if self._state == RUNNING:
            self._note = "" if error is None else describe_error(error)
            self._state = EXITED
            number = self._published
            self._wait(lambda: self._published > number + 1 or self._refusals > 0, intervals=2, wake_every=_POLL)
            if self.rank == 0:
                # Rank 0's process may hold the store: who comes later must find this last word in it.
                self._wait(self._all_ranks_done, intervals=4, wake_every=_POLL * max(1, self.world_size // 32))
        self._stop_guard.set()
        self._stop_publishing()
        self._threads[1].join(self.interval)

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        if error is None or isinstance(error, MmldlmError) or self.world_size == 1:
            self.close(error)
            return
        self._say(self.attribute_error(error))
        # The guard stays: it ends this process if the way out leads through something that hangs.
        self._deadline = time.monotonic() + min(self.limits.stand, SHUTDOWN_TIMEOUT)
        self._stop_publishing()

    # -- the thread that talks to the store --------------------------------------------------------------------------

    def _publish_loop(self) -> None:
        while not self._stop_talk.is_set():
            try:
                if self._refusals:
                    self._store = self._reconnect()
                self._publish()
                self._read()
                self._heard, self._refusals = time.monotonic(), 0
            except (RuntimeError, OSError):  # DistError is a RuntimeError: the store is gone, or not reachable now
                self._refusals += 1
            self._wake.wait(self.interval)
            self._wake.clear()

    def _publish(self) -> None:
        self._store.set(f"{self._prefix}/{self.rank}", self._snapshot().to_text())
        self._published += 1

    def _snapshot(self) -> HeartbeatRecord:
        step, phase, moves, patience, when = self._last
        age = time.monotonic() - when
        place, waits = current_location(self._main_thread) if age > self.limits.stand / 2 else ("", False)
        verdict = None if self.verdict is None else (self.verdict.sentence, list(self.verdict.ranks))
        return replace(
            self._me,
            number=self._published,
            step=step,
            phase=phase,
            moves=moves,
            age=age,
            patience=patience,
            state=self._state,
            note=self._note,
            place=place,
            waits=waits,
            verdict=verdict,
        )

    def _read(self) -> None:
        """Rank 0: everybody's beats, and the verdict over them. The others: rank 0's beat, and the verdict in it."""
        wanted = range(self.world_size) if self.rank == 0 else (0,)
        # A key that is not there yet would be waited for: a rank may be late to its first beat.
        known = [r for r in wanted if r in self._sightings or self._store.check([f"{self._prefix}/{r}"])]
        texts = self._store.multi_get([f"{self._prefix}/{rank}" for rank in known]) if known else []
        now = time.monotonic()
        for rank, text in zip(known, texts, strict=True):
            beat, last = HeartbeatRecord.from_text(text), self._sightings.get(rank)
            if last is None or beat.number != last.beat.number:
                self._sightings[rank] = Observation(beat, now)
        missing = [rank for rank in wanted if rank not in self._sightings]
        if missing and now - self._opened > self.limits.stand:
            names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            self._failure_announced(FailureReport(f"rank {names} never gave a sign of life", tuple(missing)))
        elif self.rank == 0:
            hit = any(sighting.beat.state == COLLECTIVE_FAILED for sighting in self._sightings.values())
            self._first_hit = self._first_hit or (now if hit else None)
            self._failure_announced(find_failed_ranks(self._sightings.values(), now, self.limits, self._first_hit))
        elif self._sightings[0].beat.verdict is not None:
            sentence, ranks = self._sightings[0].beat.verdict
            self._failure_announced(FailureReport(sentence, tuple(ranks)))
        if self.rank == 0 and self.verdict is not None:
            self._publish()

    def _connect(self, timeout: float) -> torch.distributed.TCPStore:
        return torch.distributed.TCPStore(
            *self._address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout)
        )

    def _reconnect(self) -> torch.distributed.TCPStore:
        wait = max(self.interval, 1.0)
        # torch warns on stderr at every try that fails; a plain socket finds out quietly.
        socket.create_connection(self._address, timeout=wait).close()
        store = self._connect(wait)
        store.set_timeout(timedelta(seconds=self.limits.stand))  # _guard watches how long an answer takes
        return store

    # -- the thread that ends the process ----------------------------------------------------------------------------

    def _watchdog_loop(self) -> None:
        while not self._stop_guard.wait(self.interval / 2):
            now = time.monotonic()
            if self._deadline is not None:
                if now > self._deadline:
                    exit_with_stacks(self.rank, self.logs)
                elif self.rank and self.verdict is None:
                    self._evaluate_on_rank_0(now)
                continue  # the main thread is on its way out, and says why itself
            if self._state == EXITED:
                continue
            if self.verdict is None:
                self._evaluate_on_rank_0(now)
            if self.verdict is None:
                continue
            self._say(self.verdict.sentence)  # at once: when the first rank goes, launchers end the others
            report_failed_ranks(self.verdict)
            # Rank 0 stays until all have read the verdict; the guilty go first, so that launchers name them.
            wait = 3 * self.interval if self.rank == 0 else self.interval * (self.rank not in self.verdict.ranks)
            if self._seconds_since_failure() >= wait and self._deadline is None:
                exit_with_stacks(self.rank, self.logs)

    def _evaluate_on_rank_0(self, now: float) -> None:
        """What only this rank can see: that nothing comes from rank 0, or from the store, any more."""
        first = self._sightings.get(0)
        if first is not None and first.beat.state == EXITED:
            _, _, _, patience, when = self._last
            if first.beat.note and now - when > self.limits.stand * patience:
                self._failure_announced(FailureReport(f"{first.beat.name()} left the others: {first.beat.note}", (0,)))
            return
        limit = self.limits.quiet if self._state == COLLECTIVE_FAILED else self.limits.stand
        refused = self._refusals >= MAX_CONNECT_FAILURES
        if refused or now - self._heard > limit:
            agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            holder = f"torchrun's agent on {self._address[0]}" if agent else "its process"
            store = f"the job's store, which lives in {holder}, {'is gone' if refused else 'does not answer'}"
        elif first is not None and self.rank and first.quiet(now) > limit * max(first.beat.patience, 1.0):
            store = ""
        else:
            return
        who = "rank 0" if first is None else f"{first.beat.name()} {describe_missing(first, now)}"
        self._alone = True
        self._failure_announced(FailureReport(f"{who}: {store}" if store else who, (0,)))

    def _failure_announced(self, verdict: FailureReport | None) -> None:
        if self.verdict is None and verdict is not None:
            self._judged_at = time.monotonic()
            self.verdict = verdict

    def _seconds_since_failure(self) -> float:
        return 0.0 if self.verdict is None else time.monotonic() - self._judged_at

    # -- small things ------------------------------------------------------------------------------------------------

    def _say(self, sentence: str) -> None:
        """One line a node on stderr, past Python's buffers and locks: the main thread may hold them."""
        local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        # Where rank 0 cannot speak for its node, its neighbour does.
        if (local_rank == 0 or (local_rank == 1 and self._alone)) and self._said.acquire(blocking=False):
            os.write(2, f"ERROR: {sentence}; the job ends after step {self._last[0]}\n".encode())

    def _all_ranks_done(self) -> bool:
        others = [sighting.beat.state for rank, sighting in list(self._sightings.items()) if rank]
        return len(others) == self.world_size - 1 and RUNNING not in others

    def _wait(self, done, intervals: float, wake_every: float = math.inf) -> None:
        """Until done, some intervals at most; the talking thread is woken every so often, four times an interval or
        oftener."""
        now = time.monotonic()
        end, wake = now + intervals * self.interval, now
        while not done() and now < end:
            if now >= wake:
                self._wake.set()
                wake = now + min(self.interval / 4, wake_every)
            time.sleep(_POLL)
            now = time.monotonic()

    def _stop_publishing(self) -> None:
        """Before the interpreter ends: a thread that comes back from the store then would bring the process down."""
        self._stop_talk.set()
        self._wake.set()
        self._threads[0].join(2 * self.interval)
