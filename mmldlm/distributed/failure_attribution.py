"""Whom the others wait for: a judgement over the last signs of life of all ranks. No torch, no threads, no clock."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

RUNNING, COLLECTIVE_FAILED, FAILED, EXITED = "running", "hit", "failed", "left"
_MOST_NAMES = 4
FAILED_RANKS_FD = "MMLDLM_FAILED_RANKS_FD"  # variable: pipe to the process that watches this rank


@dataclass(frozen=True)
class HeartbeatRecord:
    """One rank's sign of life, as it stands in the job's store.

    Attributes:
        rank, host, pid: whose. number: counts publications, so that a new one is seen to be new.
        step, phase: last finished optimizer step and what the main thread does since. moves: how often (step, phase)
            has changed; all ranks go through the same ones, so it is a clock that all ranks share.
        age: seconds since the main thread last beat, when this was published. patience: by how much this phase may
            take longer than others.
        state: running; hit (a collective failed under it: a peer is gone); failed (by its own error); left (in order,
            with the error that all ranks share, or with none).
        note: the error of hit, failed and left. place: where the main thread stands, once it stands long. waits:
            whether that is inside a collective.
        verdict: what rank 0 has found (sentence, ranks), None otherwise.
    """

    rank: int
    host: str
    pid: int
    number: int = 0
    step: int = 0
    phase: str = "start"
    moves: int = 0
    age: float = 0.0
    patience: float = 1.0
    state: str = RUNNING
    note: str = ""
    place: str = ""
    waits: bool = False
    verdict: tuple[str, list[int]] | None = None

    def to_text(self) -> str:
        """For the store; `patience` may be infinite, which Python's JSON can hold."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str | bytes) -> HeartbeatRecord:
        """What to_text wrote."""
        return HeartbeatRecord(**json.loads(text))

    def name(self) -> str:
        """`rank 3 on node7 (pid 4711)`."""
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


@dataclass(frozen=True)
class Observation:
    """A Beat, and when (monotonic seconds of the one who judges) it was first seen to be new."""

    beat: HeartbeatRecord
    seen: float

    def quiet(self, now: float) -> float:
        """Seconds without a new publication: the process is gone, stopped, or cut off."""
        return now - self.seen

    def stood(self, now: float) -> float:
        """Seconds since its main thread last beat, as far as anybody knows."""
        return self.beat.age + self.quiet(now)


@dataclass(frozen=True)
class FailureReport:
    """Why the job ends, in one sentence, and because of which ranks (empty: of no single one)."""

    sentence: str
    ranks: tuple[int, ...] = ()


def report_failed_ranks(verdict: FailureReport) -> None:
    """Pass the failed ranks to the process that started this one, where it opened a pipe for that (launch/rank.py)."""
    fd = os.environ.pop(FAILED_RANKS_FD, None)
    if fd is not None:
        with contextlib.suppress(OSError, ValueError):
            os.write(int(fd), json.dumps({"ranks": verdict.ranks, "sentence": verdict.sentence}).encode())


@dataclass(frozen=True)
class Timeouts:
    """Seconds: without a move; without a sign of life once a collective has failed; to look for a reason then; without
    a sign of life though nothing has failed (of NCCL's collectives no error comes when a rank is gone)."""

    stand: float
    quiet: float
    inquiry: float
    silent: float = math.inf


def find_failed_ranks(
    sightings: Iterable[Observation], now: float, limits: Timeouts, first_hit: float | None = None
) -> FailureReport | None:
    """Rank 0's judgement.

    A rank is to blame when it failed by itself; when no sign of life came from it for `limits.silent` (`limits.quiet`
    once a collective has failed somewhere); or when it is furthest behind and stands for `limits.stand`. Those ahead
    of it merely wait for it, and while one of those furthest behind still beats, they all wait for a rank that works.

    Args:
        sightings: the last of every rank. now: monotonic seconds. first_hit: when the first failed collective was seen.
    """
    sightings = list(sightings)
    failed = [s for s in sightings if s.beat.state == FAILED]
    if failed:
        return _verdict(failed, lambda s: f"failed {_at(s.beat)}: {s.beat.note}")
    running = [s for s in sightings if s.beat.state == RUNNING]
    gone = [
        s
        for s in running
        if s.quiet(now) > limits.quiet
        and (
            first_hit is not None
            or s.stood(now) > limits.stand * s.beat.patience
            or s.quiet(now) > limits.silent * s.beat.patience
        )
    ]
    if gone:
        return _verdict(gone, lambda s: describe_missing(s, now))
    if running:
        last = [s for s in running if s.beat.moves == min(s.beat.moves for s in running)]
        if all(s.stood(now) > limits.stand * s.beat.patience for s in last):
            left = [s for s in sightings if s.beat.state == EXITED]
            if left:
                return _verdict(left, lambda s: f"left the others {_at(s.beat)}: {s.beat.note or 'it was done'}")
            return _verdict([s for s in last if not s.beat.waits] or last, lambda s: _standstill(s, now))
    if first_hit is not None and now - first_hit > limits.inquiry:
        return _unknown(sightings, running, now)
    return None


def describe_missing(sighting: Observation, now: float) -> str:
    """The predicate for a rank of which nothing is heard any more."""
    return f"has given no sign of life since {_where(sighting.beat)} ({sighting.stood(now):.0f} s ago)"


def _standstill(sighting: Observation, now: float) -> str:
    place = f", at {sighting.beat.place}" if sighting.beat.place else ""
    return f"has not moved since {_where(sighting.beat)} ({sighting.stood(now):.0f} s ago{place})"


def _unknown(sightings: list[Observation], running: list[Observation], now: float) -> FailureReport:
    """A collective failed, and every rank still gives signs of life."""
    hit = [s for s in sightings if s.beat.state == COLLECTIVE_FAILED]
    error = f"; {hit[0].beat.name()} saw: {hit[0].beat.note}" if hit else ""
    late = [s for s in running if s.beat.moves < max(other.beat.moves for other in sightings)]
    if late:
        verdict = _verdict(late, lambda s: _standstill(s, now))
        return replace(verdict, sentence=verdict.sentence + error)
    hosts = sorted({s.beat.host for s in sightings})
    between = f"the network between {', '.join(hosts[:_MOST_NAMES])}" if len(hosts) > 1 else "the messages above"
    return FailureReport(f"a collective failed though all {len(sightings)} ranks are alive: look at {between}{error}")


def _verdict(guilty: list[Observation], predicate) -> FailureReport:
    named = [f"{s.beat.name()} {predicate(s)}" for s in guilty[:_MOST_NAMES]]
    if len(guilty) > _MOST_NAMES:
        named.append(f"and {len(guilty) - _MOST_NAMES} other ranks likewise")
    return FailureReport("; ".join(named), tuple(s.beat.rank for s in guilty))


def _where(beat: HeartbeatRecord) -> str:
    return f"step {beat.step}, phase '{beat.phase}'"


def _at(beat: HeartbeatRecord) -> str:
    return f"at {_where(beat)}"
