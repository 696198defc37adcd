"""Check once, after the engine is built, that config, engine, launcher and autocast use the same
precision.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from mmldlm.config.schema import Config
from mmldlm.engines.base import Engine, compute_dtype
from mmldlm.errors import UserError

# Set by Accelerate's launcher for its ranks; `no` is fp32.
PRECISION_VAR = "ACCELERATE_MIXED_PRECISION"
ACCELERATE_NAMES = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}


def check_precision(engine: Engine, config: Config) -> None:
    """Check this rank's process and engine; all ranks raise together. Collective.

    Raises:
        UserError: on every rank, if one computes, stores or reduces in another dtype than
            configured.
    """
    problems = precision_problems(engine, config, os.environ)
    if engine.all_agree(not problems):
        return
    raise UserError(
        f"training.dtype={config.training.dtype} everywhere, fp32 masters, accumulation and"
        " reduction",
        "; ".join(problems) or "a difference on another rank (see its message)",
        "set precision in training.dtype alone",
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
