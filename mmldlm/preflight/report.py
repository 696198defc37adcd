"""The screen: one row a node, healthy checks counted only, one block for each thing that is wrong."""

from __future__ import annotations

from collections import Counter
from typing import TextIO

from mmldlm.errors import EXIT_DONE, EXIT_FAILED, EXIT_UNCHECKED, EXIT_USAGE
from mmldlm.preflight.check import ERROR, FAIL, PASS, SKIP, WARN, Result
from mmldlm.preflight.context import Context

_WORST = (FAIL, ERROR, WARN, PASS, SKIP)
# A run whose hostfile or config cannot be read is a usage error.
_USAGE_IDS = ("HOST001", "CFG001")
# What is well and still worth reading: what this run is, needs and will take.
ALWAYS_SHOWN = ("CFG003", "DATA001", "MEM001", "DISK001", "RES001", "COLL002", "DRY001")


def worst(results: list[Result]) -> str:
    """The gravest status among results; SKIP when nothing was judged."""
    found = {result.status for result in results}
    return next((status for status in _WORST if status in found), SKIP)


def exit_code(results: list[Result], strict: bool = False) -> int:
    """0 fine, 1 a check failed (with strict: or warned), 2 hostfile or config unusable, 3 a check could not be made."""
    if any(r.status == FAIL and r.id in _USAGE_IDS for r in results):
        return EXIT_USAGE
    status = worst(results)
    if status == FAIL or (strict and any(r.status == WARN for r in results)):
        return EXIT_FAILED
    return EXIT_UNCHECKED if status == ERROR else EXIT_DONE


def nodes_of(result: Result) -> list[str]:
    """Nodes that a result speaks of: both of a pair."""
    return [name for name in result.node.split("->") if name]


def failing_nodes(context: Context, results: list[Result]) -> list[str]:
    """Nodes with a FAIL of their own, in the hostfile's order. A pair blames neither side alone: the node in most bad
    pairs is named."""
    own = {r.node for r in results if r.status == FAIL and r.scope != "pair"}
    pairs = Counter(name for r in results if r.status == FAIL and r.scope == "pair" for name in nodes_of(r))
    return [name for name in context.names if name in own or (pairs[name] > 1 and pairs[name] == max(pairs.values()))]


def print_report(context: Context, results: list[Result], seconds: float, out: TextIO) -> None:
    """Print the report."""
    title = f"preflight, level 0-{context.level}" if context.level else "preflight, level 0"
    ranks = f"{len(context.nodes)} node(s), {context.world_size} rank(s), {context.launcher}"
    print(f"{title}: {ranks}", file=out)
    rows = [("this machine", [r for r in results if not nodes_of(r)])]
    rows += [(name, [r for r in results if name in nodes_of(r)]) for name in (context.names if context.level else ())]
    width = max(len(name) for name, _ in rows)
    for name, own in rows:
        counts = Counter(r.status for r in own)
        faults = ", ".join(dict.fromkeys(r.id for r in own if r.status in (FAIL, ERROR, WARN)))
        skipped = f", {counts[SKIP]} skipped" if counts[SKIP] else ""
        print(f"  {name:{width}}  {worst(own):5} {counts[PASS]} passed{skipped}  {faults}".rstrip(), file=out)
    for r in results:
        if r.id in ALWAYS_SHOWN and r.status == PASS:
            print(f"  {r.title:{max(width, 24)}}  {r.measured}", file=out)
    for group in _grouped([r for r in results if r.status in (FAIL, ERROR, WARN)]):
        _print_group(group, out)
    for why, group in _skips(results).items():
        nodes = ", ".join(dict.fromkeys(r.node for r in group if r.node))
        ids = ", ".join(dict.fromkeys(r.id for r in group))
        print(f"  SKIP  {ids}{f' on {nodes}' if nodes else ''}: {why}", file=out)
    bad = failing_nodes(context, results)
    if bad and len(context.nodes) > 1:
        exclude = f"nodes to leave out: --exclude {'@'.join(bad)}"
        print(f"\n  {exclude if len(bad) < len(context.nodes) else 'every node has a fault'}", file=out)
    counts = Counter(r.status for r in results)
    print(f"\n{worst(results)}: {_sum(counts)} ({seconds:.1f} s)", file=out, flush=True)


def _sum(counts: Counter) -> str:
    words = {PASS: "passed", WARN: "warned", FAIL: "failed", ERROR: "could not be checked", SKIP: "skipped"}
    return ", ".join(
        f"{counts[status]} {words[status]}" for status in (FAIL, ERROR, WARN, PASS, SKIP) if counts[status]
    )


def _grouped(results: list[Result]) -> list[list[Result]]:
    """Results that say the same of several nodes, together; the gravest first."""
    groups: dict[tuple, list[Result]] = {}
    for r in results:
        own = r.node or "\0"
        key = (r.status, r.id, *(text.replace(own, "NODE") for text in (r.measured, r.expected, r.why)))
        groups.setdefault(key, []).append(r)
    return sorted(groups.values(), key=lambda group: (_WORST.index(group[0].status), group[0].level))


def _print_group(group: list[Result], out: TextIO) -> None:
    r, nodes = group[0], ", ".join(dict.fromkeys(r.node for r in group if r.node))
    print(f"\n  {r.status}  {r.id} {r.title}{f', {nodes}' if nodes else ''}: {r.measured or r.why}", file=out)
    if r.expected:
        print(f"        expected {r.expected}", file=out)
    if r.fix:
        print(f"        fix: {r.fix}", file=out)


def _skips(results: list[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for r in results:
        if r.status == SKIP:
            groups.setdefault(r.why, []).append(r)
    return groups
