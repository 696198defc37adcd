"""`mmldlm launch` on this machine alone: real ranks, no ssh."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmldlm.checkpoints import commit
from mmldlm.errors import UserError
from mmldlm.launch import launcher
from mmldlm.launch.outcome import Outcome, failed_rank_outcome
from mmldlm.tasks.registry import load_config
from tests.support.helpers import LONG, ROOT
from tests.support.preflight_context import three_nodes

SECRET = b"cannot-be-read-in-the-run"


def start(store, folder, *words, launcher="torchrun"):
    command = [sys.executable, "-m", "mmldlm.launch", "--launcher", launcher, "--nproc", "2"]
    command += ["--config-name", "tiny"]
    command += [
        "--skip",
        "PROC001,LIM003",
        "--master_port",
        "29533",
        f"data.latent_data_root={store}",
    ]
    command += [
        f"logging.save_dir={folder}",
        "logging.run_name=run",
        "logging.plot=false",
        "logging.eval_samples=0",
        "data.max_validation_samples=16",
    ]
    command += ["training.train_batch_size=4", "logging.eval_freq=1000000", *words]
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {k: v for k, v in os.environ.items() if k not in hidden} | {
        "OMP_NUM_THREADS": "1"
    }
    environment["WANDB_API_KEY"] = SECRET.decode()
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)


def ranks_of(process) -> list[int]:
    """Processes of train.py below a launch."""
    below, found = {process.pid}, []
    for entry in sorted((e for e in os.listdir("/proc") if e.isdigit()), key=int):
        try:
            parent = int(
                Path(f"/proc/{entry}/stat")
                .read_text(encoding="utf-8")
                .rpartition(") ")[2]
                .split()[1]
            )
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue
        if parent in below:
            below.add(int(entry))
            if b"mmldlm/train.py" in command:
                found.append(int(entry))
    return found


def is_running(pid: int) -> bool:
    """Not gone, and not only waiting for an init to take note of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def steps(folder) -> int:
    log = folder / "run" / "training_log.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.mark.parametrize("launcher", ["deepspeed", pytest.param("torchrun", marks=LONG)])
