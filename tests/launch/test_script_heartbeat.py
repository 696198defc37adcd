"""`mmldlm.heartbeat(step)`: which ranks of a script hang, and what a launch does with them."""

from __future__ import annotations

import subprocess
import sys

from mmldlm.launch.outcome import hung_outcome
from mmldlm.launch.script_heartbeat import HangWatch
from mmldlm.utils.network import free_port
from tests.support.helpers import environment


class Ranks:
    """Ranks on the nodes a, b, ... as their agents report them; none has sent a heartbeat yet."""

    def __init__(self, count: int):
        self.states = [
            {"rank": rank, "exit": None, "heartbeat": None, "log": "/", "last": []}
            for rank in range(count)
        ]
        self.views = {name: {"ranks": [s]} for name, s in zip("abcdef", self.states, strict=False)}
        self.watch = HangWatch(60.0)

    def beat(self, rank: int, step: int, **more) -> None:
        number = 1 + ((self.states[rank]["heartbeat"] or {}).get("number") or 0)
        self.states[rank]["heartbeat"] = {
            "rank": rank, "host": "elsewhere", "pid": 100 + rank, "number": number, "step": step,
            "phase": "", "progress_counter": step, **more,
        }  # fmt: skip

    def at(self, now: float):
        return self.watch.find_hung(self.views, now)


def test_a_rank_behind_is_named_after_the_limit():
    ranks = Ranks(3)
    for rank in range(3):
        ranks.beat(rank, 4)
    assert ranks.at(0.0) is None
    ranks.beat(0, 5)
    ranks.beat(2, 5)
    assert ranks.at(30.0) is None and ranks.at(59.0) is None
    found = ranks.at(61.0)
    assert found.ranks == (1,)
    assert found.sentence == "rank 1 on b (pid 101) has made no progress since step 4 (61 s ago)"
    assert hung_outcome(found, ranks.views).failed_nodes == ["b"]


def test_of_equal_steps_the_rank_outside_of_a_collective_is_named():
    ranks = Ranks(2)
    ranks.beat(0, 4)
    ranks.beat(1, 4)
    assert ranks.at(0.0) is None
    # The place of a rank is written later, with the same number.
    for state, place in zip(ranks.states, ("all_reduce", "load"), strict=True):
        state["heartbeat"] |= {"location": f"x.py:1 in {place}"}
    ranks.states[0]["heartbeat"]["in_collective"] = True
    found = ranks.at(61.0)
    assert found.ranks == (1,) and "at x.py:1 in load" in found.sentence


def test_who_waits_for_a_working_rank_is_not_hung():
    ranks = Ranks(2)
    ranks.beat(0, 4)
    for now in range(0, 300, 30):
        # A long evaluation, with heartbeats of the same step.
        ranks.beat(1, 3)
        assert ranks.at(float(now)) is None


def test_ranks_without_heartbeats_are_not_watched_but_named():
    ranks = Ranks(3)
    assert ranks.at(0.0) is None and ranks.at(1e6) is None
    ranks.beat(0, 1)
    assert ranks.at(1e6) is None
    assert "no heartbeat ever came from rank 1, 2" in ranks.at(2e6).sentence


def test_a_rank_that_waits_for_one_that_is_done_says_so():
    ranks = Ranks(2)
    ranks.beat(0, 9)
    ranks.beat(1, 8)
    ranks.states[0]["exit"] = 0
    assert ranks.at(0.0) is None
    assert "rank 0 on a (pid 100) exited at step 9: it was done" in ranks.at(61.0).sentence
    ranks.states[1]["exit"] = 0
    assert ranks.at(1e6) is None


# Attempt 1: rank 1 hangs. Attempt 2: rank 1 is killed.
SCRIPT = """
import os, pathlib, signal, time
import torch, mmldlm
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
attempts = pathlib.Path(f"attempts_{rank}")
attempts.write_text(attempts.read_text() + "." if attempts.exists() else ".")
attempt = len(attempts.read_text())

def read_a_batch(step):
    if rank == 1 and step == 3 and attempt == 1:
        time.sleep(1000)
    if rank == 1 and step == 3 and attempt == 2:
        os.kill(os.getpid(), signal.SIGKILL)

for step in range(5):
    mmldlm.heartbeat(step)
    read_a_batch(step)
    torch.distributed.all_reduce(torch.ones(2))
"""


def test_hung_and_killed_ranks_of_a_script_are_named(tmp_path):
    (tmp_path / "run.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mmldlm.cli", "launch", "--nproc", "2"]
    command += ["--launcher", "torchrun", "--level", "0", "--retries", "1"]
    command += ["--master_port", str(free_port())]
    command += ["--heartbeat-timeout", "6", "--", "run.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 137, printed
    hung, killed = (line for line in done.stderr.splitlines() if line.startswith("ended:"))
    assert hung.startswith("ended: rank 1 on localhost (pid ") and "rank 0" not in hung
    assert "no progress since step 3" in hung and "in read_a_batch" in hung
    assert "rank 1 on localhost ended first, with status 137" in killed


def test_outside_of_a_launch_a_heartbeat_does_nothing(tmp_path):
    program = (
        "import sys, threading, mmldlm; mmldlm.heartbeat(1); "
        "print(threading.active_count(), 'torch' in sys.modules, 'mmldlm.launch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True
    )
    assert done.stdout == "1 False False\n", done.stderr


def test_a_time_limit_of_scripts_is_none_of_a_run(capsys):
    from mmldlm.cli import main

    assert main(["launch", "--heartbeat-timeout", "60", "--config-name", "tiny"]) == 2
    assert "engine.collective_timeout" in capsys.readouterr().err
