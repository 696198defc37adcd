"""Accidents of a launch that runs on the bed, and how `mmldlm launch` must end then; for tests and benchmark."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bed import ROOT, Bed, end

PYTHON = sys.executable
NODES = "n1 slots=1\nn2 slots=1\n"


@dataclass(frozen=True)
class Accident:
    """act(bed, stack) happens before or after the group has formed; the screen must then say one of `words`."""

    name: str
    after: bool
    act: Callable[[Bed, contextlib.ExitStack], None]
    words: tuple[str, ...]


def _kill(host, pattern: str) -> None:
    host.sh("pkill", "-KILL", "-f", pattern)


def _cut(bed, stack) -> None:
    stack.enter_context(bed.cable_pulled(bed["n2"]))


_ACTS = {
    "rank killed": (lambda bed, stack: _kill(bed["n2"], "mmldlm/train.py"), ("rank 1 on n2 ended first",)),
    "node's launcher killed": (
        lambda bed, stack: _kill(bed["n2"], "deepspeed.launcher.launch"),
        ("n2: its launcher ended",),
    ),
    "launcher killed": (lambda bed, stack: _kill(bed["n1"], "^pdsh "), ("the launcher ended",)),
    "host cut off": (_cut, ("n2 is lost",)),
}
ACCIDENTS = [
    Accident(f"{name} {'after' if after else 'before'} the group forms", after, act, words)
    for name, (act, words) in _ACTS.items()
    for after in (False, True)
]


def start(bed: Bed, store: Path, folder: Path, *words: str, launcher: str = "deepspeed") -> subprocess.Popen:
    """`mmldlm launch` on n1 for n1 and n2."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hostfile").write_text(NODES)
    command = [PYTHON, "-m", "mmldlm.launch", "--hostfile", folder / "hostfile", "--launcher", launcher]
    command += ["--config-name", "tiny", f"data.latent_data_root={store}", f"logging.save_dir={folder}/runs"]
    command += ["data.max_validation_samples=16", "logging.run_name=run", "training.train_batch_size=4", *words]
    return bed["n1"].popen(
        *command,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},  # the hosts share the cores of one machine
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen, seconds: float = 240) -> None:
    """Wait until a condition holds while a launch runs."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"the launch never came so far:\n{process.stdout.read()[-4000:]}")
        time.sleep(0.1)


def ranks_on(host) -> list[int]:
    """Processes of train.py on a host."""
    done = host.run("pgrep", "-f", "mmldlm/train.py")
    return [int(line) for line in done.stdout.split()] if done.returncode == 0 else []


def steps_of(folder: Path) -> int:
    """Steps that a launch has logged."""
    path = folder / "runs" / "run" / "training_log.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def play(bed: Bed, store: Path, folder: Path, accident: Accident) -> tuple[float, int, str, list[int]]:
    """Start a long run, let the accident happen; (seconds until the launch had ended, exit code, screen, ranks that
    are left on n1)."""
    with contextlib.ExitStack() as stack:
        process = start(bed, store, folder, "training.num_train_steps=100000", "logging.save_freq=100000")
        stack.callback(end, process)
        wait_for(lambda: len(ranks_on(bed["n2"])) > 0, process)
        if accident.after:
            wait_for(lambda: steps_of(folder) >= 3, process)
        accident.act(bed, stack)
        happened = time.monotonic()
        output, _ = process.communicate(timeout=120)
        seconds = time.monotonic() - happened
        left = ranks_on(bed["n1"])
    return seconds, process.returncode, output, left
