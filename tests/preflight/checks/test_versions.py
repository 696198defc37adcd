"""The code of every node, on facts written by hand."""

from __future__ import annotations

import pytest

from mmldlm.preflight.check import FAIL, PASS, WARN
from tests.support.preflight_context import make_context, run


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
