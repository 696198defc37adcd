"""Exit codes, and the nodes to exclude."""

from __future__ import annotations

import io

import pytest

from mmldlm.preflight.check import ERROR, FAIL, PASS, SKIP, WARN, Result
from mmldlm.preflight.report import exit_code, failing_nodes, print_report
from tests.support.preflight_context import make_context


@pytest.mark.parametrize(
    ("statuses", "strict", "code"),
    [
        ([("X", PASS)], False, 0),
        ([("X", PASS), ("Y", SKIP)], False, 0),
        ([("X", WARN)], False, 0),
        ([("X", WARN)], True, 1),
        ([("X", FAIL), ("Y", ERROR)], False, 1),
        ([("X", ERROR)], False, 3),
        ([("HOST001", FAIL)], False, 2),
        ([("CFG001", FAIL), ("X", FAIL)], False, 2),
    ],
)
def test_exit_codes(statuses, strict, code):
    assert exit_code([Result(status, id=id) for id, status in statuses], strict) == code


def test_the_node_in_most_bad_pairs_is_excluded():
    context = make_context()
    pairs = [Result(FAIL, node=f"{x}->{y}", scope="pair") for x, y in ("ac", "bc", "ca")]
    assert failing_nodes(context, pairs) == ["c"]


@pytest.mark.parametrize(
    ("status", "verdict"),
    [(PASS, "this run will start"), (FAIL, "will not start"), (ERROR, "could not be checked")],
)
def test_the_report_begins_with_a_verdict(status, verdict):
    out = io.StringIO()
    print_report(make_context(), [Result(PASS, id="X"), Result(status, id="Y")], 1.0, out)
    first, second, *_, last = out.getvalue().splitlines()
    assert first.startswith("preflight, level") and verdict in second
    assert last.startswith(f"{status}: ")
