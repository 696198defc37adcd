"""Which ranks count as failed, by the latest heartbeats of all."""

from __future__ import annotations

import math
from dataclasses import replace

from mmldlm.distributed.failure_attribution import (
    COLLECTIVE_FAILED,
    EXITED,
    FAILED,
    HeartbeatRecord,
    Observation,
    Timeouts,
    find_failed_ranks,
)

LIMITS = Timeouts(stalled=10.0, unseen=2.0, grace=4.0)


def observation(rank, progress, age=0.0, seen_at=100.0, **more):
    beat = HeartbeatRecord(
        rank=rank,
        host=f"node{rank}",
        pid=rank,
        step=progress // 2,
        phase="data",
        progress_counter=progress,
        age=age,
        **more,
    )
    return Observation(beat, seen_at)


def test_a_working_rank_is_not_blamed():
    assert find_failed_ranks([observation(0, 8), observation(1, 7)], 101.0, LIMITS) is None
    # Rank 1 waits for rank 0, which is behind and beats.
    assert (
        find_failed_ranks([observation(0, 7), observation(1, 8, age=50.0)], 101.0, LIMITS) is None
    )
    assert (
        find_failed_ranks(
            [observation(0, 7, age=50.0, timeout_factor=math.inf), observation(1, 8, age=50.0)],
            101.0,
            LIMITS,
        )
        is None
    )


def test_the_rank_furthest_behind_is_blamed_not_the_waiting_ones():
    beats = [observation(0, 8, age=11.0), observation(1, 7, age=11.5), observation(2, 8, age=11.0)]
    failure = find_failed_ranks(beats, 100.0, LIMITS)
    assert (
        failure.ranks == (1,)
        and "rank 1 on node1 (pid 1) has made no progress since step 3" in failure.sentence
    )


def test_among_equals_the_one_outside_a_collective_is_blamed():
    beats = [
        observation(0, 8, age=11.0, in_collective=True),
        observation(1, 8, age=11.5, location="data/loader.py:3 in get"),
    ]
    failure = find_failed_ranks(beats, 100.0, LIMITS)
    assert failure.ranks == (1,) and "data/loader.py:3 in get" in failure.sentence


def test_a_missing_rank_is_blamed_even_if_it_is_ahead():
    beats = [observation(0, 8), observation(1, 9, seen_at=95.0)]
    assert find_failed_ranks(beats, 100.0, LIMITS) is None
    assert find_failed_ranks(beats, 106.0, LIMITS).ranks == (1,)
    assert find_failed_ranks(
        [observation(0, 8, state=COLLECTIVE_FAILED), beats[1]],
        100.0,
        LIMITS,
        collective_failed_at=99.0,
    ).ranks == (1,)


def test_a_long_missing_rank_is_blamed_without_a_failed_collective():
    """NCCL raises nothing when a peer is gone; engine.collective_timeout may be ten minutes."""
    limits = replace(LIMITS, stalled=600.0, dead=120.0)
    beats = [observation(0, 8), observation(1, 9, seen_at=0.0)]
    assert find_failed_ranks(beats, 119.0, limits) is None
    assert find_failed_ranks(beats, 121.0, limits).ranks == (1,)
    assert (
        find_failed_ranks(
            [beats[0], observation(1, 9, seen_at=0.0, timeout_factor=3.0)], 121.0, limits
        )
        is None
    )


def test_failure_and_leaving_are_blamed():
    failure = find_failed_ranks(
        [observation(0, 8), observation(1, 7, state=FAILED, message="ValueError: bad")],
        100.0,
        LIMITS,
    )
    assert failure.ranks == (1,) and "ValueError: bad" in failure.sentence
    beats = [
        observation(0, 8, age=11.0),
        observation(1, 9, state=EXITED, message="UserError: no file", seen_at=0.0),
    ]
    assert find_failed_ranks(beats, 100.0, LIMITS).ranks == (1,)
    assert find_failed_ranks([observation(0, 8, age=1.0), beats[1]], 100.0, LIMITS) is None


def test_a_failed_collective_without_a_failed_rank_is_reported():
    beats = [
        observation(0, 8, state=COLLECTIVE_FAILED, message="RuntimeError: reset"),
        observation(1, 8),
    ]
    assert find_failed_ranks(beats, 100.0, LIMITS, collective_failed_at=99.0) is None
    failure = find_failed_ranks(beats, 101.0, LIMITS, collective_failed_at=96.0)
    assert (
        failure.ranks == () and "node0, node1" in failure.sentence and "reset" in failure.sentence
    )


def test_a_record_survives_the_store():
    beat = HeartbeatRecord(3, "n", 4, timeout_factor=math.inf, failure=("rank 1 is dead", [1]))
    again = HeartbeatRecord.from_text(beat.to_text().encode())
    assert again.timeout_factor == math.inf and again.failure == ["rank 1 is dead", [1]]
