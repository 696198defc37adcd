"""Versions and the code of every node, on facts written by hand."""

from __future__ import annotations

import pytest

from mmldlm.preflight.check import FAIL, PASS, WARN
from tests.support.preflight_context import make_context, run


def versions(nccl=None, **changes) -> dict:
    packages = {
        "python": "3.11.7",
        "torch": "2.13.0",
        "deepspeed": "0.19.8",
        "numpy": "2.4.6",
        **changes,
    }
    return {"packages": packages, "nccl": nccl, "machine": "x86_64"}


def test_nccl_as_loaded_counts_as_a_version():
    found = run(
        "VER001",
        make_context(
            versions={n: versions(nccl="2.20.5" if n == "c" else "2.19.3") for n in "abc"}
        ),
    )
    assert found["c"].status == FAIL and "2.20.5 (others 2.19.3)" in found["c"].measured


def test_a_lesser_package_only_warns():
    found = run(
        "VER001",
        make_context(
            versions={n: versions(numpy="2.0.0" if n == "c" else "2.4.6") for n in "abc"}
        ),
    )
    assert found["c"].status == WARN and found["a"].status == PASS


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"torch": "2.12.0"}, "pip install -c constraints.txt torch==2.13.0"),
        ({"python": "3.12.1"}, "use an environment of Python 3.11.7"),
        ({"mpi4py": "4.1.0"}, "pip uninstall mpi4py"),
        (
            {"nccl": "2.20.5"},
            "install torch from the same index as on the others: its wheel brings NCCL",
        ),
        ({"nccl": "2.20.5", "torch": "2.12.0"}, "pip install -c constraints.txt torch==2.13.0"),
        (
            {"mmldlm": "0.1.0"},
            "install mmldlm from the same checkout or wheel as on the others",
        ),
    ],
)
def test_the_fix_says_where_each_version_comes_from(changes, fix):
    shared = {"nccl": "2.19.3", "mpi4py": None, "mmldlm": "0.2.0"}
    usual, own = versions(**shared), versions(**{**shared, **changes})
    found = run("VER001", make_context(versions={"a": usual, "b": usual, "c": own}))
    assert found["c"].fix == f"on c: {fix}"


@pytest.mark.parametrize(
    ("sources", "commit", "status"),
    [
        ("s" * 16, "c" * 40, PASS),
        ("s" * 16, None, PASS),  # no git there, or a copy without its repository
        ("s" * 16, "d" * 40, WARN),
        ("t" * 16, "c" * 40, FAIL),
        ("t" * 16, None, FAIL),
    ],
)
def test_only_other_sources_fail(sources, commit, status):
    usual = {"sources": "s" * 16, "commit": "c" * 40}
    own = {"a": usual, "b": usual, "c": {"sources": sources, "commit": commit}}
    found = run("VER002", make_context(code=own))
    assert [found[name].status for name in "abc"] == [PASS, PASS, status]
    if status != PASS:
        assert "git checkout cccccccccccc" in found["c"].fix


def test_a_commit_that_one_node_knows_is_no_difference():
    own = {name: {"sources": "s", "commit": "c" * 40 if name == "b" else None} for name in "abc"}
    assert {found.status for found in run("VER002", make_context(code=own)).values()} == {PASS}
