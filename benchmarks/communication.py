"""Cost of the communication settings: step time, exposed communication and memory by DeepSpeed's
bucket size.

    python benchmarks/communication.py [--data STORE] [--quick] [--rounds R] [--json FILE]

Trainings on two ranks of this machine (gloo; NCCL with GPUs) of a model of 80M to 95M parameters
(depending on the store's vocabulary), two micro-batches per step: DDP, FSDP2, and ZeRO-1, 2 and 3
with the settings of ds_configs/ except for the bucket size. Variants run in turns. Of each run,
steps 4 to 9 are timed (median wall time between two records of the log, over all rounds), and 10
to 12 profiled: the fraction of the time in which a collective ran and nothing was computed. Memory
is the peak of a rank in the log. The claims: the size that "auto" means on this machine is at most
10 % slower than the fastest one.

The table also says what each engine moves: elements a rank sends in one step, in units of the
model's parameters P, for many ranks (an all-reduce sends 2 n, reduce-scatter, all-gather and the
reduces to every rank n), counted from the trace. With two micro-batches DDP needs 2, ZeRO-2 three
(two reduce-scatters, one all-gather). DeepSpeed's ZeRO-1 and 2 send more: they all-reduce whole
buckets. "zero2 reduce" is ZeRO-2 with "use_multi_rank_bucket_allreduce": false, which sends a
reduce to each rank instead.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from statistics import median

import _report
import _runs
import _store
import torch

from mmldlm.engines.deepspeed_config import CPU_BUCKET, GPU_BUCKET

SIZES = (CPU_BUCKET, GPU_BUCKET, 500_000_000)  # elements; the last one is DeepSpeed's own default
ACCUMULATION = _runs.ACCUMULATION
RANKS = 2
SHIPPED = GPU_BUCKET if torch.cuda.device_count() >= RANKS else CPU_BUCKET
KEYS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
WARM, TIMED, PROFILED = 3, 6, 3
LARGE = [
    "model.hidden_size=512",
    "model.n_blocks=8",
    "model.n_heads=8",
    "model.cond_dim=512",
    "training.train_batch_size=4",
]


def variants(folder: Path, quick: bool) -> dict[str, list[str]]:
    """Name -> command-line arguments; DeepSpeed's settings are written to folder."""
    found = {} if quick else {"ddp": ["engine.kind=ddp"], "fsdp": ["engine.kind=fsdp"]}
    values = json.loads((_runs.ROOT / "ds_configs" / "zero2.json").read_text())
    values["zero_optimization"]["use_multi_rank_bucket_allreduce"] = False
    path = folder / "zero2_reduce.json"
    path.write_text(json.dumps(values))
    found["zero2 reduce"] = [f"engine.deepspeed_config={path}"]
    for stage in (2,) if quick else (1, 2, 3):
        for size in SIZES[:2] if quick else SIZES:
            values = json.loads((_runs.ROOT / "ds_configs" / f"zero{stage}.json").read_text())
            zero = values["zero_optimization"]
            zero.update({key: size for key in KEYS if key in zero})
            path = folder / f"zero{stage}_{size}.json"
            path.write_text(json.dumps(values))
            found[f"zero{stage} {size:,}"] = [f"engine.deepspeed_config={path}"]
    return found


# Operation in a trace -> (position of the tensor whose size counts, elements that a rank of many
# sends per element of it).
OPERATIONS = {
    "c10d::allreduce_": (0, 2),
    "c10d::reduce_": (0, 1),
    "c10d::_allgather_base_": (0, 1),
    "c10d::_reduce_scatter_base_": (1, 1),
}


def elements_sent(trace: Path) -> float:
    """Elements that a rank sends in one of the profiled steps, if there are many ranks."""
    total = 0
    for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]:
        if event.get("name") in OPERATIONS:
            position, factor = OPERATIONS[event["name"]]
            shape = event["args"]["Input Dims"][position]
            # A list of tensors has a list of shapes.
            shapes = shape if shape and isinstance(shape[0], list) else [shape]
            total += factor * sum(math.prod(one) for one in shapes)
    return total / PROFILED


