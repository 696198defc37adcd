"""What is kept of a skipped step, so that `mmldlm replay` can run it again.

Samples, noise and timesteps are functions of (seed, epoch, sample id, place), so the ids and the config are the whole
micro-batch; the weights are those of a checkpoint, because a skipped step moves none.
"""

from __future__ import annotations

import json
import math
import os
import socket
from pathlib import Path

import torch
from torch import Tensor

from mmldlm.data.batching.batch import Batch
from mmldlm.engines.base import Engine
from mmldlm.errors import UserError

SKIPPED_STEPS_DIR = "forensics"
MAX_RECORDS = 200
"""A run that skips more often than this has its first cases kept and says so in its events."""


def collect_step_record(engine: Engine, batches: list[Batch], losses: list[Tensor]) -> list[dict]:
    """Every micro-batch of the step over all ranks: {rank, host, micro, loss, ids}. Collective; only on a skip.

    Args:
        batches: this rank's micro-batches. losses: their detached losses, 0-d.
    """
    values = torch.stack([loss.detach().double() for loss in losses]).tolist()
    own = [
        {"rank": engine.rank, "host": socket.gethostname(), "micro": micro, "loss": value, "ids": batch.ids.tolist()}
        for micro, (batch, value) in enumerate(zip(batches, values, strict=True))
    ]
    if engine.world_size == 1:
        return own
    gathered: list[list[dict] | None] = [None] * engine.world_size
    torch.distributed.all_gather_object(gathered, own)
    return [entry for part in gathered for entry in part or []]


def bad_micro_batches(entries: list[dict]) -> list[dict]:
    """Those of gather() whose loss was not finite."""
    return [entry for entry in entries if not math.isfinite(entry["loss"])]


def save_skipped_step(run_dir: Path, case: dict) -> Path | None:
    """Write one skipped step into RUN/forensics; None once MAX_RECORDS are there.

    Raises:
        OSError: the disk is full.
    """
    folder = run_dir / SKIPPED_STEPS_DIR
    folder.mkdir(exist_ok=True)
    path = folder / f"step_{case['step']:08d}.json"
    if not path.exists() and len(list(folder.glob("step_*.json"))) >= MAX_RECORDS:
        return None
    strict = {**case, "micro_batches": [{**entry, "loss": _to_json(entry["loss"])} for entry in case["micro_batches"]]}
    strict |= {key: _to_json(case[key]) for key in ("loss", "grad_norm")}
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(strict, allow_nan=False) + "\n")
    os.replace(beside, path)
    return path


def load_skipped_step(run_dir: Path, event: str) -> dict:
    """The case of a step number or of `last`.

    Raises:
        UserError: no such case; those there are named.
    """
    found = sorted((run_dir / SKIPPED_STEPS_DIR).glob("step_*.json"))
    steps = [int(path.stem.split("_")[1]) for path in found]
    wanted = steps[-1:] if event == "last" else [int(event)] if event.isdigit() else []
    if not wanted or wanted[0] not in steps:
        there = ", ".join(map(str, steps[:8])) + (" ..." if len(steps) > 8 else "") if steps else "none"
        raise UserError(
            f"the step number of a skip in {run_dir / SKIPPED_STEPS_DIR}, or `last`",
            f"{event!r}; steps kept there: {there}",
            f"`skip` lines of {run_dir / 'events.jsonl'} name the steps",
        )
    case = json.loads(found[steps.index(wanted[0])].read_text())
    for holder in (case, *case["micro_batches"]):
        for key in ("loss", "grad_norm"):
            if isinstance(holder.get(key), str):
                holder[key] = float(holder[key])
    return case


def _to_json(value: float) -> float | str:
    """Strict JSON has no NaN: the words nan, inf, -inf, which float() reads."""
    return value if math.isfinite(value) else str(value)
