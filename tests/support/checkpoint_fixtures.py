"""Fixtures: real DeepSpeed and FSDP checkpoints, saved once per session by make_zero.py and
make_fsdp.py, whichever worker of pytest-xdist needs them first.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from tests.support.helpers import made_once, run_ranks

# Layouts that depend on the number of ranks: one element may straddle two slices, or a rank hold
# padding alone.
OTHER_WORLDS = (
    "z0_bf16_named",
    "z1_bf16",
    "z1_bf16opt",
    "z2_bf16",
    "z2_robin",
    "z2_elastic",
    "z3_bf16",
    "z3_subgroups",
)


def saved_by(tmp_path_factory, name: str, script: str, world_size: int, *words: str) -> Path:
    """Return the folder that a make_*.py script of this folder fills on CPU ranks."""
    for module in ("torch", "deepspeed"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: no real checkpoints to read")

    def make(folder: Path) -> None:
        maker = Path(__file__).with_name(script)
        done = run_ranks(world_size, maker, "--out", str(folder), *words)
        assert done.returncode == 0, done.stdout[:4000] + done.stdout[-2000:]

    return made_once(tmp_path_factory, name, make)


@pytest.fixture(scope="session")
def zero_dir(tmp_path_factory) -> Path:
    """A folder with one sub-folder for each case of make_zero.CASES, saved by DeepSpeed on two CPU
    ranks.
    """
    return saved_by(tmp_path_factory, "zero", "make_zero.py", 2)


@pytest.fixture(scope="session")
def zero_world_dir(tmp_path_factory):
    """(world size) -> a folder with the cases OTHER_WORLDS, saved by that many ranks; each made
    once.
    """

    def folder(world_size: int) -> Path:
        words = ("--cases", ",".join(OTHER_WORLDS))
        name = f"zero_world{world_size}"
        return saved_by(tmp_path_factory, name, "make_zero.py", world_size, *words)

    return folder


@pytest.fixture(scope="session")
def fsdp_dir(tmp_path_factory) -> Path:
    """Folders saved by make_fsdp.py on two CPU ranks: see there."""
    return saved_by(tmp_path_factory, "fsdp", "make_fsdp.py", 2)


@pytest.fixture
def zero_copy(zero_dir, tmp_path):
    """copy(case) -> a private copy of a case's zero/ folder, to be damaged."""

    def copy(case: str) -> Path:
        target = tmp_path / case / "zero"
        shutil.copytree(zero_dir / case / "zero", target)
        return target

    return copy
