"""Records of skipped steps, from which `mmldlm replay` reruns them.

Samples, noise and timesteps are functions of (seed, epoch, sample id, slot), so the ids and the
config determine a micro-batch. A skipped step does not change the weights, so a checkpoint
provides them.
"""

from __future__ import annotations

import math
import re
import socket
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from mmldlm.checkpoints.training_state import Count
from mmldlm.config.section import MAX_COUNT
from mmldlm.data.batch import Batch
from mmldlm.engines.base import Engine
from mmldlm.errors import UserError
from mmldlm.observe.jsonl_log import iterate_records
from mmldlm.utils.atomic_files import write_text
from mmldlm.utils.formatting import join_some
from mmldlm.utils.json_files import read_json, to_json
from mmldlm.utils.run_files import EVENTS, FORENSICS
from mmldlm.utils.validation import describe_problems

_RECORD = re.compile(r"step_(\d{8,})\.json")
MAX_RECORDS = 200
"""Maximum number of records per run; the oldest go first."""


def gather_micro_batches(engine: Engine, batches: list[Batch], losses: list[Tensor]) -> list[dict]:
    """Return every micro-batch of the step over all ranks: {rank, host, micro, loss, ids}.
    Collective; only on a skip.

    Args:
        batches: This rank's micro-batches.
        losses: Their detached losses, 0-d.
    """
    values = torch.stack([loss.detach().double() for loss in losses]).tolist()
    local = [
        {
            "rank": engine.rank,
            "host": socket.gethostname(),
            "micro": micro,
            "loss": value,
            "ids": batch.ids.tolist(),
        }
        for micro, (batch, value) in enumerate(zip(batches, values, strict=True))
    ]
    return [entry for entries in engine.gather_objects(local) for entry in entries]


def nonfinite_micro_batches(entries: list[dict]) -> list[dict]:
    """Return the entries of `gather_micro_batches` with a non-finite loss."""
    return [entry for entry in entries if not math.isfinite(entry["loss"])]


def save_skipped_step(run_dir: Path, record: dict) -> Path:
    """Write one skipped step to RUN/forensics and return its path; MAX_RECORDS are kept.

    Raises:
        OSError: the record cannot be written.
    """
    folder = run_dir / FORENSICS
    folder.mkdir(exist_ok=True)
    path = folder / f"step_{record['step']:08d}.json"
    others = [other for _, other in _records(folder) if other != path]
    # By age: after a rollback new records are of earlier steps than old ones.
    others.sort(key=lambda other: other.stat().st_mtime_ns)
    for other in others[: max(len(others) + 1 - MAX_RECORDS, 0)]:
        other.unlink()
    write_text(path, to_json(record) + "\n")
    return path


def _records(folder: Path) -> list[tuple[int, Path]]:
    """Return the records in a folder by step."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((int(name[1]), path) for path in paths if (name := _RECORD.fullmatch(path.name)))


def load_skipped_step(run_dir: Path, event: str) -> dict:
    """Return the record of a step number or of `last`.

    Raises:
        UserError: no such record; the existing ones are listed.
        OSError: the folder of the records cannot be read.
    """
    folder = run_dir / FORENSICS
    records = _records(folder)
    steps = [step for step, _ in records]
    step = -1
    if event == "last" and steps:
        step = _last_skip(run_dir, steps)
    elif event.isascii() and event.isdigit():
        step = int(event)
    if step not in steps:
        raise UserError(
            f"the step number of a skip in {folder}, or `last`",
            f"{event!r}; recorded steps: {join_some(steps, 8) or 'none'}",
            f"look up the step in a `skip` line of {run_dir / EVENTS}",
        )
    return _read_record(records[steps.index(step)][1], step)


def _last_skip(run_dir: Path, steps: list[int]) -> int:
    """Return which of the recorded steps was skipped last.

    After a rollback the run skips steps below those that it skipped before.
    """
    events = run_dir / EVENTS
    skips = [
        record["step"]
        for record in (iterate_records(events) if events.is_file() else ())
        if record.get("event") == "skip" and record.get("step") in steps
    ]
    return skips[-1] if skips else steps[-1]


def _read_record(path: Path, step: int) -> dict:
    """Read and check one record of `save_skipped_step`.

    Raises:
        UserError: it is damaged, or was written by another program.
    """
    fix = "replay another step, or restore the file"
    values = read_json(path, fix)
    try:
        record = _SkippedStep(**values)
        if record.step != step:
            raise ValueError(f"step {record.step} in the record of step {step}")
        if any(
            entry.rank >= record.world_size or entry.micro >= record.accum
            for entry in record.micro_batches
        ):
            raise ValueError(
                f"micro_batches: of more than {record.world_size} ranks"
                f" x {record.accum} micro-batches"
            )
    except ValueError as error:
        problems = describe_problems(error) if isinstance(error, ValidationError) else str(error)
        raise UserError(
            f"the record of a skipped step in {path}", f"damaged file: {problems}", fix
        ) from error
    return record.model_dump()


class _MicroBatch(BaseModel):
    model_config = ConfigDict(extra="allow")

    rank: Count
    micro: Count
    loss: float
    """Also the words nan, inf and -inf."""
    ids: Annotated[list[Count], Field(min_length=1)]


class _SkippedStep(BaseModel):
    model_config = ConfigDict(extra="allow")

    step: Annotated[int, Field(ge=1, le=1 << 62)]
    reason: str
    loss: float
    grad_norm: float
    global_batch: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    world_size: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    accum: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    dtype: Literal["fp32", "bf16", "fp16"]
    loss_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    lr_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    passed_over: list[tuple[Count, Count]]
    micro_batches: Annotated[list[_MicroBatch], Field(min_length=1)]
    config: dict[str, Any]
