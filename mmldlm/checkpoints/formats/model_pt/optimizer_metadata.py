"""Optimizer metadata of model.pt, from the optimizer.pt next to it."""

from __future__ import annotations

from mmldlm.checkpoints.formats.adam_state import group_names
from mmldlm.checkpoints.formats.base import OpenedCheckpoint
from mmldlm.checkpoints.formats.deepspeed_state import add_deepspeed_state
from mmldlm.checkpoints.formats.optimizer_metadata import (
    Group,
    OptimizerMetadata,
    applied_steps,
    configured_dtype,
    default_counters,
    default_scaler,
    group_settings,
    to_plain_value,
)


def read_optimizer_metadata(opened: OpenedCheckpoint) -> OptimizerMetadata:
    """See CheckpointFormat.read_optimizer_metadata."""
    source = opened.weights
    file = source.files[1]
    state = file.load_dict()
    names = state.get("param_names")
    owners = iter(source.resolve_tied(group_names(file, names), file.path))
    names_of = [[next(owners) for _ in group] for group in names or []]
    tables = state.get("param_groups")
    tables = (
        tables
        if isinstance(tables, list) and len(tables) == len(names_of)
        else [{} for _ in names_of]
    )
    groups = [
        Group(names, settings) for names, settings in zip(names_of, group_settings(file, tables))
    ]
    first = next(iter((state.get("state") or {}).values()), {})
    steps = (
        float(to_plain_value(file, first["step"])) if "step" in first else applied_steps(opened)
    )
    counters = default_counters(opened, steps)
    metadata = OptimizerMetadata(
        groups, steps, configured_dtype(opened), counters, default_scaler()
    )
    return add_deepspeed_state(metadata, file.path.parent)
