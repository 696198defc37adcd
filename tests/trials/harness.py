"""What every trial uses: the command line, a rank of a training, inputs, and the mark of what is
still to be done.

Trials know mmldlm from outside alone: every import path and command of theirs stands here, so that
they survive moves of files. A trial is named after its entry: the file, the section and the number
or name in it (`todo("newcomer B1")`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.helpers import ROOT, rank_server

COMMAND = Path(__file__).with_name("command.py")
TRAIN = ROOT / "mmldlm" / "train.py"
LAUNCHERS = ROOT / "launchers"
# Runs with `bash tests/run.sh --trials` only: takes over three seconds.
SLOW = pytest.mark.slow_trial


def todo(entry: str):
    """Mark a trial of a later issue: it fails today, and its mark goes when it passes."""
    return pytest.mark.xfail(strict=True, reason=f"to do: {entry}")


@dataclass(frozen=True)
class Result:
    """A command that ended: exit code, and stdout with stderr."""

    code: int
    output: str

    @property
    def traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.output

    def __contains__(self, text: str) -> bool:
        return text in self.output


def mmldlm(
    *words: object,
    cwd: Path | None = None,
    env: dict[str, str | None] | None = None,
    timeout: float = 60,
) -> Result:
    """Run `mmldlm words` in a fork of a process that has imported everything: it starts in a tenth
    of a second.

    What depends on imports, on the interpreter or on signals at its start needs `fresh_mmldlm`.
    """
    return _forked(COMMAND, words, cwd, env, timeout)


def train_rank(
    *words: object,
    cwd: Path | None = None,
    env: dict[str, str | None] | None = None,
    timeout: float = 120,
) -> Result:
    """Run one training rank (`python mmldlm/train.py words`, what `mmldlm train` becomes) in a
    fork.
    """
    return _forked(TRAIN, words, cwd, env, timeout)


def _forked(
    script: Path, words: tuple, cwd: Path | None, env: dict | None, timeout: float
) -> Result:
    code, output = rank_server().run_command(
        script,
        [str(word) for word in words],
        cwd=cwd or ROOT,
        environment={**(env or {})},
        timeout=timeout,
    )
    return Result(code, output)


def fresh_mmldlm(
    *words: object,
    cwd: Path | None = None,
    env: dict[str, str | None] | None = None,
    timeout: float = 120,
) -> Result:
    """Run the installed `mmldlm` command in a new interpreter (two seconds and more)."""
    return shell(
        [Path(sys.executable).with_name("mmldlm"), *words], cwd=cwd, env=env, timeout=timeout
    )


def shell(
    command: list | str,
    cwd: Path | None = None,
    env: dict[str, str | None] | None = None,
    timeout: float = 120,
) -> Result:
    """Run any command; a string is given to bash.

    Everything it started is ended when the time is up.
    """
    words = (
        ["bash", "-c", command] if isinstance(command, str) else [str(word) for word in command]
    )
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    for name, value in (env or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        raise TimeoutError(
            f"no end after {timeout} s:\n{output[-3000:].decode(errors='replace')}"
        ) from None
    return Result(process.returncode, output.decode(errors="replace"))


def tiny_run(store: Path, folder: Path, name: str, *more: str) -> list[str]:
    """Arguments of a training of six steps in one process, saved twice."""
    return [
        "--config-name",
        "tiny",
        "engine.kind=single",
        f"data.latent_data_root={store}",
        "training.num_train_steps=6",
        "optimizer.warmup_steps=2",
        "logging.save_freq=3",
        "logging.eval_freq=100",
        "training.train_batch_size=4",
        "data.max_validation_samples=8",
        f"logging.save_dir={folder}",
        f"logging.run_name={name}",
        *more,
    ]


def records(path: Path) -> list[dict]:
    """Objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def refuses(result: Result, *patterns: str, code: int = 2) -> None:
    """Assert that a command refused its input: its exit code, no traceback, and each pattern in
    what it printed.
    """
    assert result.code == code and not result.traceback, (
        f"exit {result.code}\n{result.output[-3000:]}"
    )
    for pattern in patterns:
        assert re.search(pattern, result.output), (
            f"{pattern!r} is not in:\n{result.output[-3000:]}"
        )


