"""Identify the failed ranks from the latest heartbeats of all ranks.

No torch, no threads, no clock.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

RUNNING, COLLECTIVE_FAILED, FAILED, EXITED = "running", "collective_failed", "failed", "exited"
_MAX_NAMES = 4
# Of a report of failed ranks, so that it fits into a pipe and a state file; a run is 16 bytes.
MOST_RUNS = 500
FAILED_RANKS_FD = "MMLDLM_FAILED_RANKS_FD"  # variable: pipe to the process that watches this rank


@dataclass(frozen=True)
class HeartbeatRecord:
    """One rank's heartbeat, as stored in the job's key-value store.

    Attributes:
        rank: Rank of the sender.
        host: Host of the sender.
        pid: Process id of the sender.
        number: Number of this publication, by which a new one is recognized.
        step: Last finished optimizer step.
        phase: Work of the main thread since then; "" if unknown.
        progress_counter: Number of changes of (step, phase). All ranks go through the same pairs,
            so it is a clock that all ranks share.
        age: Seconds between the main thread's last report and this publication.
        timeout_factor: Factor on the time limit of this phase.
        state: RUNNING; COLLECTIVE_FAILED (in this rank, because of another one); FAILED (by its
            own error); EXITED (in order, with the error that all ranks share, or with none).
        message: Error of the last three states.
        location: Location of the main thread, once it has not reported for long.
        in_collective: Whether that location is inside a collective.
        failure: Failure that rank 0 has found (sentence, ranks), None otherwise.
    """

    rank: int
    host: str
    pid: int
    number: int = 0
    step: int = 0
    phase: str = "start"
    progress_counter: int = 0
    age: float = 0.0
    timeout_factor: float = 1.0
    state: str = RUNNING
    message: str = ""
    location: str = ""
    in_collective: bool = False
    failure: tuple[str, list[int]] | None = None

    def to_text(self) -> str:
        """JSON for the store; `timeout_factor` may be infinite, which Python's JSON can hold."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str | bytes) -> HeartbeatRecord:
        """The inverse of to_text."""
        return HeartbeatRecord(**json.loads(text))

    def name(self) -> str:
        """`rank 3 on node7 (pid 4711)`."""
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


@dataclass(frozen=True)
class Observation:
    """A heartbeat, and when (monotonic seconds of the observer) it was first seen to be new."""

    beat: HeartbeatRecord
    seen_at: float

    def seconds_since_seen(self, now: float) -> float:
        """Seconds without a new publication: the process is dead, stopped, or cut off."""
        return now - self.seen_at

    def seconds_since_progress(self, now: float) -> float:
        """Seconds since the rank's main thread last reported, if known."""
        return self.beat.age + self.seconds_since_seen(now)

    def is_stalled(self, now: float, limit: float) -> bool:
        """Whether the main thread has not reported for the time limit of its phase."""
        return self.seconds_since_progress(now) > limit * self.beat.timeout_factor


@dataclass(frozen=True)
class FailureReport:
    """Why the job ends, in one sentence, and because of which ranks (empty: not of particular
    ones).
    """

    sentence: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Timeouts:
    """Time limits in seconds.

    Attributes:
        stalled: Seconds without a report of the main thread.
        unseen: Seconds without a heartbeat, once a collective has failed.
        grace: Seconds after a failed collective, to find its reason.
        dead: Seconds without a heartbeat though no collective has failed (NCCL raises no error
            when a peer dies).
    """

    stalled: float
    unseen: float
    grace: float
    dead: float = math.inf


def report_failed_ranks(report: FailureReport) -> None:
    """Pass the failed ranks to the process that started this one, if it opened a pipe for that
    (rank_wrapper.py): {"ranks": [first, last] of each run of them, "sentence"}.
    """
    fd = os.environ.pop(FAILED_RANKS_FD, None)
    if fd is not None:
        text = json.dumps(
            {"ranks": rank_runs(report.ranks)[:MOST_RUNS], "sentence": report.sentence}
        )
        with contextlib.suppress(OSError, ValueError):
            os.write(int(fd), text.encode())


