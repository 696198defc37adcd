"""Records of skipped steps, from which `mmldlm replay` reruns them.

Samples, noise and timesteps are functions of (seed, epoch, sample id, slot), so the ids and the config determine a
micro-batch. A skipped step does not change the weights, so a checkpoint provides them.
"""

from __future__ import annotations

import json
import math
import socket
from pathlib import Path

import torch
from torch import Tensor

from mmldlm.data.batching.batch import Batch
from mmldlm.engines.base import Engine
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import write_text
from mmldlm.utils.formatting import join_some
from mmldlm.utils.input_files import read_text
from mmldlm.utils.json_files import to_json

SKIPPED_STEPS_DIR = "forensics"
MAX_RECORDS = 200
"""Maximum number of records per run; later skips are reported in its events only."""


def collect_step_record(engine: Engine, batches: list[Batch], losses: list[Tensor]) -> list[dict]:
    """Return every micro-batch of the step over all ranks: {rank, host, micro, loss, ids}. Collective; only on a skip.

    Args:
        batches: this rank's micro-batches.
        losses: their detached losses, 0-d.
    """
    values = torch.stack([loss.detach().double() for loss in losses]).tolist()
    local = [
        {"rank": engine.rank, "host": socket.gethostname(), "micro": micro, "loss": value, "ids": batch.ids.tolist()}
        for micro, (batch, value) in enumerate(zip(batches, values, strict=True))
    ]
    if engine.world_size == 1:
        return local
    gathered: list[list[dict] | None] = [None] * engine.world_size
    torch.distributed.all_gather_object(gathered, local)
    return [entry for part in gathered for entry in part or []]


def bad_micro_batches(entries: list[dict]) -> list[dict]:
    """Return the entries of `collect_step_record` with a non-finite loss."""
    return [entry for entry in entries if not math.isfinite(entry["loss"])]


def save_skipped_step(run_dir: Path, case: dict) -> Path | None:
    """Write one skipped step to RUN/forensics and return its path; None if MAX_RECORDS exist.

    Raises:
        OSError: the record cannot be written.
    """
    folder = run_dir / SKIPPED_STEPS_DIR
    folder.mkdir(exist_ok=True)
    path = folder / f"step_{case['step']:08d}.json"
    if not path.exists() and len(list(folder.glob("step_*.json"))) >= MAX_RECORDS:
        return None
    write_text(path, to_json(case) + "\n")
    return path


def load_skipped_step(run_dir: Path, event: str) -> dict:
    """Return the record of a step number or of `last`.

    Raises:
        UserError: no such record; the existing ones are listed.
    """
    found = sorted((run_dir / SKIPPED_STEPS_DIR).glob("step_*.json"))
    steps = [int(path.stem.split("_")[1]) for path in found]
    chosen = steps[-1:] if event == "last" else [int(event)] if event.isdigit() else []
    if not chosen or chosen[0] not in steps:
        raise UserError(
            f"the step number of a skip in {run_dir / SKIPPED_STEPS_DIR}, or `last`",
            f"{event!r}; recorded steps: {join_some(steps, 8) or 'none'}",
            f"look up the step in a `skip` line of {run_dir / 'events.jsonl'}",
        )
    case = json.loads(read_text(found[steps.index(chosen[0])]))
    for holder in (case, *case["micro_batches"]):
        for key in ("loss", "grad_norm"):
            if isinstance(holder.get(key), str):
                holder[key] = float(holder[key])
    return case
