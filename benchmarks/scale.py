"""Costs that grow with the job, what one rank or the head of a preflight does at 1,024 ranks, and
with its data, the plan of a billion samples.

    python benchmarks/scale.py [--quick] [--json FILE]

No such machine is needed: one process runs the code of one rank of many, or the checks on the
facts of many nodes. Every figure comes with its growth law, the exponent between sizes that differ
by factors of four.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _report
import _scale_checkpoints
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

ACCUM, MICRO_BATCH, LATENT_DIM = 32, 4, 384
# Checks whose cost grew with the square or cube of the nodes.
COMPARED = ("DATA003", "VER001", "VER002", "NET001", "NET002", "NET007", "ENV002", "GPU001")
LARGE_STORE = 2 << 30  # bytes; only blocks of it are compared
RANKS_OF_A_NODE, PLAN_BATCH = 8, 4096


def growth(sizes: list[int], costs: list[float]) -> str:
    """Return "n^1.02, n^0.98": the exponents between neighboring sizes."""
    pairs = zip(zip(sizes, costs), zip(sizes[1:], costs[1:]))
    exponents = (
        math.log(max(after, 1e-9) / max(before, 1e-9)) / math.log(larger / size)
        for (size, before), (larger, after) in pairs
    )
    return ", ".join(f"n^{exponent:.2f}" for exponent in exponents)


class DrawnTexts:
    """The store's interface over texts that are made when they are read."""

    def __init__(self, lengths: np.ndarray):
        self.lengths = lengths
        self.latent = np.random.default_rng(0).standard_normal(LATENT_DIM).astype(np.float32)

    def get(self, indices: np.ndarray):
        from mmldlm.data.store import Rows

        tokens = [np.full(self.lengths[index] - 1, 5) for index in indices]
        return Rows(tokens, np.tile(self.latent, (len(indices), 1)))


