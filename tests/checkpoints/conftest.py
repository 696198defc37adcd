"""Real DeepSpeed checkpoints for the tests of this folder, made once in a session by make_zero.py."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
# make_zero.py is a script beside the tests, and they read its table of cases; pytest's import mode does not find it.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def zero_dir(tmp_path_factory) -> Path:
    """A folder with one sub-folder for each case of make_zero.CASES, saved by DeepSpeed on two CPU ranks."""
    for module in ("torch", "deepspeed"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: no real checkpoints to read")
    out = tmp_path_factory.mktemp("zero")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_addr",
        "127.0.0.1",
        "--master_port",
        str(port),
        str(Path(__file__).with_name("make_zero.py")),
        "--out",
        str(out),
    ]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and (out / "COMPLETE").exists(), done.stderr[-3000:]
    return out


@pytest.fixture
def zero_copy(zero_dir, tmp_path):
    """copy(case) -> a private copy of a case's zero/ folder, to be damaged."""

    def copy(case: str) -> Path:
        target = tmp_path / case / "zero"
        shutil.copytree(zero_dir / case / "zero", target)
        return target

    return copy