def rank_runs(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Return (first, last) of each run of consecutive ranks."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], rank
        else:
            runs.append((rank, rank))
    return runs


def find_failed_ranks(
    observations: Iterable[Observation],
    now: float,
    limits: Timeouts,
    collective_failed_at: float | None = None,
) -> FailureReport | None:
    """Return which ranks have failed, and why, as rank 0 decides it; None if none has.

    A rank counts as failed if it reported an error; if it sent no heartbeat for `limits.dead`
    (`limits.unseen` once a collective has failed); or if it is furthest behind and has not
    reported for `limits.stalled`. Ranks ahead of it only wait for it, and while one of those
    furthest behind still reports, they all wait for a rank that works.

    Args:
        observations: Latest observation of every rank.
        now: Time in monotonic seconds.
        collective_failed_at: Time at which the first failed collective was seen.
    """
    observations = list(observations)
    failed = [o for o in observations if o.beat.state == FAILED]
    if failed:
        return _report(failed, lambda o: f"failed at {_progress(o.beat)}: {o.beat.message}")
    running = [o for o in observations if o.beat.state == RUNNING]
    missing = [o for o in running if _is_missing(o, now, limits, collective_failed_at is not None)]
    if missing:
        return _report(missing, lambda o: describe_missing(o, now))
    if running:
        least = min(o.beat.progress_counter for o in running)
        last = [o for o in running if o.beat.progress_counter == least]
        if all(o.is_stalled(now, limits.stalled) for o in last):
            exited = [o for o in observations if o.beat.state == EXITED]
            if exited:
                return _report(
                    exited,
                    lambda o: f"exited at {_progress(o.beat)}: {o.beat.message or 'it was done'}",
                )
            outside = [o for o in last if not o.beat.in_collective]
            return _report(outside or last, lambda o: _describe_stalled(o, now))
    if collective_failed_at is not None and now - collective_failed_at > limits.grace:
        return _report_unexplained(observations, running, now)
    return None


def _is_missing(
    observation: Observation, now: float, limits: Timeouts, collective_failed: bool
) -> bool:
    unseen = observation.seconds_since_seen(now)
    if unseen <= limits.unseen:
        return False
    is_dead = unseen > limits.dead * observation.beat.timeout_factor
    return collective_failed or observation.is_stalled(now, limits.stalled) or is_dead


def describe_missing(observation: Observation, now: float) -> str:
    """Return the predicate of a sentence about a rank that sends no heartbeats any more."""
    seconds = observation.seconds_since_progress(now)
    return f"has sent no heartbeat since {_progress(observation.beat)} ({seconds:.0f} s ago)"


def _describe_stalled(observation: Observation, now: float) -> str:
    beat, seconds = observation.beat, observation.seconds_since_progress(now)
    location = f", at {beat.location}" if beat.location else ""
    return f"has made no progress since {_progress(beat)} ({seconds:.0f} s ago{location})"


def _report_unexplained(
    observations: list[Observation], running: list[Observation], now: float
) -> FailureReport:
    """A collective failed, and every rank still sends heartbeats."""
    hit = [o for o in observations if o.beat.state == COLLECTIVE_FAILED]
    error = f"; {hit[0].beat.name()} saw: {hit[0].beat.message}" if hit else ""
    most = max(o.beat.progress_counter for o in observations)
    late = [o for o in running if o.beat.progress_counter < most]
    if late:
        report = _report(late, lambda o: _describe_stalled(o, now))
        return replace(report, sentence=report.sentence + error)
    hosts = sorted({o.beat.host for o in observations})
    suspect = (
        f"the network between {', '.join(hosts[:_MAX_NAMES])}"
        if len(hosts) > 1
        else "the messages above"
    )
    alive = f"all {len(observations)} ranks still send heartbeats"
    return FailureReport(f"a collective failed though {alive}: check {suspect}{error}")


def _report(failed: list[Observation], predicate: Callable[[Observation], str]) -> FailureReport:
    sentences = [f"{o.beat.name()} {predicate(o)}" for o in failed[:_MAX_NAMES]]
    if len(failed) > _MAX_NAMES:
        sentences.append(f"and {len(failed) - _MAX_NAMES} more ranks")
    return FailureReport("; ".join(sentences), tuple(o.beat.rank for o in failed))


def _progress(beat: HeartbeatRecord) -> str:
    return f"step {beat.step}" + (f", phase '{beat.phase}'" if beat.phase else "")
