"""The memory per rank that preflight promises, against the memory that a rank takes.

    python benchmarks/memory.py [--device cuda|cpu] [--data STORE] [--preset NAME] [--json FILE]

Trains a few real steps under every plan (one process, DDP, ZeRO-1 to 3, FSDP2), with and without
accumulation and activation checkpointing, each in a process of its own, and compares the peak
with the formula of preflight's MEM001 (mmldlm/preflight/memory_model.py). The peak is what torch
allocated on the GPU; its allocator reserves more, and the context of CUDA and NCCL's buffers come
on top. With --device cpu, where nothing is claimed, it is what torch allocated since the session
was opened, as its profiler has it: what gloo's threads free in the background it counts on.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import _report
import _store

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

PLANS = {
    "single": ["engine.kind=single"],
    "zero0": ["engine.kind=ddp"],
    **{f"zero{stage}": [f"engine.zero_stage={stage}"] for stage in (1, 2, 3)},
    "fsdp": ["engine.kind=fsdp"],
}
OPTIONS = {
    "plain": [],
    "accumulation": ["training.grad_accum_steps=2"],
    "checkpointing": ["model.gradient_checkpointing=true"],
}
STEPS = 3


def run_config(args: argparse.Namespace, plan: str, option: str, folder: str = "unused"):
    """Return the config of one measured run, completed from its data, and the data."""
    from mmldlm.tasks.registry import find_task, load_config

    words = [
        f"data.latent_data_root={args.data}",
        f"training.train_batch_size={args.batch}",
        f"training.num_train_steps={STEPS}",
        f"training.dtype={args.dtype}",
        f"optimizer.kind={args.optimizer}",
        f"logging.save_dir={folder}",
        "logging.run_name=run",
        "logging.eval_freq=1000",
        "logging.plot=false",
        "data.max_validation_samples=8",
    ]
    config = load_config(args.preset, None, [*words, *PLANS[plan], *OPTIONS[option]])
    return config, find_task(config.task)


def predicted(args: argparse.Namespace, plan: str, option: str) -> int:
    """Return MEM001's bytes of a rank, without the process itself."""
    from mmldlm.engines.deepspeed_config import bucket_elements
    from mmldlm.preflight import memory_model

    config, task = run_config(args, plan, option)
    data = task.open_data(config)
    sizes = task.model_sizes(data.config, int(data.train_lengths.max()))
    on_gpu = args.device == "cuda"
    stage = data.config.engine.zero_stage
    bucket = 0 if stage is None else bucket_elements(stage, on_gpu, None)
    dtype = data.config.training.dtype
    accumulates = data.config.training.grad_accum_steps > 1
    each = memory_model.bytes_per_rank(
        plan, sizes, args.ranks, dtype, on_gpu, bucket, accumulates=accumulates
    )
    return each - (memory_model.BASE_GPU if on_gpu else memory_model.BASE_CPU)


def measure_rank(args: argparse.Namespace) -> None:
    """Take a few steps, and print this rank's peak: a rank of `measured`."""
    from mmldlm.distributed.error_reporting import leave_process_group
    from mmldlm.training.run_check import check_run
    from mmldlm.training.session import open_session
    from mmldlm.training.signals import StopSignal
    from mmldlm.training.step import train_step

    plan, option, folder = args.of
    data = check_run(run_config(args, plan, option, folder)[0], args.ranks)
    on_gpu = args.device == "cuda"
    tracer = contextlib.nullcontext()
    if not on_gpu:
        tracer = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with tracer as profiler, open_session(data, StopSignal()) as session:
        batches = session.batches()
        session.engine.module.train()
        for _ in range(STEPS):
            train_step(session, next(batches), session.requests)
        batches.close()
    if on_gpu:
        found = {"peak": torch.cuda.max_memory_allocated()}
        found["reserved"] = torch.cuda.max_memory_reserved()
    else:
        found = {"peak": traced_peak(profiler)}
    leave_process_group()
    print(json.dumps(found), flush=True)


def traced_peak(profiler: profile) -> int:
    """Return the most bytes that torch's CPU allocator had given out."""
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


def measured(args: argparse.Namespace, plan: str, option: str) -> dict[str, int]:
    """Return the peak of the rank that took most."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={args.ranks}", __file__]
    for name in ("device", "data", "preset", "batch", "dtype", "optimizer", "ranks"):
        command += [f"--{name}", str(getattr(args, name))]
    with tempfile.TemporaryDirectory(prefix="mmldlm_memory_") as folder:
        command += ["--of", plan, option, folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    reports = re.findall(r'\{"[^}]*\}', done.stdout)  # ranks share the lines
    if done.returncode or len(reports) != args.ranks:
        raise SystemExit(f"{plan}, {option}: {done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    return max(map(json.loads, reports), key=lambda found: found["peak"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model: the form only")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--data", help=_store.HELP)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--batch", type=int, default=8, help="micro-batch of a rank")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--ranks", type=int, help="default: 1 on a GPU, 2 on a CPU")
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time")
    parser.add_argument("--plans", nargs="+", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--json", help="write conditions and claims here")
    parser.add_argument("--of", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("SKIPPED: torch sees no GPU here (--device cpu runs the same code, without a claim)")
        return _report.COULD_NOT_CHECK
    args.ranks = args.ranks or (1 if args.device == "cuda" else 2)
    if args.of:
        measure_rank(args)
        return 0
    options = list(OPTIONS)
    if args.quick:
        args.preset, args.plans, options = "tiny", ["zero2"], ["accumulation"]
    args.data = _store.given_or_made(args.data)
    cases = [
        (plan, option)
        for plan in args.plans
        for option in options
        if args.ranks == 1 or plan != "single"
    ]
    with ThreadPoolExecutor(args.at_once) as pool:
        peaks = list(pool.map(lambda case: measured(args, *case), cases))
    rows = []
    for (plan, option), found in zip(cases, peaks):
        promise = predicted(args, plan, option)
        rows.append({"plan": plan, "option": option, "predicted": promise, **found})
        print(
            f"{plan:8} {option:14} predicted {promise / 2**30:6.2f} GiB, "
            f"measured {found['peak'] / 2**30:6.2f} GiB, ratio {promise / found['peak']:.2f}",
            flush=True,
        )
    ratios = [row["predicted"] / row["peak"] for row in rows]
    claims = (
        []
        if args.device == "cpu"
        else [
            _report.claim("worst_underestimate", 1 / min(ratios) - 1, "<=", 0.0, True),
            _report.claim("worst_overestimate", max(ratios) - 1, "<=", 0.25, True),
        ]
    )
    facts = ("device", "preset", "batch", "dtype", "optimizer", "ranks")
    more = {name: getattr(args, name) for name in facts}
    return _report.write(args.json, claims, args.quick, rows=rows, **more)


if __name__ == "__main__":
    sys.exit(main())