def succeeds(result: Result, *patterns: str) -> None:
    """Assert that a command ended with 0, without a traceback, and printed each pattern."""
    refuses(result, *patterns, code=0)


def ranks_command(nproc: int, script: Path) -> list[str]:
    """Command line of what `mmldlm train --nproc N` becomes, with another script as its ranks
    (starts in 0.3 s).
    """
    start = ROOT / "mmldlm" / "utils" / "run_module.py"
    return [sys.executable, str(start), "mmldlm.launch.local_launcher", str(nproc), str(script)]


def module_command(module: str, *words: object) -> list[str]:
    """Command line of `python -m mmldlm.MODULE words`, as users and torchrun start modules."""
    return [sys.executable, "-m", f"mmldlm.{module}", *map(str, words)]


def installed_environment(folder: Path, programs: dict[str, str], root: Path = ROOT) -> Path:
    """A virtual environment whose stamps say that it is set up for the checkout `root`, without an
    installation.

    Args:
        folder: does not exist yet.
        programs: name -> line of sh, for what the launcher scripts start in place of the real
            program.
    """
    (folder / "bin").mkdir(parents=True)
    lines = {"python": f'exec {sys.executable} "$@"', **programs}
    for name, line in lines.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    stamp = shell(
        f". launchers/_env.sh; MMLDLM_ROOT={root}; mmldlm_stamp {folder}/bin/python {folder}",
        cwd=ROOT,
    ).output
    (folder / ".mmldlm-base").write_text(stamp, encoding="utf-8")
    (folder / ".mmldlm-home").write_text(f"{folder}\n", encoding="utf-8")
    return folder


def virtual_cluster(folder: Path, num_hosts: int):
    """Hosts n1, n2, ... with networks, sshd and process numbers of their own; a context manager.

    Skips without root.
    """
    from tests.support.virtual_cluster import VirtualCluster, reason_to_skip

    if reason := reason_to_skip():
        pytest.skip(reason)
    return VirtualCluster(folder, num_hosts)


def mostly_slow(values, *default) -> list:
    """Parameters of a trial, all but `default` marked SLOW: others of their kind run with --trials
    only.
    """
    assert set(default) <= set(values), default
    return [value if value in default else pytest.param(value, marks=SLOW) for value in values]


def during_conversion(source: Path, out: Path, action) -> Result:
    """Convert in this process, and call `action` once while OUT is being written; the error counts
    as the output.
    """
    from mmldlm.checkpoints.convert import convert
    from mmldlm.errors import MmldlmError

    calls = []

    def on_bytes(done: int, total: int) -> None:
        if not calls:
            calls.append(done)
            action()

    try:
        convert(source, out, on_bytes=on_bytes)
    except MmldlmError as error:
        return Result(error.exit_code, str(error))
    assert calls, "nothing was written"
    return Result(0, "")


def killed_conversion(source: Path, out: Path) -> None:
    """Convert in a process that is killed while it writes OUT."""
    lines = [
        "import os, sys",
        "from mmldlm.checkpoints.convert import convert",
        "convert(sys.argv[1], sys.argv[2], on_bytes=lambda done, total: os.kill(os.getpid(), 9))",
    ]
    assert shell([sys.executable, "-c", "\n".join(lines), source, out]).code == -9


def loaded_model(folder: Path, **options: object) -> Result:
    """Load a model as the README's Python snippet does; an error of mmldlm counts as the
    output.
    """
    from mmldlm.errors import MmldlmError
    from mmldlm.inference.load import load_pretrained

    try:
        load_pretrained(folder, **options)
    except MmldlmError as error:
        return Result(error.exit_code, str(error))
    return Result(0, "")
