"""Level 3: collectives on all ranks, checked by value and time.

Run as a module, one rank of the test: ROUNDS is a JSON list of {"name", "rank", "world",
"address", "port", "seconds", "on_cpu"}. Prints one JSON object per round. The backend is NCCL with
a GPU, gloo without one or with on_cpu.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from statistics import median
from typing import Any

from mmldlm.cluster.agent import AgentPool
from mmldlm.preflight.check import Result, Results, check, fail, ok, skip, warn
from mmldlm.preflight.context import Context
from mmldlm.utils.environment import int_from_env
from mmldlm.utils.formatting import first_line, format_bytes, join_some
from mmldlm.utils.resources import raise_open_files
from mmldlm.utils.run_module import module_command

# Name of the round of FSDP's checkpoint writers.
CHECKPOINTS = "checkpoints"
# In units of the median: CPUs share their cores with others (DLRover's factor), GPUs of one model
# differ by a few percent unless one is throttled.
SLOW = {"cpu": 2.0, "cuda": 1.1}
BYTES = {"nccl": 256 << 20, "gloo": 4 << 20}
REPEATS = 5
# The name of a round, and its nodes.
Group = tuple[str, list[str]]


def group_seconds(world_size: int) -> int:
    """Return the time limit of a process group in level 3; NCCL's start takes longer with many
    ranks.
    """
    return 25 + world_size // 16


def collective_seconds(world_size: int) -> int:
    """Return the time limit of level 3: imports, up to four groups and their measurements."""
    return 110 + 4 * (group_seconds(world_size) - 25)


def pair_rounds(names: list[str]) -> list[list[list[str]]]:
    """Return two rounds of pairs (a group of three if the count is odd): a bad node fails in both
    rounds (DLRover).
    """
    if len(names) < 3:
        return [[names]]
    rotated = names[1:] + names[:1]
    return [_pairs(names), _pairs(rotated)]


def _pairs(names: list[str]) -> list[list[str]]:
    groups = [names[i : i + 2] for i in range(0, len(names) - 1, 2)]
    if len(names) % 2:
        groups[-1].append(names[-1])
    return groups


def run_collectives(context: Context, pool: AgentPool) -> None:
    """Level 3: fill context.collectives: "rounds" [(name, nodes)], "ranks" {(node, local rank):
    {round: result}}.
    """
    names = [name for name in context.names if name in context.facts and name not in pool.failures]
    if not names:
        return
    groups = _collective_groups(context, names)
    rounds = _rounds_per_rank(context, pool, names, groups)
    limit = collective_seconds(context.world_size)

    def run_args(node: str) -> dict:
        environment = context.environment_on(node) or {}
        commands = [
            {
                "command": module_command(__name__, json.dumps(rounds[node, local_rank])),
                "environment": {
                    **environment,
                    "LOCAL_RANK": str(local_rank),
                    "OMP_NUM_THREADS": "1",
                },
            }
            for local_rank in range(context.slots(node))
        ]
        return {"commands": commands, "seconds": limit}

    answers = pool.call("run", run_args, timeout=limit + 10)
    ranks = {
        (node, local_rank): _parse_rounds(output)
        for node, outputs in answers.items()
        for local_rank, output in enumerate(outputs)
    }
    context.collectives = {"rounds": groups, "ranks": ranks}


def _collective_groups(context: Context, names: list[str]) -> list[Group]:
    """Return the groups of all rounds: two rounds of pairs, all nodes, and the group of FSDP's
    checkpoint writers.
    """
    groups = [
        (f"{round_number}.{index}", members)
        for round_number, pairs in enumerate(pair_rounds(names), 1)
        for index, members in enumerate(pairs, 1)
    ]
    if len(names) > 2:
        groups.append(("all", names))
    if context.config is not None and context.config.engine.kind == "fsdp" and context.has_gpus():
        # The writers use gloo next to NCCL (engines/fsdp.py).
        groups.append((CHECKPOINTS, names))
    return groups


def _rounds_per_rank(
    context: Context, pool: AgentPool, names: list[str], groups: list[Group]
) -> dict[tuple[str, int], list[dict]]:
    """Return (node, local rank) -> the rounds of this rank, as `main` reads them."""
    rounds: dict[tuple[str, int], list[dict]] = {
        (node, local_rank): [] for node in names for local_rank in range(context.slots(node))
    }
    for name, members in groups:
        opened = pool.request(members[0], "listen", {"ports": [0]})
        pool.request(members[0], "close")
        if opened is None:
            # The node has stopped answering: this group has no results, which fails it.
            continue
        ranks = [(node, r) for node in members for r in range(context.slots(node))]
        round_of_all = {
            "name": name,
            "world": len(ranks),
            "address": "127.0.0.1" if context.local else context.data_address(members[0]),
            "port": opened["ports"][0]["port"],
            "seconds": group_seconds(len(ranks)),
            "on_cpu": name == CHECKPOINTS,
        }
        for rank, key in enumerate(ranks):
            rounds[key].append({**round_of_all, "rank": rank})
    return rounds


def _parse_rounds(output: dict) -> dict[str, dict]:
    """Return round -> result from the output of one rank; an error as the round "start" if there
    is none.
    """
    lines = [json.loads(line) for line in output["output"].splitlines() if line.startswith("{")]
    rounds = {line["round"]: line for line in lines}
    if not rounds:
        last = (output["output"].strip().splitlines() or [f"status {output['code']}"])[-1]
        rounds["start"] = {"error": last}
    return rounds


def check_values(torch: Any, rank: int, world: int, device: Any) -> list[str]:
    """Run the collectives that training uses; return the names of those with wrong values."""
    dist, wrong = torch.distributed, []
    positions = torch.arange(1024, dtype=torch.float64, device=device)

    def compare(name: str, received: Any, expected: Any) -> None:
        if not torch.equal(received, expected):
            wrong.append(name)

    values = positions * (rank + 1)
    summed = values.clone()
    dist.all_reduce(summed)
    total = positions * (world * (world + 1) // 2)
    compare("all_reduce", summed, total)
    sent = values.clone()
    dist.broadcast(sent, src=world - 1)
    compare("broadcast", sent, positions * world)
    gathered = [torch.empty_like(values) for _ in range(world)]
    dist.all_gather(gathered, values)
    compare(
        "all_gather",
        torch.stack(gathered),
        torch.stack([positions * (r + 1) for r in range(world)]),
    )
    if device.type == "cuda":
        part = torch.empty(1024, dtype=torch.float64, device=device)
        dist.reduce_scatter_tensor(part, values.repeat(world))
        compare("reduce_scatter", part, total)
    return wrong


def bus_bandwidth(torch: Any, world: int, device: Any, size: int) -> tuple[float, float]:
    """Return (bus bandwidth of all_reduce as in nccl-tests: size / time x 2 (n - 1) / n, median
    seconds).
    """
    dist = torch.distributed
    values = torch.ones(size // 4, device=device)
    seconds = []
    for _ in range(REPEATS + 2):
        dist.barrier()
        # The sums are at most world ^ 7, within the range of fp32.
        seconds.append(_time(torch, device, lambda: dist.all_reduce(values)))
    usual = median(seconds[2:])
    return size / usual * 2 * (world - 1) / world, usual


def compute_seconds(torch: Any, device: Any) -> float:
    """Return the median seconds of four matrix products: the compute speed of this rank, without
    the network.
    """
    # Large enough for a GPU's clocks to settle: 4.4 TFLOP, some 7 ms on an H100.
    side, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (384, torch.float32)
    matrix = torch.ones(side, side, device=device, dtype=dtype)

    def multiply() -> None:
        for _ in range(4):
            matrix @ matrix

    return median([_time(torch, device, multiply) for _ in range(23)][2:])


def _time(torch: Any, device: Any, work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def run_round(torch: Any, entry: dict, device: Any) -> dict:
    """Form the group, check, measure; each operation within entry["seconds"]."""
    device = torch.device("cpu") if entry["on_cpu"] else device
    backend = "nccl" if device.type == "cuda" else "gloo"
    started = time.perf_counter()
    torch.distributed.init_process_group(
        backend,
        init_method=f"tcp://{entry['address']}:{entry['port']}",
        rank=entry["rank"],
        world_size=entry["world"],
        timeout=timedelta(seconds=entry["seconds"]),
    )
    try:
        wrong = check_values(torch, entry["rank"], entry["world"], device)
        formed = round(time.perf_counter() - started, 3)
        result = {"formed": formed, "wrong": wrong, "backend": backend}
        if entry["world"] > 1:
            result["busbw"], result["seconds"] = bus_bandwidth(
                torch, entry["world"], device, BYTES[backend]
            )
        return result
    finally:
        torch.distributed.destroy_process_group()


def main() -> int:
    """Run the rounds of sys.argv and print their results; return the exit code."""
    # A round that times out must raise, so that the next one runs: by default NCCL's watchdog ends
    # the process.
    os.environ.update(
        TORCH_NCCL_BLOCKING_WAIT="1",
        TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
        TORCH_NCCL_DUMP_ON_TIMEOUT="0",
    )
    import torch

    raise_open_files()
    local_rank = int_from_env("LOCAL_RANK", 0)
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    for entry in json.loads(sys.argv[1]):
        try:
            result = run_round(torch, entry, device)
        except Exception as error:
            result = {"error": first_line(error)}
        print("\n" + json.dumps({"round": entry["name"], **result}), flush=True)
    computed = {"seconds": compute_seconds(torch, device), "device": device.type}
    print("\n" + json.dumps({"round": "compute", **computed}), flush=True)
    return 0


def _rounds(context: Context, selects: Callable[[str], bool]) -> Iterator[tuple[list[str], dict]]:
    """Yield (nodes, {(node, local rank): result}) of the rounds whose names `selects` accepts."""
    ranks = context.collectives.get("ranks", {})
    for name, nodes in context.collectives.get("rounds", ()):
        if selects(name):
            results = {
                key: by_round.get(name, by_round.get("start", {}))
                for key, by_round in ranks.items()
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
def pairs_compute_right(context: Context) -> Results:
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
def all_ranks_compute_right(context: Context) -> Result:
    """All ranks together get correct values, over NCCL on nodes with GPUs; the report shows the
    bus bandwidth of all_reduce.
    """
    rounds = list(_rounds(context, lambda name: name == "all")) or list(
        _rounds(context, lambda name: name != CHECKPOINTS)
    )
    if not rounds:
        return skip("no node took part")
    nodes, results = rounds[-1]
    if wrong := _evaluate_round(nodes, results):
        node, problem = next(iter(wrong.items()))
        return fail(
            f"{node}, {problem}",
            "correct values on all ranks",
            "see COLL001 for the failing node",
            node,
        )
    rates = [entry["busbw"] for entry in results.values() if "busbw" in entry]
    backend = next(iter(results.values()))["backend"]
    with_gpus = [node for node in nodes if (context.value(node, "gpus") or {}).get("gpus")]
    if with_gpus and backend != "nccl":
        return fail(
            f"{len(results)} ranks, {backend}: torch uses no GPU on {join_some(with_gpus)}",
            "nccl, because the nodes have GPUs",
            'see GPU006; `python -c "import torch; torch.cuda.init()"` there says why',
        )
    return ok(
        f"{len(results)} ranks, {backend}"
        + (f", bus bandwidth {format_bytes(min(rates))}/s" if rates else "")
    )


@check("COLL003", 3, "node", "stragglers")
def no_stragglers(context: Context) -> Results:
    """No GPU multiplies matrices 10 % slower than the median of all, no CPU rank at less than half
    of it: a step takes as long as its slowest rank.
    """
    compute: dict[str, dict[int, float]] = {}
    slowest = SLOW["cpu"]
    for (node, local_rank), by_round in context.collectives.get("ranks", {}).items():
        if "compute" in by_round:
            compute.setdefault(node, {})[local_rank] = by_round["compute"]["seconds"]
            slowest = SLOW[by_round["compute"]["device"]]
    seconds = [value for ranks in compute.values() for value in ranks.values()]
    if len(seconds) < 2:
        yield skip("fewer than two ranks measured")
        return
    usual = median(seconds)
    for node, ranks in compute.items():
        slow = {rank: value for rank, value in ranks.items() if value > slowest * usual}
        if slow:
            found = join_some(
                [f"rank {rank}: {value * 1e3:.1f} ms" for rank, value in slow.items()]
            )
            measured = f"a matrix product takes local {found}; the median {usual * 1e3:.1f} ms"
            fix = "look for other load or throttling (nvidia-smi -q -d PERFORMANCE), or exclude"
            yield warn(
                measured, f"at most {slowest:g} times it", f"{fix} the GPU or the node", node
            )
        else:
            yield ok(f"{max(ranks.values()) * 1e3:.1f} ms", node)


@check("COLL004", 3, "cluster", "group of FSDP's writers")
def writers_form_their_group(context: Context) -> Result:
    """The gloo group of FSDP's checkpoint writers, in addition to NCCL's, forms on all ranks."""
    rounds = list(_rounds(context, lambda name: name == CHECKPOINTS))
    if not rounds:
        return skip("only for engine.kind=fsdp on GPUs")
    if wrong := _evaluate_round(*rounds[0]):
        node, problem = next(iter(wrong.items()))
        fix = (
            "set GLOO_SOCKET_IFNAME to the interface between the nodes (does a host's own name"
            " resolve to 127.0.1.1?)"
        )
        return fail(f"{node}, {problem}", "a gloo group of all ranks", fix, node)
    return ok(f"{len(rounds[0][1])} ranks, gloo")


if __name__ == "__main__":
    sys.exit(main())
