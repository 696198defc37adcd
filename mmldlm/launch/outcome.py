"""How an attempt of a launch ended, derived from the states of its ranks.

A node's view, as node_agent.report_ranks returns it: {"ranks": states, "processes": number of
processes, "ended": statuses of its torchrun}. The keys of a rank's state are those of
rank_wrapper.py, plus "alive" and "orphan".
"""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass, field

from mmldlm.distributed.failure_attribution import FailureReport
from mmldlm.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from mmldlm.launch.local_launcher import COLLECTIVE_EXIT_CODES
from mmldlm.launch.rank_wrapper import LAST_LINES
from mmldlm.utils.formatting import join_some
from mmldlm.utils.input_files import read_text

Views = dict[str, dict]
# How ranks end that a launcher stops because of another one.
_STOPPED = (EXIT_INTERRUPTED, 128 + signal.SIGTERM)


@dataclass
class Outcome:
    """Result of an attempt.

    Attributes:
        code: Exit code.
        reason: Reason in one sentence.
        last_lines: Last output lines of the rank that failed first.
        failed_nodes: Nodes to exclude from an elastic retry.
        interrupted: Whether a signal to this launch ended it, so that no retry is wanted.
        returned: Nodes for whose return the ranks were asked to save and end, and did.
    """

    code: int
    reason: str = ""
    last_lines: list[str] = field(default_factory=list)
    failed_nodes: list[str] = field(default_factory=list)
    interrupted: bool = False
    returned: list[str] = field(default_factory=list)


def rank_states(views: Views) -> list[dict]:
    """Return the states of all ranks."""
    return [state for view in views.values() for state in view["ranks"]]


def has_failed(state: dict) -> bool:
    """Return whether a rank exited with an error, or vanished without a status."""
    return state["exit"] not in (None, EXIT_DONE) or (state["exit"] is None and not state["alive"])


def node_outcome(reason: str, views: Views, nodes: list[str]) -> Outcome:
    """Return the outcome of a failure outside the ranks, with the last lines of a rank on these
    nodes (or any).
    """
    last_lines: list[str] = []
    for state in (
        state for name in nodes or views for state in views.get(name, {}).get("ranks", ())
    ):
        last_lines = state.get("last") or _read_last_lines(state)
    return Outcome(EXIT_FAILED, reason, last_lines, nodes)


def hung_outcome(hung: FailureReport, views: Views) -> Outcome:
    """Return the outcome of ranks that have stopped sending heartbeats, with the last lines of one
    of them.
    """
    nodes = [
        name
        for name, view in views.items()
        if any(state["rank"] in hung.ranks for state in view["ranks"])
    ]
    first = next(state for state in rank_states(views) if state["rank"] in hung.ranks)
    return Outcome(EXIT_FAILED, hung.sentence, _read_last_lines(first), nodes)


def failed_rank_outcome(
    views: Views, clock_offsets: dict[str, float], interrupted: bool, is_script: bool = False
) -> Outcome:
    """Return the outcome of failed ranks, attributed to the one that ended first.

    Args:
        views: Answers of the nodes, in which at least one rank has failed.
        clock_offsets: Node -> its clock minus the head's, in seconds.
        interrupted: Whether this launch has asked the ranks to stop.
        is_script: Whether the ranks run a script of the user's own, whose exit codes have no
            meaning here.
    """
    # Entries are (end time on the head's clock, node, state).
    failed, was_killed = [], False
    for name, view in views.items():
        for state in filter(has_failed, view["ranks"]):
            if state["exit"] is None:
                was_killed = True
                killed = {"exit": 128 + signal.SIGKILL, "last": _read_last_lines(state)}
                state = {**state, **killed}
            failed.append((state["ended"] - clock_offsets.get(name, 0.0), name, state))
    # That a wrapper was killed is seen late: its launcher may have stopped the others before.
    own = [entry for entry in failed if entry[2]["exit"] not in _STOPPED]
    _, name, first = min(own if was_killed else failed, key=lambda entry: entry[0])
    codes = [state["exit"] for _, _, state in failed]
    code = _worst(codes, is_script)
    if interrupted and all(exit_code in _STOPPED for exit_code in codes):
        # A rank that has not begun to handle signals ends by this one.
        return Outcome(code if is_script else EXIT_INTERRUPTED, "interrupted as requested")
    last_lines = first.get("last") or []
    report = first.get("failure") or {"ranks": []}
    # The rank ended because another one stalled, died, or never came.
    if report["ranks"] and not _is_in(first["rank"], report["ranks"]):
        sentence = report["sentence"]
        failed_nodes = [
            node
            for node, view in sorted(views.items())
            if any(_is_in(state["rank"], report["ranks"]) for state in view["ranks"])
        ]
        if not failed_nodes:
            failed_nodes = [
                node
                for node, view in sorted(views.items())
                if not view["ranks"] and not view["processes"]
            ]
            reason = "its launcher ended before it started a rank, or never began"
            ended = [f"{node}: {reason}" for node in failed_nodes]
            sentence = join_some([sentence, *ended], 4, "; ")
        return Outcome(code, sentence, last_lines, failed_nodes)
    exit_text = describe_exit(first, name, interrupted or is_script)
    reason = f"rank {first['rank']} on {name} ended first, with status {first['exit']}{exit_text}"
    is_agreed = code in COLLECTIVE_EXIT_CODES and not is_script
    return Outcome(code, reason, last_lines, [] if is_agreed else [name])


def _worst(codes: list[int], is_script: bool) -> int:
    """Return the exit code of a launch whose ranks ended with these.

    A rank's own fault counts before what ranks agree on, and a stop by a signal last: launchers
    send one to the ranks that another's end leaves behind.
    """
    reasons = [code for code in codes if code not in _STOPPED] or codes
    if is_script:
        return max(reasons)
    faults = [code for code in reasons if code not in COLLECTIVE_EXIT_CODES]
    return max(faults or reasons)


def _is_in(rank: int, runs: list[list[int]]) -> bool:
    """Return whether a rank is in one of the runs [first, last]."""
    return any(first <= rank <= last for first, last in runs)


def describe_exit(state: dict, node: str, interrupted: bool) -> str:
    """Return the meaning of a rank's exit status, if its own last lines cannot contain it."""
    signum = state["exit"] - 128
    if state.get("out_of_memory"):
        return (
            " (signal 9) while the kernel's OOM killer was active: out of memory, see dmesg on"
            f" {node}"
        )
    if signum == signal.SIGKILL:
        return (
            " (signal 9): killed manually, by the scheduler, or for lack of memory (see dmesg on"
            f" {node})"
        )
    if signum > 0:
        return f" (signal {signum})"
    if state["exit"] == EXIT_INTERRUPTED and not interrupted:
        return ": it received a signal that this launch did not send"
    return ""


def _read_last_lines(state: dict) -> list[str]:
    with contextlib.suppress(OSError):
        return read_text(state["log"], 1 << 30, errors="replace").splitlines()[-LAST_LINES:]
    return []
