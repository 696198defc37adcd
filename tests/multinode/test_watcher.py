"""`mmldlm launch` on real hosts: whatever dies, the rest is stopped, the reason shown, and nothing
left behind.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.support.helpers import LONG, ROOT
from tests.support.launch_faults import (
    LAUNCH_FAULTS,
    NEIGHBORS,
    left_on,
    pids,
    play,
    play_beside,
    ranks_on,
    start,
    steps_of,
    wait_for,
)
from tests.support.virtual_cluster import end

pytestmark = pytest.mark.long

# A host that is cut off is in test_elastic.py too, which always runs, and a killed rank in the
# retry's test below; benchmarks/preflight.py plays all eight and measures them.
PLAYED = ("launcher killed before the group forms", "host cut off after the group forms")


@LONG
@pytest.mark.parametrize(
    "fault",
    [fault for fault in LAUNCH_FAULTS if fault.name in PLAYED],
    ids=lambda fault: fault.name,
)
def test_a_fault_ends_the_complete_run_and_nothing_else(cluster, store, tmp_path, fault):
    with cluster["n1"].process("sleep", "1000") as stranger:
        _, code, output, left = play(cluster, store, tmp_path, fault)
        assert stranger.poll() is None
    assert code != 0 and left == [], output[-3000:]
    assert any(words in output for words in fault.words), output[-3000:]
    (logs,) = (tmp_path / "runs" / "run" / "logs").glob("launch_*")
    assert "deepspeed.launcher.launch" in (logs / "launcher.log").read_text()


@LONG
def test_a_launcher_killed_before_it_has_a_rank_is_named(cluster, store, tmp_path):
    """Sooner than an agent sees it; the other node's rank, which waits in vain, is not blamed."""
    # Not the shell that starts it, whose command names it too.
    launcher = "^[^ ]*python[^ ]* .*[d]eepspeed.launcher.launch"
    at_once = f"until pkill -KILL -f '{launcher}'; do sleep 0.02; done"
    with cluster["n2"].process("sh", "-c", at_once):
        process = start(cluster, store, tmp_path, "engine.collective_timeout=15")
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output[-3000:]
    assert "n2: its launcher ended before it started a rank" in output, output[-3000:]
    assert "rank 0 on n1 ended first" not in output
    assert ranks_on(cluster["n1"]) == []


@LONG
def test_ends_of_other_launches_do_not_touch_one_that_trains(cluster, store, tmp_path):
    for ended in play_beside(cluster, store, tmp_path, NEIGHBORS):
        assert ended.code in ended.neighbor.codes and ended.left == [], ended.output[-3000:]
        assert ended.kept_trains and ended.pkills == "", ended


@LONG
@pytest.mark.parametrize("launcher", ["deepspeed", "mpi"])
def test_odd_names_another_tmpdir_and_a_full_tmp(cluster, store, tmp_path, launcher):
    """TMPDIR of a batch job on the head, and in .deepspeed_env; n2's folder in /tmp takes nothing
    while ranks run.
    """
    (tmp_path / "job").mkdir()
    (tmp_path / "env").write_text(f"TMPDIR={tmp_path}/job\n")
    name = "exp_$(touch pwned) `touch pwned`; '%h\"%n é"
    env = {
        "TMPDIR": f"{tmp_path}/job",
        "DS_ENV_FILE": f"{tmp_path}/env",
        "WANDB_API_KEY": "cannot-be-read",
    }
    words = [
        "--level",
        "0",
        "training.num_train_steps=8",
        "logging.save_freq=8",
        "logging.eval_freq=1000",
    ]
    process = start(cluster, store, tmp_path, *words, launcher=launcher, name=name, env=env)
    wait_for(lambda: steps_of(tmp_path, name) >= 2, process)
    (rank,) = pids(cluster["n2"], "rank_wrapper.py [0-9a-f]{32}$")[-1:]
    folder = f"/tmp/mmldlm_{cluster['n2'].sh('ps', '-ww', '-o', 'args=', rank).split()[-1]}"
    cluster["n2"].sh("mount", "--bind", folder, folder)
    try:
        cluster["n2"].sh("mount", "-o", "remount,bind,ro", folder)
        output, _ = process.communicate(timeout=240)
    finally:
        cluster["n2"].sh("umount", "--lazy", folder)
    assert process.returncode == 0 and steps_of(tmp_path, name) == 8, output[-3000:]
    assert not list(ROOT.glob("*pwned*")) and not Path("/pwned").exists()
    run = tmp_path / "runs" / name
    assert not any(
        b"cannot-be-read" in path.read_bytes() for path in run.rglob("*") if path.is_file()
    )
    assert "cannot-be-read" not in output


