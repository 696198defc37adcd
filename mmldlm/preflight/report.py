"""Print the report: one row per node with counts, one block per failed check, and the exit
code.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterable
from typing import TextIO

from mmldlm.errors import EXIT_DONE, EXIT_FAILED, EXIT_UNCHECKED, EXIT_USAGE
from mmldlm.preflight.check import ERROR, FAIL, PASS, SKIP, WARN, Result
from mmldlm.preflight.context import Context
from mmldlm.utils.formatting import for_screen, join_some

_VERDICTS = {
    FAIL: "this run will not start, fit and finish as it is",
    ERROR: "what could not be checked may keep this run from starting or finishing",
    WARN: "this run will start, fit and finish as far as was checked; read the warnings",
    PASS: "this run will start, fit and finish as far as was checked",
    SKIP: "nothing was checked",
}
_WORST = (FAIL, ERROR, WARN, PASS, SKIP)
# A run whose hostfile or config cannot be read is a usage error.
_USAGE_IDS = ("HOST001", "CFG001")
# Checks that are printed even if passed: size of the run, memory, disk space and duration.
ALWAYS_SHOWN = ("CFG003", "DATA001", "MEM001", "DISK001", "RES001", "COLL002", "DRY001")

# Of a larger job the report groups nodes and names the first ones; the receipt has all of them.
MOST_ROWS, MOST_NAMES, MOST_EXCLUDED = 32, 8, 32


def worst(results: list[Result]) -> str:
    """Return the most severe status; SKIP without any evaluated result."""
    statuses = {result.status for result in results}
    return next((status for status in _WORST if status in statuses), SKIP)


def exit_code(results: list[Result], strict: bool = False) -> int:
    """Return the exit code.

    0: passed. 1: a check failed (strict: or warned). 2: unusable hostfile or config. 3: a check
    could not run.
    """
    if any(r.status == FAIL and r.id in _USAGE_IDS for r in results):
        return EXIT_USAGE
    status = worst(results)
    if status == FAIL or (strict and any(r.status == WARN for r in results)):
        return EXIT_FAILED
    return EXIT_UNCHECKED if status == ERROR else EXIT_DONE


def nodes_of(result: Result) -> list[str]:
    """Return the nodes of a result: both nodes of a pair."""
    return [name for name in result.node.split("->") if name]


def failing_nodes(context: Context, results: list[Result]) -> list[str]:
    """Return the nodes that failed a check, in hostfile order; no pair of the others has failed.

    A failed pair does not identify one of its two nodes: as long as there is one, the node with
    the most of them is included, of several the last.
    """
    failed = [r for r in results if r.status == FAIL]
    failing = {r.node for r in failed if r.scope != "pair"}
    pairs = [set(nodes_of(r)) for r in failed if r.scope == "pair"]
    while pairs := [pair for pair in pairs if not pair & failing]:
        counts = Counter(name for pair in pairs for name in pair)
        failing.add(max(reversed(context.names), key=lambda name: counts[name]))
    return [name for name in context.names if name in failing]


def print_report(context: Context, results: list[Result], seconds: float, out: TextIO) -> None:
    """Print the report of a preflight: a verdict, the nodes, what failed, and the counts."""
    text = io.StringIO()
    _write_report(context, results, seconds, text)
    print(for_screen(text.getvalue(), out, "      "), file=out, end="", flush=True)


def _write_report(context: Context, results: list[Result], seconds: float, out: TextIO) -> None:
    title = f"preflight, level 0-{context.level}" if context.level else "preflight, level 0"
    ranks = f"{len(context.nodes)} node(s), {context.world_size} rank(s), {context.launcher}"
    print(f"{title}: {ranks}", file=out)
    print(_VERDICTS[worst(results)], file=out)
    rows = _rows(context, results)
    # The names of many nodes in one row do not widen the others.
    width = min(max(len(name) for name, _ in rows), 40)
    for name, text in rows:
        print(f"  {name:{width}}  {text}".rstrip(), file=out)
    for r in results:
        if r.id in ALWAYS_SHOWN and r.status == PASS:
            print(f"  {r.title:{max(width, 24)}}  {r.measured}", file=out)
    for group in _grouped([r for r in results if r.status in (FAIL, ERROR, WARN)]):
        _print_group(group, out)
    for why, group in _skips_by_reason(results).items():
        nodes = _names(r.node for r in group)
        ids = ", ".join(dict.fromkeys(r.id for r in group))
        print(f"  SKIP  {ids}{f' on {nodes}' if nodes else ''}: {why}", file=out)
    bad = failing_nodes(context, results)
    if bad and len(context.nodes) > 1:
        if len(bad) == len(context.nodes):
            exclude = "every node failed a check"
        elif len(bad) > MOST_EXCLUDED:
            exclude = f"{len(bad):,} of {len(context.nodes):,} nodes failed a check"
        else:
            exclude = f"nodes to exclude: --exclude {'@'.join(bad)}"
        print(f"\n  {exclude}", file=out)
    counts = Counter(r.status for r in results)
    print(f"\n{worst(results)}: {_summary(counts)} ({seconds:.1f} s)", file=out)


def _rows(context: Context, results: list[Result]) -> list[tuple[str, str]]:
    """Return (name, verdict and counts) of this machine and of every node; of a large job, of all
    nodes with the same counts together.
    """
    by_node: dict[str, list[Result]] = {"": []}
    for result in results:
        for name in nodes_of(result) or [""]:
            by_node.setdefault(name, []).append(result)
    rows = [("this machine", _row(by_node[""]))]
    names = context.names if context.level else []
    texts = {name: _row(by_node.get(name, [])) for name in names}
    if len(names) <= MOST_ROWS:
        return rows + list(texts.items())
    alike: dict[str, list[str]] = {}
    for name, text in texts.items():
        alike.setdefault(text, []).append(name)
    return rows + [(_names(nodes), text) for text, nodes in alike.items()]


def _row(results: list[Result]) -> str:
    counts = Counter(r.status for r in results)
    problems = ", ".join(dict.fromkeys(r.id for r in results if r.status in (FAIL, ERROR, WARN)))
    skipped = f", {counts[SKIP]} skipped" if counts[SKIP] else ""
    return f"{worst(results):5} {counts[PASS]} passed{skipped}  {problems}"


def _names(nodes: Iterable[str]) -> str:
    """Return the distinct nodes of results, the first few of many: "n1, n2 and 1,000 more"."""
    return join_some(dict.fromkeys(filter(None, nodes)), MOST_NAMES)


def _summary(counts: Counter) -> str:
    """Return "1 failed, 40 passed"."""
    labels = {
        PASS: "passed",
        WARN: "warned",
        FAIL: "failed",
        ERROR: "could not be checked",
        SKIP: "skipped",
    }
    return ", ".join(
        f"{counts[status]} {labels[status]}"
        for status in (FAIL, ERROR, WARN, PASS, SKIP)
        if counts[status]
    )


def _grouped(results: list[Result]) -> list[list[Result]]:
    """Group equal results of several nodes; the most severe first."""
    groups: dict[tuple, list[Result]] = {}
    for r in results:
        node = r.node or "\0"
        key = (
            r.status,
            r.id,
            *(text.replace(node, "NODE") for text in (r.measured, r.expected, r.why)),
        )
        groups.setdefault(key, []).append(r)
    return sorted(
        groups.values(), key=lambda group: (_WORST.index(group[0].status), group[0].level)
    )


def _print_group(group: list[Result], out: TextIO) -> None:
    r, nodes = group[0], _names(r.node for r in group)
    print(
        f"\n  {r.status}  {r.id} {r.title}{f', {nodes}' if nodes else ''}: {r.measured or r.why}",
        file=out,
    )
    if r.expected:
        print(f"        expected {r.expected}", file=out)
    if r.fix:
        print(f"        fix: {r.fix}", file=out)


def _skips_by_reason(results: list[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for r in results:
        if r.status == SKIP:
            groups.setdefault(r.why, []).append(r)
    return groups
