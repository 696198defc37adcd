"""Fixtures: real DeepSpeed and FSDP checkpoints, saved once per session by make_zero.py and
make_fsdp.py.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from tests.support.helpers import run_ranks

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


def launch_maker(script: str, world_size: int, *words: str) -> None:
    """Run a make_*.py script of this folder on CPU ranks."""
    for module in ("torch", "deepspeed"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: no real checkpoints to read")
    done = run_ranks(world_size, Path(__file__).with_name(script), *words)
    assert done.returncode == 0, done.stdout[:4000] + done.stdout[-2000:]


@pytest.fixture(scope="session")
def zero_dir(tmp_path_factory) -> Path:
    """A folder with one sub-folder for each case of make_zero.CASES, saved by DeepSpeed on two CPU
    ranks.
    """
    out = tmp_path_factory.mktemp("zero")
    launch_maker("make_zero.py", 2, "--out", str(out))
    return out


@pytest.fixture(scope="session")
def zero_world_dir(tmp_path_factory):
    """(world size) -> a folder with the cases OTHER_WORLDS, saved by that many ranks; each made
    once.
    """
    made: dict[int, Path] = {}

    def folder(world_size: int) -> Path:
        if world_size not in made:
            made[world_size] = tmp_path_factory.mktemp(f"zero_world{world_size}")
            launch_maker(
                "make_zero.py",
                world_size,
                "--out",
                str(made[world_size]),
                "--cases",
                ",".join(OTHER_WORLDS),
            )
        return made[world_size]

    return folder


@pytest.fixture(scope="session")
def fsdp_dir(tmp_path_factory) -> Path:
    """Folders saved by make_fsdp.py on two CPU ranks: see there."""
    out = tmp_path_factory.mktemp("fsdp")
    launch_maker("make_fsdp.py", 2, "--out", str(out))
    return out


@pytest.fixture
def zero_copy(zero_dir, tmp_path):
    """copy(case) -> a private copy of a case's zero/ folder, to be damaged."""

    def copy(case: str) -> Path:
        target = tmp_path / case / "zero"
        shutil.copytree(zero_dir / case / "zero", target)
        return target

    return copy
