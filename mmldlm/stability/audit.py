"""Checks of weights and optimizer state: non-finite values, and parameters that lost precision."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping

import torch

from mmldlm.config.schema import Config
from mmldlm.engines.base import Engine, compute_dtype
from mmldlm.engines.ema import WeightAverage
from mmldlm.errors import UserError
from mmldlm.utils.moments import MOMENTS


def nonfinite_tensors(engine: Engine, average: WeightAverage | None = None) -> dict[str, int]:
    """Return name ("name", "name.exp_avg", "name.ema") -> number of non-finite elements on this
    rank.

    One host sync if all values are finite, for any number of parameters. Not collective.
    """
    fragments = [fragment for fragment in engine.parameter_shards() if fragment.count]
    states = engine.optimizer_state()
    views = [(fragment.name, fragment.slice_of(fragment.owner)) for fragment in fragments]
    for fragment in fragments:
        state = states.get(fragment.owner) or {}
        views += [
            (f"{fragment.name}.{key}", fragment.slice_of(state[key]))
            for key in MOMENTS
            if key in state
        ]
    views += [
        (frozen.name, frozen.slice_of(frozen.owner))
        for frozen in engine.frozen_shards()
        if frozen.count
    ]
    if average is not None:
        views += [(f"{name}.ema", value) for name, value in average.named_values()]
    if not views:
        return {}
    # A sum is non-finite if an element is; weights cannot overflow fp64.
    sums = torch.stack([view.sum(dtype=torch.float64).to(engine.device) for _, view in views])
    if bool(torch.isfinite(sums).all()):
        return {}
    bad = [(name, int((~torch.isfinite(view)).sum())) for name, view in views]
    return {name: count for name, count in bad if count}


def audit_on_all_ranks(engine: Engine, average: WeightAverage | None = None) -> dict[str, int]:
    """Return the sums of `nonfinite_tensors` over all ranks, equal on each. Collective."""
    local = nonfinite_tensors(engine, average)
    if engine.all_agree(not local):
        return {}
    total: Counter[str] = Counter()
    for counts in engine.gather_objects(local):
        total.update(counts)
    return dict(total)


# Set by Accelerate's launcher for its ranks; `no` is fp32.
PRECISION_VAR = "ACCELERATE_MIXED_PRECISION"
ACCELERATE_NAMES = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}


def check_precision(engine: Engine, config: Config) -> None:
    """Check this rank's process and engine; all ranks raise together. Collective.

    Raises:
        UserError: on every rank, if one computes, stores or reduces in another dtype than
            configured.
    """

    def mismatch(difference: str) -> UserError:
        return UserError(
            f"training.dtype={config.training.dtype} everywhere, fp32 masters, accumulation and"
            " reduction",
            difference,
            "set precision in training.dtype alone",
        )

    problems = precision_problems(engine, config, os.environ)
    engine.raise_together(
        mismatch("; ".join(problems)) if problems else None,
        lambda local_error: (
            local_error or mismatch("a difference on another rank (see its message)")
        ),
    )


def precision_problems(
    engine: Engine, config: Config, environment: Mapping[str, str]
) -> list[str]:
    """Return what differs from training.dtype on this rank, one message each."""
    name, problems = config.training.dtype, []
    launcher = environment.get(PRECISION_VAR)
    if launcher is not None and ACCELERATE_NAMES.get(launcher, launcher) != name:
        problems.append(f"the launcher sets {PRECISION_VAR}={launcher}")
    if torch.get_default_dtype() != torch.float32:
        problems.append(f"torch's default dtype is {torch.get_default_dtype()}")
    if torch.is_autocast_enabled(engine.device.type):
        problems.append(
            f"autocast to {torch.get_autocast_dtype(engine.device.type)} is on for the entire"
            " program"
        )
    if (
        name == "bf16"
        and engine.device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        problems.append(f"{torch.cuda.get_device_name(engine.device)} has no bf16 (use fp16)")
    masters = {
        fragment.owner.dtype for fragment in engine.parameter_shards() if fragment.count
    } - {torch.float32}
    if masters:
        problems.append(f"master weights in {', '.join(map(str, masters))}")
    low = compute_dtype(name)
    weights = {parameter.dtype for parameter in engine.model.parameters()} - {torch.float32, low}
    if weights:
        problems.append(f"weights in {', '.join(map(str, weights))}")
    reducing = getattr(getattr(engine, "_engine", None), "communication_data_type", torch.float32)
    if low != torch.float32 and reducing != torch.float32:
        problems.append(f"DeepSpeed reduces gradients in {reducing}")
    return problems
