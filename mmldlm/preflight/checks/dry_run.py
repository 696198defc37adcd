"""Levels 3 and 4: collectives on all nodes, and two real training steps."""

from __future__ import annotations

from statistics import median

from mmldlm.preflight.check import check, fail, ok, skip, warn
from mmldlm.utils.formatting import format_bytes

CHECKPOINTS = "checkpoints"  # the round of FSDP's writers
SLOW = 2.0  # times the median (DLRover)


def _rounds(context, wanted):
    """(round name, nodes, {(node, local rank): found}) of the rounds that `wanted` takes."""
    ranks = context.collectives.get("ranks", {})
    for name, nodes in context.collectives.get("rounds", ()):
        if wanted(name):
            yield (
                name,
                nodes,
                {key: found.get(name, found.get("start", {})) for key, found in ranks.items() if key[0] in nodes},
            )


def _evaluate_round(name: str, nodes: list[str], found: dict):
    """What is wrong with a round: {node: sentence}."""
    bad = {}
    for (node, local_rank), entry in found.items():
        if entry.get("error"):
            bad[node] = f"rank {local_rank}: {entry['error']}"
        elif entry.get("wrong"):
            bad[node] = f"rank {local_rank}: wrong values from {', '.join(entry['wrong'])}"
        elif "formed" not in entry:
            bad[node] = f"rank {local_rank} gave no answer"
    for node in nodes:
        if not any(key[0] == node for key in found):
            bad[node] = "gave no answer"
    return bad


@check("COLL001", 3, "node", "collectives in pairs")
def pairs_compute_right(context):
    """Two rounds of pairs form process groups and get right values from every collective that training uses.

    A node that is in two bad groups is named; a bad group whose members do well elsewhere names both.
    """
    bad: dict[str, list[str]] = {}
    good: set[str] = set()
    for _, nodes, found in _rounds(context, lambda name: name not in ("all", CHECKPOINTS)):
        wrong = _evaluate_round("", nodes, found)
        for node in nodes:
            if wrong:
                bad.setdefault(node, []).append(
                    f"with {', '.join(n for n in nodes if n != node)}: {next(iter(wrong.values()))}"
                )
            else:
                good.add(node)
    if not bad and not good:
        yield skip("no node took part")
    for node in sorted(good - set(bad)):
        yield ok("right values", node)
    # Whoever does well with anybody is sound, unless nobody else is left to blame.
    guilty = {node for node in bad if node not in good} or set(bad)
    for node in sorted(guilty):
        fix = "mend NET001-NET006 first; else leave the node out"
        yield fail("; ".join(bad[node]), "a group that forms and right values", fix, node)


@check("COLL002", 3, "cluster", "collectives on all ranks")
def all_ranks_compute_right(context):
    """All ranks together get right values; the bus bandwidth of all_reduce is shown."""
    rounds = list(_rounds(context, lambda name: name == "all")) or list(
        _rounds(context, lambda name: name != CHECKPOINTS)
    )
    if not rounds:
        return skip("no node took part")
    name, nodes, found = rounds[-1]
    wrong = _evaluate_round(name, nodes, found)
    if wrong:
        node, why = next(iter(wrong.items()))
        return fail(f"{node}, {why}", "right values on all ranks", "see COLL001 for the node to blame", node)
    rates = [entry["busbw"] for entry in found.values() if "busbw" in entry]
    backend = next(iter(found.values()))["backend"]
    return ok(f"{len(found)} ranks, {backend}" + (f", bus bandwidth {format_bytes(min(rates))}/s" if rates else ""))


@check("COLL003", 3, "node", "stragglers")
def no_stragglers(context):
    """No node computes at less than half of the median's pace."""
    ranks = context.collectives.get("ranks", {})
    compute: dict[str, float] = {}
    for (node, _), found in ranks.items():
        if "compute" in found:
            compute[node] = max(compute.get(node, 0.0), found["compute"]["seconds"])
    if len(compute) < 2:
        yield skip("fewer than two nodes measured")
        return
    usual = median(compute.values())
    for node, seconds in compute.items():
        if seconds > SLOW * usual:
            measured = f"a matrix product takes {seconds * 1e3:.1f} ms, the median node {usual * 1e3:.1f} ms"
            yield warn(
                measured, "at most twice the median", "look for other load, throttling, or leave the node out", node
            )
        else:
            yield ok(f"{seconds * 1e3:.1f} ms", node)


@check("COLL004", 3, "cluster", "group of FSDP's writers")
def writers_form_their_group(context):
    """On GPUs FSDP's checkpoints are written by a gloo group beside NCCL's: it forms on all ranks, too."""
    rounds = list(_rounds(context, lambda name: name == CHECKPOINTS))
    if not rounds:
        return skip("only engine.kind=fsdp on GPUs has one")
    wrong = _evaluate_round(*rounds[0])
    if wrong:
        node, why = next(iter(wrong.items()))
        fix = "set GLOO_SOCKET_IFNAME to the interface between the nodes (is a host's own name 127.0.1.1 to it?)"
        return fail(f"{node}, {why}", "a gloo group of all ranks", fix, node)
    return ok(f"{len(rounds[0][2])} ranks, gloo")


def _last_lines(output: str) -> str:
    lines = [line.strip() for line in output.strip().splitlines() if line.strip()]
    marked = [line for line in lines if "error:" in line.lower()]
    return (marked or lines or ["no output"])[-1][:300]


@check("DRY001", 4, "cluster", "two training steps")
def two_steps_run(context):
    """Two real steps of this config through the launcher itself, with a save; shows step time and time to the end."""
    found = context.dry_run.get("train")
    if found is None:
        return skip("not run (see the failures above)")
    log = context.dry_run.get("log", [])
    if found["code"] != 0 or len(log) < 2:
        how = "ran out of time" if found["code"] is None else f"status {found['code']}"
        return fail(
            f"{how}: {_last_lines(found['output'])}",
            "two steps and status 0",
            "mend what the message names, then try again",
        )
    if any(record.get("loss") is None for record in log):
        return fail("the loss is not finite", "a finite loss", "mmldlm verify-data; lower optimizer.lr")
    rate, step = log[1]["tokens_per_second"], _step_seconds(log)
    hours = step * context.config.training.num_train_steps / 3600
    wait = log[1].get("data_share")
    waits = "" if wait is None else f", {wait:.0%} of it waiting for data"
    pace = f"{step:.2f} s a step{waits}, {rate:.0f} tokens/s"
    return ok(f"{found['seconds']:.0f} s in all, {pace}: about {hours:.1f} h for the run")


def _step_seconds(log: list[dict]) -> float:
    from datetime import datetime

    first, second = (datetime.fromisoformat(record["time"]) for record in log[:2])
    return max((second - first).total_seconds(), 1e-3)


@check("DRY002", 4, "cluster", "save and resume")
def save_and_resume(context):
    """The checkpoint of these steps is resumed through the launcher, and a third step follows."""
    found = context.dry_run.get("resume")
    if found is None:
        return skip("no checkpoint to resume (see DRY001)")
    steps = [record["step"] for record in context.dry_run.get("log", [])]
    if found["code"] != 0 or steps[-1:] != [3]:
        return fail(f"status {found['code']}: {_last_lines(found['output'])}", "a third step after the resume",
                    "look at the checkpoint folder (CKPT001, CKPT002) and at the message")  # fmt: skip
    return ok("saved, loaded, and one step more")
