"""Exit codes, and the nodes to exclude."""

from __future__ import annotations

import io

import pytest

from mmldlm.cluster.hostfile import read_hostfile
from mmldlm.preflight.check import ERROR, FAIL, PASS, SKIP, WARN, Result
from mmldlm.preflight.report import exit_code, failing_nodes, print_report
from mmldlm.preflight.runner import write_passing_nodes
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
    ("bad", "excluded"),
    [
        (["ab", "ba"], ["b"]),
        (["ab", "cd"], ["b", "d"]),
        (["ac", "bc", "dc", "ab"], ["b", "c"]),
        (["ab", "bc", "cd", "da"], ["b", "d"]),
    ],
)
def test_no_pair_of_the_nodes_that_passed_has_failed(bad, excluded):
    context = make_context("abcd")
    pairs = [Result(FAIL, node=f"{x}->{y}", scope="pair") for x, y in bad]
    assert failing_nodes(context, pairs) == excluded


def test_nodes_that_passed_are_a_hostfile_for_the_next_launch(tmp_path, capsys):
    context, path = make_context(slots=8), tmp_path / "passing_nodes.txt"
    failed = [Result(FAIL, node=name, id="X") for name in "abc"]
    write_passing_nodes(context, failed[1:2], path)
    assert [(node.name, node.slots) for node in read_hostfile(path)] == [("a", 8), ("c", 8)]
    assert f"the other 2 nodes: --hostfile {path}" in capsys.readouterr().out
    write_passing_nodes(context, failed, path)
    assert not path.exists()


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


def test_a_large_job_is_reported_in_lines_that_can_be_read():
    """1,024 nodes: one row for all that are alike, and no line with all their names."""
    names = [f"host-{index:04}.cluster" for index in range(1024)]
    context, out = make_context(names), io.StringIO()
    results = [Result(PASS, id="A", node=name) for name in names]
    results += [Result(WARN, "old", "new", "upgrade", name, id="B") for name in names[1:]]
    results += [Result(SKIP, node=name, id="C", why="no GPU") for name in names]
    results += [Result(FAIL, "full", "space", "free some", name, id="D") for name in names[5:105]]
    print_report(context, results, 1.0, out)
    lines = out.getvalue().splitlines()
    assert len(lines) < 25 and max(map(len, lines)) < 250
    assert any(line.split()[:2] == ["host-0000.cluster", "PASS"] for line in lines)
    assert any("host-0005.cluster" in line and "and 92 more" in line for line in lines)
    assert "  100 of 1,024 nodes failed a check" in lines


def test_a_small_job_has_a_row_for_every_node_and_the_words_to_exclude():
    out = io.StringIO()
    print_report(make_context(), [Result(FAIL, "full", "space", "free some", "b")], 1.0, out)
    lines = out.getvalue().splitlines()
    assert [line.split()[0] for line in lines[3:6]] == ["a", "b", "c"]
    assert "  nodes to exclude: --exclude b" in lines