def test_a_run_to_its_end(store, tmp_path, launcher):
    process = start(store, tmp_path, "training.num_train_steps=3", launcher=launcher)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output[-3000:]
    assert steps(tmp_path) == 3
    assert output.count("step 3/3 |") == 1  # what rank 0 says is on the screen, once
    (logs,) = (tmp_path / "run" / "logs").glob("launch_*")
    assert len(list(logs.glob("*_rank*.log"))) == 2
    # Keys reach the ranks, but no file of the run's folder.
    assert not any(SECRET in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_killed_rank_ends_the_other_with_its_status(store, tmp_path):
    process = start(
        store, tmp_path, "training.num_train_steps=1000000", "logging.save_freq=1000000"
    )
    deadline = time.monotonic() + 200
    while steps(tmp_path) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    ranks = ranks_of(process)
    assert len(ranks) == 2, process.stdout.read() if process.poll() is not None else ranks
    os.kill(ranks[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0 and "ended first, with status 137 (signal 9)" in output, output[
        -3000:
    ]
    # The trace of the other rank's broken collective would push what matters off the screen.
    traces = list((tmp_path / "run" / "logs").glob("error_rank*.txt"))
    assert "Traceback" not in output and all("Traceback" in path.read_text() for path in traces), (
        output[-3000:]
    )
    assert not any(is_running(pid) for pid in ranks)


def test_a_missing_store_is_bad_input_and_nothing_starts(tmp_path):
    process = start(tmp_path / "nowhere", tmp_path, "--level", "0")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2 and "DATA001" in output
    assert not (tmp_path / "run" / "logs").exists()


def replace_parts(context, monkeypatch, watcher):
    """Let launch() run without a preflight and with another watcher; return the seconds of its
    pauses, which are left out.
    """
    pauses = []
    monkeypatch.setattr(launcher, "Watcher", watcher)
    monkeypatch.setattr(launcher, "run_preflight", lambda args: (context, 0))
    monkeypatch.setattr(launcher, "time", SimpleNamespace(sleep=pauses.append))
    return pauses


def _arguments(retries, overrides=()):
    """What `mmldlm launch tiny --retries N` gives the launcher."""
    return argparse.Namespace(
        config_name="tiny",
        config=None,
        deepspeed_config=None,
        overrides=list(overrides),
        retries=retries,
        elastic=False,
        grace=1.0,
        heartbeat_timeout=60.0,
        strict=False,
        script=None,
        log_dir=None,
    )


@pytest.mark.parametrize(
    ("name", "interrupted", "attempts"),
    [
        ("deepspeed", False, 3),
        ("deepspeed", True, 1),
        ("slurm", False, 1),
    ],  # Slurm warns the ranks, not the launch
)
def test_a_foreign_signal_is_a_fault_that_is_retried(
    tmp_path, monkeypatch, name, interrupted, attempts
):
    context, seen = three_nodes(tmp_path, (1, 1, 1)), []
    context.options.launcher = name

    class Ends:
        def __init__(self, context, train_args, log_dir, grace, heartbeat_timeout):
            seen.append(log_dir)

        def run(self):
            return Outcome(5, "rank 1 ended first", interrupted=interrupted)

    replace_parts(context, monkeypatch, Ends)
    args = _arguments(retries=2)
    assert launcher.launch(args) == 5
    # Attempts of one second have logs of their own.
    assert len(set(seen)) == len(seen) == attempts and all(path.is_dir() for path in seen)


def test_a_node_without_a_rank_is_excluded_and_not_the_one_that_waited_for_it():
    waited = {
        "rank": 1,
        "exit": 1,
        "ended": 5.0,
        "alive": False,
        "last": [],
        "failure": {"ranks": [[0, 0]], "sentence": "not all ranks came: rank 0 at n1:29500"},
    }
    views = {
        "n1": {"ranks": [], "processes": 0, "ended": []},
        "n2": {"ranks": [waited], "processes": 1, "ended": []},
    }
    outcome = failed_rank_outcome(views, {}, interrupted=False)
    assert outcome.failed_nodes == ["n1"] and outcome.code == 1
    assert outcome.reason.endswith(
        "; n1: its launcher ended before it started a rank, or never began"
    )


@pytest.mark.parametrize(
    ("codes", "code", "failed_nodes"),
    [
        ((1, 5), 1, ["n0"]),
        ((2, 5), 2, []),
        ((4, 5), 4, []),
        ((1, 2), 1, ["n0"]),
        ((137, 5), 137, ["n0"]),
        ((137, 143), 137, ["n0"]),
        ((5, 5), 5, []),
    ],
)
def test_a_rank_that_was_asked_to_stop_hides_no_failure(codes, code, failed_nodes):
    """Srun and torchrun send SIGTERM to the ranks that a failed one leaves behind."""
    views = {}
    for rank, status in enumerate(codes):
        state = {"rank": rank, "exit": status, "ended": float(rank), "alive": False, "last": []}
        views[f"n{rank}"] = {"ranks": [state], "processes": 1, "ended": []}
    outcome = failed_rank_outcome(views, {}, interrupted=False)
    assert (outcome.code, outcome.failed_nodes) == (code, failed_nodes)
    asked = failed_rank_outcome(views, {}, interrupted=True)
    assert (asked.reason == "interrupted as requested") == (code == 5)


def test_the_end_names_the_latest_checkpoint(tmp_path, capsys, monkeypatch):
    latest = {tmp_path / "saved": (tmp_path / "step_5", 1)}
    monkeypatch.setattr(launcher, "latest_checkpoint", latest.get)
    stopped = Outcome(1, "interrupted twice: stopped immediately")
    launcher.print_outcome(stopped, tmp_path, tmp_path / "saved")
    launcher.print_outcome(Outcome(1, "rank 0 ended first"), tmp_path, tmp_path / "empty")
    printed = capsys.readouterr().err
    assert (
        f"latest checkpoint: {tmp_path}/step_5" in printed and "no complete checkpoint" in printed
    )


def test_a_disk_that_is_away_is_waited_for(tmp_path, monkeypatch, capsys):
    """Often it is what ended the ranks: the folders of logs and checkpoints fail, too."""
    context, attempts, away = three_nodes(tmp_path, (1, 1, 1)), [], [0]
    monkeypatch.setattr(launcher, "find_latest_valid", lambda *_, **__: fail_or(None))
    create = launcher.create_log_dir
    monkeypatch.setattr(launcher, "create_log_dir", lambda folder: fail_or(create(folder)))

    def fail_or(value):
        if away[0] > 0:
            away[0] -= 1
            raise UserError("a readable checkpoint", "Stale file handle", "mount the disk again")
        return value

    class Fails:
        def __init__(self, context, train_args, log_dir, grace, heartbeat_timeout):
            attempts.append(log_dir)

        def run(self):
            away[0] = 3  # the outcome, and the storage of two attempts
            return Outcome(1, "rank 3 ended first")

    pauses = replace_parts(context, monkeypatch, Fails)
    args = _arguments(retries=4)
    assert launcher.launch(args) == 1
    # Each attempt of ranks is followed by one that finds no disk, and one pause more.
    assert len(attempts) == 2 and pauses == [10, 30, 60, 60]
    printed = capsys.readouterr().err
    assert "latest checkpoint: cannot be read now" in printed
    assert printed.count("no attempt is possible yet") == 3


@pytest.mark.parametrize("resume", [["training.resume=/runs/old/latest"], []])
def test_a_retry_resumes_only_what_this_launch_has_saved(tmp_path, monkeypatch, resume):
    """With nothing saved, training.resume=auto would be a fresh start, or what another run left in
    the folder.
    """
    context = three_nodes(tmp_path, (1, 1, 1))
    run_dir, seen = context.config.run_dir(), []

    def save(step):
        pending = commit.begin(run_dir, step)
        (pending.path / "model.pt").write_text("weights")
        state = {"step": step, "applied_steps": step, "global_batch": 1, "num_samples": 1}
        (pending.path / "training_state.json").write_text(json.dumps(state))
        pending.commit()

    class Fails:
        def __init__(self, context, train_args, log_dir, grace, heartbeat_timeout):
            seen.append(list(train_args)[1:])

        def run(self):
            if len(seen) == 2:
                save(7)
            return Outcome(1, "rank 3 ended first")

    pauses = replace_parts(context, monkeypatch, Fails)
    if resume:
        save(6)  # of an earlier run, which the explicit resume leaves aside
    given = ["--config-name", "tiny", "logging.run_name=run", *resume]
    args = _arguments(retries=3, overrides=given[2:])
    assert launcher.launch(args) == 1
    auto = [*given, "training.resume=auto"]
    assert seen[:3] == [given, given, auto] and pauses == [10, 30, 60]
    assert load_config("tiny", None, seen[3][2:]).training.resume == "auto"
