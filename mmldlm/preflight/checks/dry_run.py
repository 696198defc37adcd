"""Results of levels 3 and 4: collectives on all nodes, and two real training steps."""

from __future__ import annotations

from statistics import median

from mmldlm.preflight.check import check, fail, ok, skip, warn
from mmldlm.utils.formatting import format_bytes

CHECKPOINTS = "checkpoints"  # round of FSDP's checkpoint writers
SLOW = 2.0  # times the median (DLRover)


def _rounds(context, selects):
    """Yield (nodes, {(node, local rank): result}) of the rounds whose names `selects` accepts."""
    ranks = context.collectives.get("ranks", {})
    for name, nodes in context.collectives.get("rounds", ()):
        if selects(name):
            results = {
                key: found.get(name, found.get("start", {}))
                for key, found in ranks.items()
                if key[0] in nodes
            }
            yield nodes, results


def _evaluate_round(nodes: list[str], results: dict) -> dict[str, str]:
    """Return node -> problem of a round; empty if it passed."""
    bad = {}
    for (node, local_rank), entry in results.items():
        if entry.get("error"):
            bad[node] = f"rank {local_rank}: {entry['error']}"
        elif entry.get("wrong"):
            bad[node] = f"rank {local_rank}: wrong values from {', '.join(entry['wrong'])}"
        elif "formed" not in entry:
            bad[node] = f"rank {local_rank} gave no answer"
    for node in nodes:
        if not any(key[0] == node for key in results):
            bad[node] = "gave no answer"
    return bad


@check("COLL001", 3, "node", "collectives in pairs")
def pairs_compute_right(context):
    """Two rounds of pairs form process groups and get correct values from every collective that
    training uses.

    A node that fails in both rounds is reported; a bad pair whose nodes both pass elsewhere
    reports both.
    """
    bad: dict[str, list[str]] = {}
    good: set[str] = set()
    for nodes, results in _rounds(context, lambda name: name not in ("all", CHECKPOINTS)):
        wrong = _evaluate_round(nodes, results)
        for node in nodes:
            if wrong:
                bad.setdefault(node, []).append(
                    f"with {', '.join(n for n in nodes if n != node)}:"
                    f" {next(iter(wrong.values()))}"
                )
            else:
                good.add(node)
    if not bad and not good:
        yield skip("no node took part")
    for node in sorted(good - set(bad)):
        yield ok("correct values", node)
    # A node that passed in any pair is healthy; if no node did, report all.
    failed = {node for node in bad if node not in good} or set(bad)
    for node in sorted(failed):
        fix = "fix NET001-NET006 first; otherwise exclude the node"
        yield fail("; ".join(bad[node]), "a process group with correct values", fix, node)


@check("COLL002", 3, "cluster", "collectives on all ranks")
def all_ranks_compute_right(context):
    """All ranks together get correct values; the report shows the bus bandwidth of all_reduce."""
    rounds = list(_rounds(context, lambda name: name == "all")) or list(
        _rounds(context, lambda name: name != CHECKPOINTS)
    )
    if not rounds:
        return skip("no node took part")
    nodes, results = rounds[-1]
    wrong = _evaluate_round(nodes, results)
    if wrong:
        node, problem = next(iter(wrong.items()))
        return fail(
            f"{node}, {problem}",
            "correct values on all ranks",
            "see COLL001 for the failing node",
            node,
        )
    rates = [entry["busbw"] for entry in results.values() if "busbw" in entry]
    backend = next(iter(results.values()))["backend"]
    return ok(
        f"{len(results)} ranks, {backend}"
        + (f", bus bandwidth {format_bytes(min(rates))}/s" if rates else "")
    )


@check("COLL003", 3, "node", "stragglers")
def no_stragglers(context):
    """No node computes at less than half of the median speed."""
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
            measured = (
                f"a matrix product takes {seconds * 1e3:.1f} ms, the median node"
                f" {usual * 1e3:.1f} ms"
            )
            fix = "look for other load or throttling, or exclude the node"
            yield warn(measured, "at most twice the median", fix, node)
        else:
            yield ok(f"{seconds * 1e3:.1f} ms", node)


@check("COLL004", 3, "cluster", "group of FSDP's writers")
def writers_form_their_group(context):
    """The gloo group of FSDP's checkpoint writers, in addition to NCCL's, forms on all ranks."""
    rounds = list(_rounds(context, lambda name: name == CHECKPOINTS))
    if not rounds:
        return skip("only for engine.kind=fsdp on GPUs")
    wrong = _evaluate_round(*rounds[0])
    if wrong:
        node, problem = next(iter(wrong.items()))
        fix = (
            "set GLOO_SOCKET_IFNAME to the interface between the nodes (does a host's own name"
            " resolve to 127.0.1.1?)"
        )
        return fail(f"{node}, {problem}", "a gloo group of all ranks", fix, node)
    return ok(f"{len(rounds[0][1])} ranks, gloo")


def _last_error(output: str) -> str:
    """Return the last line with an error, else the last line."""
    lines = [line.strip() for line in output.strip().splitlines() if line.strip()]
    marked = [line for line in lines if "error:" in line.lower()]
    return (marked or lines or ["no output"])[-1][:300]


@check("DRY001", 4, "cluster", "two training steps")
def two_steps_run(context):
    """Two real steps of this config and a save run through the launcher; the report shows step and
    total time.
    """
    found = context.dry_run.get("train")
    if found is None:
        return skip("not run (see the failures above)")
    log = context.dry_run.get("log", [])
    if found["code"] != 0 or len(log) < 2:
        status = "timed out" if found["code"] is None else f"status {found['code']}"
        return fail(
            f"{status}: {_last_error(found['output'])}",
            "two steps and status 0",
            "fix the cause in the message, then try again",
        )
    if any(record.get("loss") is None for record in log):
        return fail(
            "the loss is not finite", "a finite loss", "mmldlm verify-data; lower optimizer.lr"
        )
    rate, step = log[1]["tokens_per_second"], _step_seconds(log)
    hours = step * context.config.training.num_train_steps / 3600
    data_share = log[1].get("data_share")
    data_wait = "" if data_share is None else f", {data_share:.0%} of it waiting for data"
    speed = f"{step:.2f} s per step{data_wait}, {rate:.0f} tokens/s"
    return ok(f"{found['seconds']:.0f} s in total, {speed}: about {hours:.1f} h for the run")


def _step_seconds(log: list[dict]) -> float:
    from datetime import datetime

    first, second = (datetime.fromisoformat(record["time"]) for record in log[:2])
    return max((second - first).total_seconds(), 1e-3)


@check("DRY002", 4, "cluster", "save and resume")
def save_and_resume(context):
    """The launcher resumes the checkpoint of these steps, and a third step follows."""
    found = context.dry_run.get("resume")
    if found is None:
        return skip("no checkpoint to resume (see DRY001)")
    steps = [record["step"] for record in context.dry_run.get("log", [])]
    if found["code"] != 0 or steps[-1:] != [3]:
        return fail(
            f"status {found['code']}: {_last_error(found['output'])}",
            "a third step after the resume",
            "check the checkpoint folder (CKPT001, CKPT002) and the message",
        )
    return ok("saved, loaded, and one more step")
