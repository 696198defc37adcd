"""Starting real runs: one process, several gloo ranks, or several under torchrun."""

from __future__ import annotations

import atexit
import fcntl
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.rank_server import SHARED, RankServer

ROOT = Path(__file__).resolve().parents[2]
# Whole launches and the short forms of benchmarks are dear: what stands for all of them runs
# always, the rest when it is asked for.
LONG = pytest.mark.skipif(
    os.environ.get("MMLDLM_ALL_TESTS") != "1",
    reason="dear, and one of many of its kind: run with MMLDLM_ALL_TESTS=1",
)


def environment(**more: str) -> dict[str, str]:
    """Environment of a run: one thread a rank, DeepSpeed on CPU, this checkout first."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
        **more,
    }


def torchrun(world_size: int, *words: str) -> list[str]:
    """Command line for some ranks of a script or module on this machine."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={world_size}",
        *words,
    ]


def launch(command: list[str], timeout: float = 240, **more: str) -> subprocess.CompletedProcess:
    """Run a command to its end in its own session; everything it started is ended when the time is
    up.
    """
    process = subprocess.Popen(
        command,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"no end after {timeout} s:\n{output[-4000:]}") from None
    return subprocess.CompletedProcess(command, process.returncode, output)


def launch_benchmark(
    name: str, *words: str | Path, timeout: float = 900
) -> subprocess.CompletedProcess:
    """Run a script of benchmarks/ to its end; its ranks are forked from this session's process."""
    rank_server()
    script = ROOT / "benchmarks" / name
    return launch([sys.executable, str(script), *map(str, words)], timeout)


def run_ranks(
    world_size: int, script: str | Path, *words: str, timeout: float = 300
) -> subprocess.CompletedProcess:
    """Run a script as world_size real ranks and wait for them; returncode is that of the first
    rank that failed.

    Without a launcher: the ranks are forked from one process that has imported torch and deepspeed
    (tests/support/rank_server.py), which saves seven seconds per launch.
    """
    ranks = rank_server().start(world_size, list(words), Path(script))
    codes = ranks.wait(timeout)
    return subprocess.CompletedProcess(
        [str(script), *words], next(filter(None, codes), 0), ranks.output(1_000_000)
    )


@functools.cache
def rank_server() -> RankServer:
    """The process from which this session's ranks are forked, and those of its benchmarks."""
    server = start_rank_server()
    server.__enter__()
    atexit.register(server.__exit__)
    return server


def start_rank_server() -> RankServer:
    """Start the server, without waiting for it, and make it that of all processes that this one
    starts.
    """
    folder = tempfile.TemporaryDirectory(prefix="mmldlm_ranks_")
    atexit.register(folder.cleanup)
    server = RankServer(folder.name)
    os.environ[SHARED] = server.address
    return server


def made_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]
) -> Path:
    """Return a folder of the session that make(folder) fills: the first worker of pytest-xdist
    that asks makes it, the others wait, and all only read it.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder, complete = shared / name, shared / f"{name}.complete"
    with open(shared / f"{name}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            complete.touch()
    return folder


def train_words(store, folder, name: str, *more: str) -> list[str]:
    """Arguments of `mmldlm/train.py` for a tiny run, without a plot and samples, each of which
    takes as long.
    """
    return [
        "--config-name",
        "tiny",
        f"data.latent_data_root={store}",
        f"logging.save_dir={folder}",
        f"logging.run_name={name}",
        "data.max_validation_samples=16",
        "logging.plot=false",
        "logging.eval_samples=0",
        *more,
    ]


def read_log(folder, name: str, file: str = "training_log.jsonl") -> list[dict]:
    """Records of a run's log."""
    return [json.loads(line) for line in (Path(folder) / name / file).read_text().splitlines()]
