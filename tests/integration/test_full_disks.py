"""Real runs whose disk is full, whose reader leaves, or whose wandb ends."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.helpers import ROOT, environment, read_log, train_words

pytestmark = pytest.mark.long

SCRIPT = str(ROOT / "mmldlm" / "train.py")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 10 MB: one checkpoint of the tiny model (7 MB) fits, a second beside it
    does not.
    """
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    # Lazily: the run in this process ended in an error and has its logs still open.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_full_disk_is_an_event_and_the_last_checkpoint_stays(
    store, small_disk, monkeypatch, capsys, background
):
    from mmldlm.checkpoints.locate import find_latest_valid
    from mmldlm.train import main
    from mmldlm.training import checkpointer

    monkeypatch.setattr(checkpointer, "FINAL_SAVE_BACKOFF", 0.0)
    words = [
        "engine.kind=single",
        "training.num_train_steps=6",
        "logging.save_freq=2",
        f"checkpoints.async_save={background}",
    ]
    assert main(train_words(store, small_disk, "run", *words)) == 1
    said = capsys.readouterr().err
    assert "the last checkpoint (step 6) could not be saved" in said and "step_00000002" in said
    events = read_log(small_disk, "run", "events.jsonl")
    assert [e["step"] for e in events if e["event"] == "save"] == [2]
    failed = [e for e in events if e["event"] == "save_failed"]
    assert [e["step"] for e in failed] == [4, 6, 6, 6] and all(
        "free the disk (" in e["reason"] for e in failed
    )
    assert find_latest_valid(small_disk / "run").name == "step_00000002"
    assert not list((small_disk / "run" / "checkpoints").glob(".partial*"))
    assert len(read_log(small_disk, "run")) == 6


def test_a_full_disk_under_every_log_ends_no_run(store, tmp_path, monkeypatch, capsys):
    """Only rank 0 writes logs: an error there would leave the others waiting.

    Also through a rollback and the end.
    """
    from mmldlm.stability.rollback import RollbackReason
    from mmldlm.train import main
    from mmldlm.training import loop, run_folder

    def full(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")

    class Full(run_folder.JsonlLog):
        write = close = full

        def __init__(self, path, resume_step=None):
            if resume_step:
                full(self)
            super().__init__(path, resume_step)

    troubles = [RollbackReason(3, "made up")]
    monkeypatch.setattr(run_folder, "JsonlLog", Full)
    monkeypatch.setattr(run_folder, "train_log_path", lambda *_: Path("/dev/full"))
    find = lambda _, step, *__: troubles.pop() if step == 3 and troubles else None  # noqa: E731
    monkeypatch.setattr(loop, "needs_rollback", find)
    words = [
        "engine.kind=single",
        "training.num_train_steps=4",
        "logging.save_freq=2",
        "logging.eval_samples=4",
    ]
    assert main(train_words(store, tmp_path, "run", *words)) == 0
    said = capsys.readouterr().out
    logs = ("training_log.jsonl", "eval_log.jsonl", "samples.jsonl", "events.jsonl", "/dev/full")
    for name in logs:
        assert said.count(f"cannot write to {name}") == 1, name
    assert "rollback from step 3 to 2" in said and "training_log.jsonl keeps its records" in said
    assert (tmp_path / "run" / "latest").resolve().name == "step_00000004"


def test_without_a_reader_and_without_wandb_a_run_continues(store, tmp_path, monkeypatch, capfd):
    """`mmldlm train | head -3`, and wandb's process killed: each is said once; the exit code is
    that of a good run.
    """
    from mmldlm.observe.trackers import registry
    from mmldlm.train import main

    words = [
        "engine.kind=single",
        "training.num_train_steps=4",
        "logging.log_freq=1",
        "logging.plot=false",
        "logging.eval_samples=0",
    ]
    piped = train_words(store, tmp_path, "piped", *words)
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, SCRIPT, *piped],
        env=environment(),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    with open(reader, encoding="utf-8") as lines:
        next(lines)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert error.count("output to this terminal or pipe ends") == 1 and "Traceback" not in error
    assert (tmp_path / "piped" / "latest").resolve().name == "step_00000004"

    class Gone:
        def log(self, *_):
            raise ConnectionResetError("Connection lost")

        finish = log

    monkeypatch.setitem(registry.TRACKERS, "wandb", lambda run: Gone())
    words = [*words, "logging.trackers=[wandb]"]
    assert main(train_words(store, tmp_path, "alone", *words)) == 0
    assert capfd.readouterr().out.count("logging to wandb ended (ConnectionResetError") == 1
    events = read_log(tmp_path, "alone", "events.jsonl")
    assert [e["tracker"] for e in events if e["event"] == "tracker_failed"] == ["wandb"]