def batch_milliseconds(num_ranks: int) -> tuple[float, float]:
    """Return the CPU milliseconds of one rank for the micro-batches of a step, between two windows
    of the plan, and for a window, of which every 64th step makes one.
    """
    from mmldlm.data.batch_plan import BatchPlan
    from mmldlm.data.loader import MicroBatches
    from mmldlm.tasks.registry import load_config
    from mmldlm.tasks.translation.noiser import Noiser

    global_batch = num_ranks * ACCUM * MICRO_BATCH
    lengths = np.random.default_rng(1).integers(8, 64, 64 * global_batch, dtype=np.int32)
    tokens = ["model.mask_token_id=3", "model.pad_token_id=0", "model.eos_token_id=2"]
    config = load_config("tiny", None, [*tokens, f"model.latent_dim={LATENT_DIM}"])
    noiser = Noiser(config, np.zeros(LATENT_DIM, np.float32), np.ones(LATENT_DIM, np.float32))
    plan = BatchPlan(lengths, global_batch, 0)
    data = MicroBatches(DrawnTexts(lengths), plan, noiser, num_ranks // 2, num_ranks, ACCUM)
    started = time.process_time()
    data[0]  # makes the window
    window = (time.process_time() - started) * 1000
    found = []
    for step in range(1, 8):
        started = time.process_time()
        for item in range(step * ACCUM, (step + 1) * ACCUM):
            data[item]
        found.append((time.process_time() - started) * 1000)
    return statistics.median(found), window


def plan_costs(num_samples: int) -> dict[str, float]:
    """Return what a rank takes to open the lengths of a store and to make its first global batch:
    CPU seconds, and the MiB of memory of its own; with them the bytes per sample of a node's ranks
    and of the file that they share.
    """
    block = np.random.default_rng(3).integers(8, 512, 1 << 20).astype(np.uint16)
    with tempfile.TemporaryDirectory(prefix="mmldlm_scale_") as folder:
        path = Path(folder, "lengths.npy")
        from mmldlm.data.arrays import NpyWriter

        writer = NpyWriter(path, np.uint16)
        for start in range(0, num_samples, len(block)):
            writer.append(block[: num_samples - start])
        writer.close()
        seconds, mib = measured_alone("--plan", str(path))
        shared = path.stat().st_size
    of_node = shared + RANKS_OF_A_NODE * mib * 2**20
    return {"seconds": seconds, "mib": mib, "bytes": of_node / num_samples}


def plan_growth(path: str) -> tuple[float, float]:
    """Make the plan of mapped lengths as a run does (`Store`, `lengths_in_use`) and its first
    batch; return the CPU seconds, and the MiB by which the memory of this process alone grew.
    """
    from mmldlm.data.arrays import map_array
    from mmldlm.data.batch_plan import BatchPlan
    from mmldlm.data.lengths import Lengths

    before, started = own_mib(), time.process_time()
    lengths = Lengths([map_array(Path(path))], 511)
    lengths.num_cut()
    lengths = lengths[:None] + 1
    lengths.max()
    plan = BatchPlan(lengths, PLAN_BATCH, 0)
    lengths[plan.batch(0).ids].sum()
    return time.process_time() - started, own_mib() - before


def measured_alone(*arguments: str) -> list[float]:
    """Return the numbers that this script prints in a process of its own."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


def head_costs(num_nodes: int) -> dict[str, float]:
    """Return the costs of the head of a preflight for the checks that compare nodes, and for the
    report; one node in 16 differs. CPU seconds, the longest line of the report, its lines, and the
    MiB by which the process grew.
    """
    values = measured_alone("--head", str(num_nodes))
    return dict(zip((*COMPARED, "parse", "report", "longest line", "lines", "MiB"), values))


def head_growth(num_nodes: int) -> dict[str, float]:
    """See head_costs."""
    from mmldlm.cluster.hostfile import Node
    from mmldlm.preflight.check import run_check
    from mmldlm.preflight.context import Context
    from mmldlm.preflight.report import print_report
    from mmldlm.preflight.runner import all_checks
    from mmldlm.tasks.registry import load_config

    names = node_names(num_nodes)
    options = argparse.Namespace(
        level=2, launcher="deepspeed", propagates_all=False, ssh_port=None, hostfile="h",
        master_addr=None, master_port=29500,
    )  # fmt: skip
    context = Context(options, [Node(name, 8) for name in names])
    context.config = load_config("tiny")
    checks = {found.id: found for found in all_checks()}
    seconds, results, parsing, before = {}, [], 0.0, peak_mib()
    for index, name in enumerate(names):
        facts = {probe: {"value": value} for probe, value in node_facts(index).items()}
        answer, started = json.dumps(facts), time.process_time()
        context.facts[name] = json.loads(answer)
        parsing += time.process_time() - started
    for id in COMPARED:
        started = time.process_time()
        results += run_check(checks[id], context)
        seconds[id] = time.process_time() - started
    seconds["parse"], started = parsing, time.process_time()
    out = io.StringIO()
    print_report(context, results, 1.0, out)
    seconds["report"] = time.process_time() - started
    lines = out.getvalue().splitlines()
    seconds["longest line"], seconds["lines"] = max(map(len, lines)), len(lines)
    return seconds | {"MiB": peak_mib() - before}


def node_names(num_nodes: int) -> list[str]:
    return [f"10.1.{index // 256}.{index % 256}" for index in range(num_nodes)]


def answer_bytes(num_nodes: int) -> int:
    """Return the size of a node's answer about the names of all nodes, which it resolves as the
    head does.
    """
    from mmldlm.preflight.checks.network import resolve

    names = node_names(num_nodes)
    return len(json.dumps(resolve({"names": names, "known": {name: [name] for name in names}})))


def node_facts(index: int) -> dict[str, Any]:
    """Return what a node reports of versions, code, data, environment, network and GPUs."""
    differs = index % 16 == 7
    packages = dict.fromkeys(("python", "torch", "deepspeed", "numpy"), "2.0")
    if differs:
        packages["numpy"] = "1.9"
    files = {f"shard-{n:05}.tokens": {"blocks": f"{n:064x}"} for n in range(32)}
    if differs:
        files["shard-00003.tokens"] = {"blocks": f"{index:064x}"}
    ethernet = {
        "name": "eth0", "addresses": [f"10.1.{index // 256}.{index % 256}"],
        "networks": ["10.1.0.0/16"], "ipv6": True, "up": True,
        "switched_on": True, "loopback": False, "virtual": False, "mtu": 1500,
    }  # fmt: skip
    return {
        "environment": dict(os.environ),
        "gpus": {"driver": "570.1", "gpus": [{"index": n, "name": "H100"} for n in range(8)]},
        "network": {
            "interfaces": [ethernet],
            "hostname": f"n{index}",
            "hostname_addresses": ethernet["addresses"],
            "hostname_error": None,
            "hostname_seconds": 0.0,
            "route_to_master": {"source": ethernet["addresses"][0], "interface": "eth0"},
            "addresses": ethernet["addresses"],
            "ephemeral_ports": [32768, 60999],
        },
        "versions": {"packages": packages, "nccl": "2.27.3", "machine": "x86_64"},
        "code": {"sources": "0" * 16, "commit": "c" * 40},
        "data": {
            "manifest_sha256": ["a" * 64],
            "files": files,
            "bytes_total": LARGE_STORE,
            "bytes_read": 256 << 20,
        },
    }


def plot_mib(mib: int) -> float:
    """Return the MiB by which a process grows when it plots a log of so many MiB."""
    with tempfile.TemporaryDirectory(prefix="mmldlm_scale_") as folder:
        record = {"grad_norm": 1.0, "lr": 1e-4, "skipped": False, "other": "x" * 500}
        with open(Path(folder, "training_log.jsonl"), "w", encoding="utf-8") as log:
            for step in itertools.count(1):
                log.write(json.dumps({"step": step, "loss": 1 + 1 / step, **record}) + "\n")
                if step % 1000 == 0 and log.tell() > mib << 20:
                    break
        return measured_alone("--plot", folder)[0]


def plot_growth(folder: str) -> float:
    """Plot a run's log, and return by how many MiB this process grew."""
    import matplotlib.figure  # noqa: F401

    from mmldlm.observe.plots import plot_run

    before = peak_mib()
    plot_run(folder)
    return peak_mib() - before


def peak_mib() -> float:
    """Return the most MiB that were resident in this process; getrusage counts its parent, too."""
    return status_mib("VmHWM")


def own_mib() -> float:
    """Return the MiB of this process without the pages of mapped files, which others share."""
    return status_mib("RssAnon")


def status_mib(key: str) -> float:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split(f"{key}:")[1].split()[0]) / 1024


