"""A rank that dies or stands still ends the whole job, and every such end says which rank, where, and since when."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmldlm.distributed.failure_attribution import (
    COLLECTIVE_FAILED,
    EXITED,
    FAILED,
    HeartbeatRecord,
    Observation,
    Timeouts,
    find_failed_ranks,
)
from mmldlm.distributed.heartbeat import Heartbeat
from mmldlm.distributed.nccl_environment import FLIGHT_RECORDER_FILE, prepare_environment
from mmldlm.distributed.stack_dump import current_location
from mmldlm.engines.base import local_world_size, pick_device
from mmldlm.engines.single import SingleEngine
from mmldlm.errors import UserError
from tests.helpers import launch, torchrun

pytestmark = pytest.mark.long

WORKER = str(Path(__file__).with_name("liveness_worker.py"))
CASES = [
    *("exit@1", "kill@1", "stop@1", "sleep@1", "raise@1", "exit@0", "kill@0", "stop@0", "sleep@0", "raise@0"),
    *("stop@0@agent", "kill@0@agent", "evaluate@1", "evaluate@0", "agreed@0"),
]
LIMITS = Timeouts(stand=10.0, quiet=2.0, inquiry=4.0)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Every case run once, all at the same time: they mostly wait."""
    folder = tmp_path_factory.mktemp("jobs")
    done = launch([sys.executable, WORKER, str(folder), *CASES], timeout=240)
    assert done.returncode == 0, done.stdout[-3000:]
    return folder, json.loads((folder / "results.json").read_text())


def said(folder: Path, case: str) -> str:
    """The lines of the watch (not the tracebacks) of all ranks of a case."""
    texts = [(folder / case / f"stderr_{rank}").read_text() for rank in range(3)]
    return "\n".join(line for text in texts for line in text.splitlines() if line.startswith("ERROR: "))


@pytest.mark.parametrize("case", [case for case in CASES if case.split("@")[0] not in ("evaluate", "agreed")])
def test_the_job_ends_and_names_the_rank(jobs, case):
    folder, codes = jobs
    what, guilty = case.split("@")[:2]
    survivors = [code for rank, code in enumerate(codes[case]) if rank != int(guilty)]
    assert survivors == [1, 1], (codes[case], said(folder, case))
    pid = (folder / case / f"pid_{guilty}").read_text()
    name = f"rank {guilty} on {socket.gethostname()} (pid {pid})"
    lines = said(folder, case).splitlines()
    assert lines and all(line.startswith(f"ERROR: {name}") for line in lines), lines
    assert all("step 3, phase 'data'" in line for line in lines), lines
    if what == "raise":
        assert all("ValueError: row 7 is damaged" in line for line in lines)
    if what == "sleep":
        assert all("liveness_worker.py" in line for line in lines)  # where it stands


@pytest.mark.parametrize("case", ["evaluate@1", "evaluate@0"])
def test_a_rank_that_works_long_and_beats_is_left_alone(jobs, case):
    folder, codes = jobs
    assert codes[case] == [0, 0, 0] and said(folder, case) == ""


def test_an_end_that_all_ranks_agreed_on_keeps_its_exit_code(jobs):
    folder, codes = jobs
    assert codes["agreed@0"] == [4, 4, 4] and said(folder, "agreed@0") == ""


def test_a_rank_that_is_ended_leaves_its_stack(jobs):
    folder, _ = jobs
    assert "liveness_worker.py" in (folder / "sleep@1" / "logs" / "stack_rank1.txt").read_text()


def test_under_torchrun(tmp_path):
    done = launch(torchrun(3, WORKER, str(tmp_path), "torchrun:sleep@1"), timeout=200)
    assert done.returncode != 0
    pid = (tmp_path / "pid_1").read_text()
    # Not at the start of a line: four processes write to one pipe, and one may be in the middle of its own.
    (line,) = re.findall(r"ERROR: rank .*", done.stdout) or [done.stdout[-3000:]]
    assert line.startswith(f"ERROR: rank 1 on {socket.gethostname()} (pid {pid}) has not moved since step 3"), line


# -- the judgement ---------------------------------------------------------------------------------------------------


def sighting(rank, moves, age=0.0, seen=100.0, **more):
    beat = HeartbeatRecord(
        rank=rank, host=f"node{rank}", pid=rank, step=moves // 2, phase="data", moves=moves, age=age, **more
    )
    return Observation(beat, seen)


def test_who_works_is_not_blamed():
    assert find_failed_ranks([sighting(0, 8), sighting(1, 7)], 101.0, LIMITS) is None
    # Rank 1 waits for rank 0, which is behind and beats.
    assert find_failed_ranks([sighting(0, 7), sighting(1, 8, age=50.0)], 101.0, LIMITS) is None
    assert (
        find_failed_ranks([sighting(0, 7, age=50.0, patience=math.inf), sighting(1, 8, age=50.0)], 101.0, LIMITS)
        is None
    )


def test_the_one_furthest_behind_is_blamed_not_those_who_wait_for_it():
    beats = [sighting(0, 8, age=11.0), sighting(1, 7, age=11.5), sighting(2, 8, age=11.0)]
    verdict = find_failed_ranks(beats, 100.0, LIMITS)
    assert verdict.ranks == (1,) and "rank 1 on node1 (pid 1) has not moved since step 3" in verdict.sentence


