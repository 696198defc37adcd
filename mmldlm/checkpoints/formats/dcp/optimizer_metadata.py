"""Optimizer metadata of a DCP folder, from the trainable.json next to it."""

from __future__ import annotations

import json

from mmldlm.checkpoints.formats.base import OpenedCheckpoint
from mmldlm.checkpoints.formats.deepspeed_state import add_deepspeed_state
from mmldlm.checkpoints.formats.optimizer_metadata import (
    COPIED_KEYS,
    PLAIN_SCALER,
    PLAIN_TYPES,
    Group,
    OptimizerMetadata,
    applied_steps,
    configured_dtype,
    default_counters,
    default_scaler,
    loss_scaler,
)
from mmldlm.checkpoints.formats.torch_save.reader import corrupt_file_error
from mmldlm.checkpoints.layout import TRAINABLE_FILE
from mmldlm.utils.input_files import read_bytes


def read_optimizer_metadata(opened: OpenedCheckpoint) -> OptimizerMetadata:
    """See CheckpointFormat.read_optimizer_metadata."""
    source = opened.weights
    path = source.path / TRAINABLE_FILE
    record = json.loads(read_bytes(path))  # DcpCheckpoint has validated it
    notes = []
    try:
        groups = [
            Group(list(group["names"]), dict(group["settings"])) for group in record["groups"]
        ]
        for group in groups:
            if "betas" in group.settings:  # JSON has no tuples
                group.settings["betas"] = tuple(group.settings["betas"])
    except KeyError:
        groups = [Group(list(record["trainable"]), {})]
        notes.append(f"{path.name} names no parameter groups: all are in one, without settings")
    except (TypeError, ValueError) as error:
        raise corrupt_file_error(
            path, f"groups that are not a list of names and settings ({error!r})"
        ) from error
    groups = [
        Group(source.resolve_tied(group.names, source.path), group.settings) for group in groups
    ]
    steps = applied_steps(opened) if record.get("steps") is None else float(record["steps"])
    dtype = record.get("compute_dtype") or configured_dtype(opened)
    saved = record.get("deepspeed")
    saved = saved if isinstance(saved, dict) else {}
    copied = {
        key: saved[key] for key in COPIED_KEYS if key in saved and type(saved[key]) in PLAIN_TYPES
    }
    optimizer = {**default_scaler(), **copied, "loss_scaler": loss_scaler(saved.get(PLAIN_SCALER))}
    counters = default_counters(opened, steps)
    metadata = OptimizerMetadata(groups, steps, dtype, counters, optimizer, notes=notes)
    return add_deepspeed_state(metadata, source.path)