def rank_gib(parameters: int = 8_000_000_000) -> dict[tuple[str, int], float]:
    """Return the GiB of weights, gradients and optimizer that preflight promises for a model, by
    engine and number of ranks: bf16, AdamW, accumulation.
    """
    from mmldlm.preflight.memory_model import state_bytes

    sizes = {"trainable": parameters, "frozen": 0, "largest_block": parameters // 40}
    engines = {
        "zero1": {},
        "zero2": {},
        "zero3": {},
        "fsdp": {},
        "fsdp, shard_gradients": {"shard_gradients": True},
    }
    return {
        (name, ranks): state_bytes(
            name.split(",")[0], sizes, ranks, "bf16", 50_000_000, accumulates=True, **more
        )
        / 2**30
        for name, more in engines.items()
        for ranks in (8, 64, 1024)
    }


def checkpoint_costs(sizes: list[int]) -> tuple[dict[str, list[dict[str, float]]], list[float]]:
    """Print and return what a rank opens to resume, by engine, and what rank 0 does to commit."""
    with tempfile.TemporaryDirectory(prefix="mmldlm_scale_") as folder:
        source, resumes = _scale_checkpoints.make_source(Path(folder, "source")), {}
        for target in _scale_checkpoints.TARGETS:
            found = [
                _scale_checkpoints.resume_costs(
                    source, target, size, Path(folder, f"{target}_{size}")
                )
                for size in sizes
            ]
            for part in found[0]:
                show(f"resume, {target}: {part}", "", sizes, [costs[part] for costs in found])
            resumes[target] = found
        commits = [
            _scale_checkpoints.commit_seconds(size, Path(folder, f"run{size}")) for size in sizes
        ]
        show("rank 0 commits and prunes", "s", sizes, commits)
    return resumes, commits


def show(name: str, unit: str, sizes: list[int], costs: list[float]) -> None:
    """Print the costs at each size with their law."""
    values = "  ".join(f"{size:>5.5g}: {value:9.3f}" for size, value in zip(sizes, costs))
    print(f"{name:34} {unit:4} {values}   {growth(sizes, costs)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer ranks and nodes: the form only"
    )
    parser.add_argument("--json", help="write conditions and claims here")
    for part in ("plot", "plan", "head"):
        parser.add_argument(f"--{part}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plot:
        print(plot_growth(args.plot))
        return 0
    if args.plan:
        print(*plan_growth(args.plan))
        return 0
    if args.head:
        print(*head_growth(int(args.head)).values())
        return 0
    sizes = [4, 16, 64] if args.quick else [64, 256, 1024]
    batches, windows = zip(*map(batch_milliseconds, sizes))
    show("a rank's batches, 32 accumulated", "ms", sizes, batches)
    show("a rank's window, every 64th step", "ms", sizes, windows)
    resumes, commits = checkpoint_costs(sizes)
    samples = [10**5, 10**6, 10**7] if args.quick else [10**7, 10**8, 10**9]
    plans = [plan_costs(num) for num in samples]
    for part, unit in (("seconds", "s"), ("mib", "MiB"), ("bytes", "B")):
        show(f"plan of so many samples: {part}", unit, samples, [plan[part] for plan in plans])
    heads = [head_costs(size) for size in sizes]
    for part in heads[0]:
        unit = "" if "line" in part or part == "MiB" else "s"
        show(f"head: {part}", unit, sizes, [head[part] for head in heads])
    answers = [answer_bytes(size) for size in sizes]
    show("a node's answer about all names", "B", sizes, answers)
    logs = [1, 4, 16] if args.quick else [16, 64, 256]
    plots = [plot_mib(size) for size in logs]
    show("plotting a log of so many MiB", "MiB", logs, plots)
    memory = rank_gib()
    for (name, ranks), gib in memory.items():
        print(f"8B, {name}, {ranks:,} ranks: {gib:.1f} GiB (derived)")
    head = sum(heads[-1][part] for part in (*COMPARED, "parse", "report"))
    files = max(of_target[-1]["files"] for of_target in resumes.values())
    # One that is the first of a window of the plan, and that commits a checkpoint.
    slowest = (batches[-1] + windows[-1]) / 1000 + commits[-1]
    claims = [
        _report.claim("batch_ms_1024_ranks_accum_32", batches[-1], "<=", 30, measured=True),
        _report.claim("slowest_rank0_step_seconds_1024", slowest, "<=", 10, measured=True),
        _report.claim("resume_files_opened_per_rank_1024", files, "<=", 16),
        _report.claim(
            "lengths_bytes_per_sample_and_node", plans[-1]["bytes"], "<=", 2.5, measured=True
        ),
        _report.claim("plan_seconds_1e9_samples", plans[-1]["seconds"], "<=", 2, measured=True),
        _report.claim("plan_mib_1e9_samples", plans[-1]["mib"], "<=", 300, measured=True),
        _report.claim("preflight_head_cpu_seconds_1024_nodes", head, "<=", 2, measured=True),
        _report.claim("preflight_head_mib_1024_nodes", heads[-1]["MiB"], "<=", 300, measured=True),
        _report.claim("longest_line_of_the_report", heads[-1]["longest line"], "<=", 500),
        _report.claim("answer_bytes_about_1024_names", answers[-1], "<=", 1000),
    ]
    per_gib = (plots[-1] - plots[-2]) / (logs[-1] - logs[-2]) * 1024
    claims.append(_report.claim("plot_mib_per_gib_of_log", per_gib, "<=", 100, measured=True))
    rows = {"batch_ms": batches, "head": heads, "sizes": sizes, "resume": resumes, "plan": plans}
    return _report.write(args.json, claims, args.quick, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
