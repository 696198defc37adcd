"""A rank that dies or stands still ends the whole job, and every such end says which rank, where,
and since when.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from pathlib import Path

import pytest

from mmldlm.distributed.heartbeat import Heartbeat
from tests.support.helpers import launch, torchrun

pytestmark = pytest.mark.long

WORKER = str(Path(__file__).with_name("heartbeat_worker.py"))
CASES = [
    *(
        "exit@1",
        "kill@1",
        "stop@1",
        "sleep@1",
        "raise@1",
        "exit@0",
        "kill@0",
        "stop@0",
        "sleep@0",
        "raise@0",
    ),
    *("stop@0@agent", "kill@0@agent", "evaluate@1", "evaluate@0", "agreed@0"),
]


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
    return "\n".join(
        line for text in texts for line in text.splitlines() if line.startswith("ERROR: ")
    )


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.split("@")[0] not in ("evaluate", "agreed")]
)
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
        assert all("heartbeat_worker.py" in line for line in lines)  # where it stands
        assert all(line.endswith(f"of the ranks: {folder / case / 'logs'}") for line in lines)


@pytest.mark.parametrize("case", ["evaluate@1", "evaluate@0"])
def test_a_rank_that_works_long_and_beats_is_left_alone(jobs, case):
    folder, codes = jobs
    assert codes[case] == [0, 0, 0] and said(folder, case) == ""


def test_an_end_that_all_ranks_agreed_on_keeps_its_exit_code(jobs):
    folder, codes = jobs
    assert codes["agreed@0"] == [4, 4, 4] and said(folder, "agreed@0") == ""


def test_groups_of_others_wait_as_long_as_the_job_says(jobs):
    """DeepSpeed's and device meshes' have torch's default; that of writers keeps its own."""
    folder, _ = jobs
    limits = json.loads((folder / "agreed@0" / "limits_1").read_text())
    assert limits == [12.0 + 7 * 86_400, 77.0]


def test_a_rank_that_is_ended_leaves_its_stack(jobs):
    folder, _ = jobs
    assert "heartbeat_worker.py" in (folder / "sleep@1" / "logs" / "stack_rank1.txt").read_text()


def test_under_torchrun(tmp_path):
    done = launch(torchrun(3, WORKER, str(tmp_path), "torchrun:sleep@1"), timeout=200)
    assert done.returncode != 0
    pid = (tmp_path / "pid_1").read_text()
    # Not at the start of a line: four processes write to one pipe, and one may be in the middle of
    # its own.
    (line,) = re.findall(r"ERROR: rank .*", done.stdout) or [done.stdout[-3000:]]
    assert line.startswith(
        f"ERROR: rank 1 on {socket.gethostname()} (pid {pid}) has made no progress since step 3"
    ), line


def test_one_process_needs_no_store():
    with Heartbeat(0, 1, 1.0) as alive:
        alive.enter_phase(1, "data")
    with pytest.raises(ValueError), Heartbeat(0, 1, 1.0):
        raise ValueError


def test_time_in_which_a_process_is_suspended_does_not_count(monkeypatch):
    seconds = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    heartbeat = Heartbeat(0, 1, timeout=15.0)  # the watchdog's rounds are at most 3 s apart
    seconds[0] += 2.0
    assert heartbeat._now() == heartbeat._tick() == 1002.0
    seconds[0] += 500.0
    assert heartbeat._now() == heartbeat._tick() == 1005.0
    seconds[0] += 2.0
    assert heartbeat._now() == 1007.0