def measure(
    launcher: _runs.RankServer, args, folder: Path, words: list[str]
) -> tuple[list[float], float, float, float]:
    """Seconds of the timed steps, exposed share of the profiled ones, peak GiB of a rank, and
    elements that it sends per step.
    """
    last = WARM + TIMED
    words = _runs.settings(
        args.data,
        folder,
        "run",
        RANKS,
        *([] if args.quick else LARGE),
        "logging.log_freq=1",
        "checkpoints.async_save=false",
        f"training.num_train_steps={last + PROFILED}",
        f"training.profile=[{last + 1},{last + PROFILED}]",
        *words,
    )
    launcher.run(RANKS, words)
    log = _runs.read_log(folder / "run")
    ends = [datetime.fromisoformat(record["time"]).timestamp() for record in log]
    seconds = [after - before for before, after in zip(ends[WARM - 1 : last], ends[WARM:last])]
    (profile,) = (
        e for e in _runs.read_log(folder / "run", "events.jsonl") if e["event"] == "profile"
    )
    if profile["error"] is not None or len(seconds) != TIMED:
        sys.exit(f"a run has no profile or not {TIMED} timed steps: {profile}, {len(log)} records")
    memory = max(record["peak_memory_gib"] for record in log)
    (trace,) = (folder / "run" / "profile").glob("*_rank0.json")
    sent = elements_sent(trace)
    shutil.rmtree(folder / "run")
    return seconds, profile["exposed_communication_share"], memory, sent


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help=_store.HELP)
    parser.add_argument(
        "--quick", action="store_true", help="the tiny preset, ZeRO-2 with two sizes"
    )
    parser.add_argument("--rounds", type=int, help="runs of each variant (default 2, --quick 1)")
    parser.add_argument("--json", help="write conditions, figures and claims here")
    args = parser.parse_args()
    args.data = _store.given_or_made(args.data)
    rounds = args.rounds or (1 if args.quick else 2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = variants(folder, args.quick)
        found = {variant: ([], [], [], []) for variant in words}
        with _runs.RankServer(folder / "logs", RANKS) as launcher:
            for turn in range(rounds):
                for variant, more in words.items():
                    seconds, *figures = measure(launcher, args, folder, more)
                    found[variant][0].extend(seconds)
                    for values, figure in zip(found[variant][1:], figures):
                        values.append(figure)
                    print(
                        f"round {turn + 1}: {variant:18} {median(seconds):.3f} s per step",
                        flush=True,
                    )
    rows = {
        variant: {
            "step_seconds": median(seconds),
            "exposed_share": median(exposed),
            "peak_memory_gib": max(memory),
            "elements_sent": sent[0],
        }
        for variant, (seconds, exposed, memory, sent) in found.items()
    }
    # ZeRO-2 with reduces gathers all parameters once, and reduces them once a micro-batch.
    parameters = rows["zero2 reduce"]["elements_sent"] / (ACCUMULATION + 1)
    print("\nbucket (elements)    s / step   exposed communication   peak GiB / rank   sent / P")
    for variant, row in rows.items():
        row["sent_over_parameters"] = row["elements_sent"] / parameters
        print(
            f"{variant:20} {row['step_seconds']:8.3f} {row['exposed_share']:15.1%}"
            f" {row['peak_memory_gib']:21.2f} {row['sent_over_parameters']:13.2f}"
        )
    claims = []
    for stage in ("zero1", "zero2", "zero3"):
        times = {
            variant: row["step_seconds"]
            for variant, row in rows.items()
            if variant.startswith(stage)
        }
        if times:
            ratio = times[f"{stage} {SHIPPED:,}"] / min(times.values())
            claims.append(
                _report.claim(f"bucket_time_ratio_{stage}", ratio, "<=", 1.1, measured=True)
            )
    return _report.write(args.json, claims, args.quick, ranks=2, rounds=rounds, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
