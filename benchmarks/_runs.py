"""Real trainings for the benchmarks: their settings and their logs.

Their ranks: tests/support/rank_server.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks run from a checkout, installed or not

from tests.support.rank_server import TRAIN, Ranks, RankServer  # noqa: E402

__all__ = [
    "ENGINES",
    "GLOBAL_BATCH",
    "OPTIMIZERS",
    "ROOT",
    "TRAIN",
    "RankServer",
    "Ranks",
    "losses",
    "read_log",
    "settings",
]

GLOBAL_BATCH, ACCUMULATION = 8, 2

ENGINES: dict[str, list[str]] = {
    "single": ["engine.kind=single"],
    "ddp": ["engine.kind=ddp"],
    "fsdp": ["engine.kind=fsdp"],
    "hsdp": ["engine.kind=fsdp", "engine.hsdp_replicas=2"],
    **{f"zero{stage}": [f"engine.zero_stage={stage}"] for stage in range(4)},
    "zero3_offload": [f"engine.deepspeed_config={ROOT / 'ds_configs' / 'zero3_offload.json'}"],
}

# Muon's state differs from AdamW's: engines, resume and conversion are compared with both.
OPTIMIZERS: dict[str, list[str]] = {"adamw": [], "muon": ["optimizer.kind=muon"]}


def settings(data: str, folder: str | Path, name: str, world_size: int, *more: str) -> list[str]:
    """Return the arguments of a tiny training; the global batch does not depend on the
    world size.
    """
    return [
        "--config-name",
        "tiny",
        f"data.latent_data_root={data}",
        "data.max_validation_samples=16",
        f"logging.save_dir={folder}",
        f"logging.run_name={name}",
        f"training.train_batch_size={GLOBAL_BATCH // ACCUMULATION // world_size}",
        f"training.grad_accum_steps={ACCUMULATION}",
        # a weight shared by two modules is where partitioning goes wrong first
        "model.tie_embeddings=true",
        "logging.plot=false",  # as the samples, 0.7 s, most of a tiny run
        "logging.eval_samples=0",
        "logging.log_freq=1000000",
        "logging.save_freq=1000000",  # both happen at the end anyway
        "logging.eval_freq=1000000",
        *more,
    ]


def read_log(run_dir: str | Path, file: str = "training_log.jsonl") -> list[dict]:
    """Return the complete lines of a run's log, [] before it exists."""
    path = Path(run_dir) / file
    if not path.exists():
        return []
    *lines, _ = path.read_text().split("\n")
    return [json.loads(line) for line in lines]


def losses(run_dir: str | Path) -> dict[int, float]:
    """Return step -> loss of a run."""
    return {record["step"]: record["loss"] for record in read_log(run_dir)}


def loss_difference(
    found: dict[int, float], reference: dict[int, float], first: int, last: int
) -> float:
    """Return the largest relative difference over the steps first .. last; infinite if a finite
    loss is missing.
    """
    worst = 0.0
    for step in range(first, last + 1):
        ours, theirs = found.get(step), reference.get(step)
        if ours is None or theirs is None:
            return float("inf")
        worst = max(worst, abs(ours - theirs) / abs(theirs))
    return worst