@LONG
def test_of_two_launches_into_one_folder_one_trains(cluster, store, tmp_path):
    """On two hosts, with ports of their own: each would have its own master."""
    long = ("--level", "0", "training.num_train_steps=100000", "logging.save_freq=100000")
    both = [
        start(cluster, store, tmp_path, *long, "--master_port", str(port), host=host)
        for host, port in (("n1", 29500), ("n2", 29600))
    ]
    try:
        deadline = time.monotonic() + 240
        while all(process.poll() is None for process in both) and time.monotonic() < deadline:
            time.sleep(0.2)
        (second,) = (process for process in both if process.poll() is not None)
        (first,) = (process for process in both if process is not second)
        output = second.stdout.read()
        assert second.returncode == 2 and "trains in it" in output, output[-3000:]
        seen = steps_of(tmp_path)
        wait_for(lambda: steps_of(tmp_path) > seen + 2, first)
        assert len(list((tmp_path / "runs" / "run" / "logs").glob("launch_*"))) == 2
    finally:
        for process in both:
            end(process)


@LONG
def test_when_the_head_is_killed_every_node_ends_its_part(cluster, store, tmp_path):
    process = start(
        cluster, store, tmp_path, "training.num_train_steps=100000", "logging.save_freq=100000"
    )
    wait_for(lambda: steps_of(tmp_path) >= 2, process)
    end(process)
    assert left_on(cluster["n1"]) == left_on(cluster["n2"]) == []


@LONG
def test_a_broken_session_is_reopened_and_an_interrupt_saves(cluster, store, tmp_path):
    words = ["training.num_train_steps=100000", "logging.save_freq=100000"]
    process = start(cluster, store, tmp_path, *words, launcher="torchrun")
    wait_for(lambda: steps_of(tmp_path) >= 2, process)
    cluster["n1"].sh("pkill", "-KILL", "-f", "^ssh .*mmldlm.launch.node_agent")
    time.sleep(15)  # longer than the agents wait for another to take over
    seen = steps_of(tmp_path)
    wait_for(lambda: steps_of(tmp_path) > seen, process)
    cluster["n1"].sh("pkill", "-INT", "-f", "python -m mmldlm.launch --hostfile")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 5, output[-3000:]
    assert list((tmp_path / "runs" / "run" / "checkpoints").glob("step_*/manifest.json"))
    assert ranks_on(cluster["n1"]) == ranks_on(cluster["n2"]) == []


@LONG
def test_a_retry_resumes_the_latest_checkpoint(cluster, store, tmp_path):
    words = [
        "--retries",
        "1",
        "training.num_train_steps=40",
        "logging.save_freq=5",
        "logging.eval_freq=1000",
    ]
    process = start(cluster, store, tmp_path, *words, launcher="torchrun")
    wait_for(
        lambda: list((tmp_path / "runs" / "run").glob("checkpoints/step_*5/manifest.json")) != [],
        process,
    )
    cluster["n2"].sh("pkill", "-KILL", "-f", "mmldlm/train.py")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output[-4000:]
    assert "attempt 2 of 2" in output and steps_of(tmp_path) == 40
    assert signal.SIGKILL + 128 == 137 and "status 137" in output