def test_among_equals_the_one_outside_a_collective_is_blamed():
    beats = [sighting(0, 8, age=11.0, waits=True), sighting(1, 8, age=11.5, place="data/loader.py:3 in get")]
    verdict = find_failed_ranks(beats, 100.0, LIMITS)
    assert verdict.ranks == (1,) and "data/loader.py:3 in get" in verdict.sentence


def test_silence_is_blamed_even_ahead_of_the_others_and_sooner_once_a_collective_failed():
    beats = [sighting(0, 8), sighting(1, 9, seen=95.0)]
    assert find_failed_ranks(beats, 100.0, LIMITS) is None
    assert find_failed_ranks(beats, 106.0, LIMITS).ranks == (1,)
    assert find_failed_ranks(
        [sighting(0, 8, state=COLLECTIVE_FAILED), beats[1]], 100.0, LIMITS, first_hit=99.0
    ).ranks == (1,)


def test_long_silence_is_blamed_though_no_collective_failed_and_no_phase_took_too_long():
    """NCCL raises nothing when a peer is gone; engine.timeout may be ten minutes."""
    limits = replace(LIMITS, stand=600.0, silent=120.0)
    beats = [sighting(0, 8), sighting(1, 9, seen=0.0)]
    assert find_failed_ranks(beats, 119.0, limits) is None
    assert find_failed_ranks(beats, 121.0, limits).ranks == (1,)
    assert find_failed_ranks([beats[0], sighting(1, 9, seen=0.0, patience=3.0)], 121.0, limits) is None


def test_a_rank_that_reads_the_sum_over_ranks_waits_in_a_collective():
    class Stuck(SingleEngine):
        def __init__(self):
            self.entered, self.go_on = threading.Event(), threading.Event()

        def all_reduce_sum(self, values):
            self.entered.set()
            self.go_on.wait(30)
            return values

    engine = Stuck()
    thread = threading.Thread(target=lambda: engine.sum_on_host(torch.zeros(1)))
    thread.start()
    engine.entered.wait(30)
    try:
        assert current_location(thread.ident)[1]
    finally:
        engine.go_on.set()
        thread.join()
    assert not current_location(threading.get_ident())[1]


def test_fewer_gpus_than_ranks_is_said_by_every_rank_of_the_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"RANK": "8", "LOCAL_WORLD_SIZE": "8", "CUDA_VISIBLE_DEVICES": "3"}.items():
        monkeypatch.setenv(name, value)
    for local_rank in (0, 7):
        with pytest.raises(UserError, match="each of the 8 ranks.*\n.*1 GPU.*CUDA_VISIBLE_DEVICES=3"):
            pick_device(local_rank)
    monkeypatch.delenv("RANK")  # a shell inside an allocation, not a rank
    assert local_world_size(0) == 1


def test_failure_and_leaving_are_blamed():
    verdict = find_failed_ranks([sighting(0, 8), sighting(1, 7, state=FAILED, note="ValueError: bad")], 100.0, LIMITS)
    assert verdict.ranks == (1,) and "ValueError: bad" in verdict.sentence
    beats = [sighting(0, 8, age=11.0), sighting(1, 9, state=EXITED, note="UserError: no file", seen=0.0)]
    assert find_failed_ranks(beats, 100.0, LIMITS).ranks == (1,)
    assert find_failed_ranks([sighting(0, 8, age=1.0), beats[1]], 100.0, LIMITS) is None


def test_a_failed_collective_among_the_living_is_reported_as_such():
    beats = [sighting(0, 8, state=COLLECTIVE_FAILED, note="RuntimeError: reset"), sighting(1, 8)]
    assert find_failed_ranks(beats, 100.0, LIMITS, first_hit=99.0) is None
    verdict = find_failed_ranks(beats, 101.0, LIMITS, first_hit=96.0)
    assert verdict.ranks == () and "node0, node1" in verdict.sentence and "reset" in verdict.sentence


def test_a_beat_survives_the_store():
    beat = HeartbeatRecord(3, "n", 4, patience=math.inf, verdict=("rank 1 is gone", [1]))
    again = HeartbeatRecord.from_text(beat.to_text().encode())
    assert again.patience == math.inf and again.verdict == ["rank 1 is gone", [1]]


def test_one_process_needs_no_store():
    with Heartbeat(0, 1, 1.0) as alive:
        alive.beat(1, "data")
    with pytest.raises(ValueError), Heartbeat(0, 1, 1.0):
        raise ValueError


# -- the environment -------------------------------------------------------------------------------------------------


def test_environment_is_bounded_by_the_timeout(monkeypatch, tmp_path):
    for name in [name for name in os.environ if "NCCL" in name or "TORCH_FR" in name or name == "DEEPSPEED_TIMEOUT"]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert prepare_environment(90.0, tmp_path / "logs") == []
    assert os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "90" and os.environ["DEEPSPEED_TIMEOUT"] == "2"
    assert (
        os.environ[FLIGHT_RECORDER_FILE[0]] == str(tmp_path / "logs" / "flight_rank_") and (tmp_path / "logs").is_dir()
    )


def test_what_the_user_set_stays_and_what_outlasts_the_timeout_is_named(monkeypatch):
    given = {
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "12000000",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "7",
    }
    monkeypatch.setattr(os, "environ", dict(given))
    notes = prepare_environment(600.0)
    assert given.items() <= os.environ.items()
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ and "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    assert [note.split("=")[0] for note in notes] == [name for name in given if "TRACE" not in name]
