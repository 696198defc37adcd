"""Rank wrapper and node agent with real processes on this machine; no launcher, no ssh."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from mmldlm.launch import node_agent, rank_wrapper, state_files

SLEEPER = "import sys, time; print('started', flush=True); time.sleep(1000)"
FAILING = "import sys; [print('line', i) for i in range(100)]; sys.exit(3)"


@pytest.fixture
def launched(tmp_path):
    """Start rank_wrapper.py with a small program; stop both at the end."""
    id = uuid.uuid4().hex
    started = []

    def start(program: str, number: int = 0, **environment: str) -> subprocess.Popen:
        (tmp_path / "train.py").write_text(program)
        values = {
            "script": str(tmp_path / "train.py"),
            "args": ["a=b c"],
            "environment": {"CARRIED": "yes"},
        }
        values |= {"logs": str(tmp_path), "folder": str(tmp_path)}
        node_agent.write_launch_file({"launch": id, "values": values})
        process = subprocess.Popen(
            [sys.executable, rank_wrapper.__file__, id],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RANK": str(number), "PYTHONPATH": os.getcwd(), **environment},
        )
        started.append(process)
        return process

    yield id, start
    node_agent.stop({"launch": id, "grace": 0})
    for process in started:
        process.wait()
        process.stdout.close()
    node_agent.release({"launch": id})
    assert state_files.state_folders(id) == []


def test_what_the_script_leaves_running_hides_no_end(launched):
    """A daemon with the output of its script, as a tracker's service."""
    id, start = launched
    daemon = "import subprocess; subprocess.Popen(['sleep', '60']); print('ended', flush=True)"
    process = start(f"{daemon}; raise SystemExit(3)")
    assert process.wait(timeout=40) == 3
    (state,) = states(id, until=lambda found: found[0]["exit"] is not None)
    assert (state["exit"], state["last"]) == (3, ["ended"])


def states(id: str, count: int = 1, until=lambda states: True) -> list[dict]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = node_agent.report_ranks({"launch": id})["ranks"]
        if len(found) == count and until(found):
            return found
        time.sleep(0.05)
    raise AssertionError(found)


def test_status_last_lines_and_log_of_a_failing_rank(launched, tmp_path):
    id, start = launched
    process = start(FAILING, number=0)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3 and "line 99" in output
    (state,) = states(id)
    assert (state["exit"], state["alive"], state["rank"]) == (3, False, 0)
    assert state["last"][-1] == "line 99" and len(state["last"]) == rank_wrapper.LAST_LINES
    assert (tmp_path / f"{state['host']}_rank0.log").read_text().count("\n") == 100


BAR = """
import sys, time
for number in range(200):
    sys.stdout.write(f"\\r{number}/200")
    sys.stdout.flush()
time.sleep(1000)
"""


def test_a_progress_bar_is_in_the_log_while_it_runs(launched, tmp_path):
    """It ends its lines by carriage returns."""
    id, start = launched
    start(BAR)
    (state,) = states(id)
    log, deadline = tmp_path / f"{state['host']}_rank0.log", time.monotonic() + 60
    while not (log.exists() and log.read_text().endswith("199/200")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


REPORTING = """
import sys
from mmldlm.distributed.failure_attribution import FailureReport, report_failed_ranks
report_failed_ranks(FailureReport("rank 1 on n2 has made no progress since step 4", (1,)))
sys.exit(1)
"""


def test_failed_ranks_that_a_rank_reports_are_in_its_state(launched):
    id, start = launched
    start(REPORTING).wait(timeout=60)
    (state,) = states(id)
    assert state["failure"] == {
        "ranks": [[1, 1]],
        "sentence": "rank 1 on n2 has made no progress since step 4",
    }


@pytest.mark.parametrize("ranks", ["range(8192)", "range(1, 4096, 8)"])
def test_a_report_of_thousands_of_ranks_arrives(launched, ranks):
    """All ranks, and one of every node."""
    id, start = launched
    start(REPORTING.replace("(1,)", f"tuple({ranks})")).wait(timeout=60)
    (state,) = states(id)
    runs = state["failure"]["ranks"]
    assert len(runs) == (1 if ranks == "range(8192)" else 500) and runs[-1][1] > 3900


def test_arguments_and_variables_arrive_unchanged(launched, tmp_path):
    id, start = launched
    process = start("import os, sys; print(sys.argv[1:], os.environ['CARRIED'])", number=1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and output == ""
    (state,) = states(id)
    assert (tmp_path / f"{state['host']}_rank1.log").read_text() == "['a=b c'] yes\n"


def test_a_killed_wrapper_takes_its_rank_along_and_is_seen(launched):
    id, start = launched
    process = start(SLEEPER)
    assert process.stdout.readline() == "started\n"
    (state,) = states(id)
    assert state["alive"] and state["exit"] is None
    killed = time.time()
    process.kill()
    (state,) = states(id, until=lambda found: not found[0]["alive"])
    assert state["exit"] is None and killed <= state["ended"] <= time.time()
    time.sleep(0.1)
    assert states(id)[0]["ended"] == state["ended"]  # when it was first missed
    deadline = time.monotonic() + 30
    while node_agent.launch_processes(id) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert node_agent.launch_processes(id) == []


def test_signals_reach_the_rank_and_its_death_by_one_is_a_status(launched):
    id, start = launched
    process = start(SLEEPER)
    process.stdout.readline()
    (state,) = states(id)
    request = {"launch": id, "signal": "SIGTERM"}
    assert node_agent.signal_ranks({**request, "told": [state["child"]]}) == []
    assert node_agent.signal_ranks({**request, "told": []}) == [state["child"]]
    assert process.wait(60) == 128 + signal.SIGTERM
    assert states(id)[0]["exit"] == 128 + signal.SIGTERM


@pytest.fixture
def small_memory():
    """A control group of 300 MiB; gives the file to write a pid to."""
    for parent, limit in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
        ("/sys/fs/cgroup", "memory.max"),
    ):
        folder = Path(parent) / f"mmldlm_{uuid.uuid4().hex}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            try:
                (folder / limit).write_text(str(300 << 20))
                yield folder / "cgroup.procs"
                return
            finally:
                folder.rmdir()
    pytest.skip("no control group can be made here")


def test_an_oom_kill_differs_from_a_manual_kill(launched, small_memory):
    id, start = launched
    grow = (
        f"import os; open({str(small_memory)!r}, 'w').write(str(os.getpid()))\nfill = b'x' * (1"
        " << 30)"
    )
    process = start(grow, number=0)
    assert process.wait(60) == 137
    process = start("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", number=1)
    assert process.wait(60) == 137
    assert [state["out_of_memory"] for state in states(id, 2)] == [True, False]


def test_stop_ends_what_ignores_sigterm_and_nothing_else(launched):
    id, start = launched
    process = start("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPER)
    process.stdout.readline()
    stranger = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.DEVNULL)
    try:
        assert node_agent.stop({"launch": id, "grace": 0.2}) >= 2
        process.wait(30)
        assert node_agent.launch_processes(id) == [] and stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_sigbus_is_explained_in_the_last_lines(launched):
    id, start = launched
    process = start("import os, signal; os.kill(os.getpid(), signal.SIGBUS)")
    assert process.wait(timeout=60) == 128 + signal.SIGBUS
    (state,) = states(id, until=lambda found: found[0]["exit"] is not None)
    assert "rank 0 ended with SIGBUS: a memory-mapped file became shorter" in state["last"][-1]
