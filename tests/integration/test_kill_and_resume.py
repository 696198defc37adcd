"""Real runs that are killed or asked to end, and go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.helpers import (
    ROOT,
    environment,
    rank_server,
    read_log,
    run_ranks,
    train_words,
)

pytestmark = pytest.mark.long

SCRIPT = str(ROOT / "mmldlm" / "train.py")


def kill_when(ranks, condition, timeout=200):
    """Kill -9 all ranks of a run once a condition holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert ranks.codes().count(None) == len(ranks.pids), ranks.output()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for rank in range(len(ranks.pids)):
        ranks.kill(rank)
    assert set(ranks.wait(60)) == {-9}, "the run ended before it could be killed"


def test_killed_and_resumed_it_has_the_same_losses(store, tmp_path):
    """One process, of texts.

    benchmarks/kill_resume.py kills ranks of every engine; its short form, of shifted images, is in
    tests/benchmarks/test_engines_benchmarks.py.
    """
    words = ["model.dropout=0.1", "engine.kind=single"]
    common = [
        "training.num_train_steps=14",
        "training.train_batch_size=4",
        "logging.save_freq=4",
        "logging.eval_freq=7",
    ]
    straight = run_ranks(1, SCRIPT, *train_words(store, tmp_path, "straight", *common, *words))
    assert straight.returncode == 0, straight.stdout[-3000:]

    resumed = train_words(store, tmp_path, "killed", *common, *words, "training.resume=auto")
    log = tmp_path / "killed" / "training_log.jsonl"
    saved = tmp_path / "killed" / "checkpoints" / "step_00000004" / "manifest.json"
    kill_when(
        rank_server().start(1, resumed),
        lambda: saved.exists() and len(log.read_text().splitlines()) >= 6,
    )
    second = run_ranks(1, SCRIPT, *resumed)
    assert second.returncode == 0, second.stdout[-3000:]
    assert "resumed" in second.stdout

    expected, found = read_log(tmp_path, "straight"), read_log(tmp_path, "killed")
    assert [r["step"] for r in found] == list(range(1, 15))
    for a, b in zip(expected, found, strict=True):
        for key in (
            "loss",
            "text_loss",
            "latent_loss",
            "grad_norm",
            "lr",
            "epoch",
            "batch_in_epoch",
            "samples",
        ):
            assert a[key] == b[key], (a["step"], key)
    evaluations = [
        read_log(tmp_path, name, "eval_log.jsonl")[-1] for name in ("straight", "killed")
    ]
    for record in evaluations:
        record.pop("time")
    assert evaluations[0] == evaluations[1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_sigterm_saves_and_exits_5(store, tmp_path, num_workers):
    """Sent to the process alone, and with workers to its whole group, as Slurm and systemd do."""
    words = ["engine.kind=single", "training.num_train_steps=5000", "logging.save_freq=5000"]
    words = train_words(store, tmp_path, "run", *words, f"data.num_workers={num_workers}")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *words],
        env=environment(),
        text=True,
        start_new_session=True,
        **pipes,
    )
    log = tmp_path / "run" / "training_log.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and len(log.read_text().splitlines()) >= 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    (os.killpg if num_workers else os.kill)(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 5, output[-2000:]
    steps = len(log.read_text().splitlines())
    assert (tmp_path / "run" / "latest").resolve().name == f"step_{steps:08d}"
    assert "training.resume=auto" in output
