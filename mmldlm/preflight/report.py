"""Print the report: one row per node with counts, one block per failed check, and the exit
code.
"""

from __future__ import annotations

from collections import Counter
from typing import TextIO

from mmldlm.errors import EXIT_DONE, EXIT_FAILED, EXIT_UNCHECKED, EXIT_USAGE
from mmldlm.preflight.check import ERROR, FAIL, PASS, SKIP, WARN, Result
from mmldlm.preflight.context import Context

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
    """Return the nodes that failed a check, in hostfile order.

    A failed pair does not identify one of its two nodes; only the node with the most failed pairs
    is included.
    """
    failing = {r.node for r in results if r.status == FAIL and r.scope != "pair"}
    pairs = Counter(
        name for r in results if r.status == FAIL and r.scope == "pair" for name in nodes_of(r)
    )
    return [
        name
        for name in context.names
        if name in failing or (pairs[name] > 1 and pairs[name] == max(pairs.values()))
    ]


def print_report(context: Context, results: list[Result], seconds: float, out: TextIO) -> None:
    """Print the report of a preflight: a verdict, the nodes, what failed, and the counts."""
    title = f"preflight, level 0-{context.level}" if context.level else "preflight, level 0"
    ranks = f"{len(context.nodes)} node(s), {context.world_size} rank(s), {context.launcher}"
    print(f"{title}: {ranks}", file=out)
    print(_VERDICTS[worst(results)], file=out)
    rows = [("this machine", [r for r in results if not nodes_of(r)])]
    rows += [
        (name, [r for r in results if name in nodes_of(r)])
        for name in (context.names if context.level else ())
    ]
    width = max(len(name) for name, _ in rows)
    for name, node_results in rows:
        counts = Counter(r.status for r in node_results)
        problems = ", ".join(
            dict.fromkeys(r.id for r in node_results if r.status in (FAIL, ERROR, WARN))
        )
        skipped = f", {counts[SKIP]} skipped" if counts[SKIP] else ""
        line = (
            f"  {name:{width}}  {worst(node_results):5} {counts[PASS]} passed{skipped}  {problems}"
        )
        print(line.rstrip(), file=out)
    for r in results:
        if r.id in ALWAYS_SHOWN and r.status == PASS:
            print(f"  {r.title:{max(width, 24)}}  {r.measured}", file=out)
    for group in _grouped([r for r in results if r.status in (FAIL, ERROR, WARN)]):
        _print_group(group, out)
    for why, group in _skips_by_reason(results).items():
        nodes = ", ".join(dict.fromkeys(r.node for r in group if r.node))
        ids = ", ".join(dict.fromkeys(r.id for r in group))
        print(f"  SKIP  {ids}{f' on {nodes}' if nodes else ''}: {why}", file=out)
    bad = failing_nodes(context, results)
    if bad and len(context.nodes) > 1:
        exclude = f"nodes to exclude: --exclude {'@'.join(bad)}"
        print(
            f"\n  {exclude if len(bad) < len(context.nodes) else 'every node failed a check'}",
            file=out,
        )
    counts = Counter(r.status for r in results)
    print(f"\n{worst(results)}: {_summary(counts)} ({seconds:.1f} s)", file=out, flush=True)


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
    r, nodes = group[0], ", ".join(dict.fromkeys(r.node for r in group if r.node))
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
