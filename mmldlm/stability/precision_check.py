"""Do config, engine, launcher and autocast mean the same precision? Asked once, when the engine stands."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from mmldlm.config.schema import Config
from mmldlm.engines.base import Engine, compute_dtype
from mmldlm.errors import UserError

# What Accelerate's launcher tells its ranks; `no` is fp32.
PRECISION_VAR = "ACCELERATE_MIXED_PRECISION"
ACCELERATE_NAMES = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}


def check_precision(engine: Engine, config: Config) -> None:
    """Every rank looks at its own process and engine; all leave together. Collective.

    Raises:
        UserError: on every rank, when something computes, keeps or reduces in another dtype than the config says.
    """
    faults = precision_faults(engine, config, os.environ)
    if engine.all_agree(not faults):
        return
    raise UserError(
        f"training.dtype={config.training.dtype} everywhere, fp32 masters, accumulation and reduction",
        "; ".join(faults) or "another rank differs (its message says how)",
        "set precision in training.dtype alone",
    )


def precision_faults(engine: Engine, config: Config, environment: Mapping[str, str]) -> list[str]:
    """What of this rank disagrees with training.dtype, one sentence each."""
    name, faults = config.training.dtype, []
    told = environment.get(PRECISION_VAR)
    if told is not None and ACCELERATE_NAMES.get(told, told) != name:
        faults.append(f"the launcher says {PRECISION_VAR}={told}")
    if torch.get_default_dtype() != torch.float32:
        faults.append(f"torch's default dtype is {torch.get_default_dtype()}")
    if torch.is_autocast_enabled(engine.device.type):
        faults.append(f"autocast to {torch.get_autocast_dtype(engine.device.type)} is on around the whole program")
    if name == "bf16" and engine.device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        faults.append(f"{torch.cuda.get_device_name(engine.device)} has no bf16 (use fp16)")
    masters = {fragment.owner.dtype for fragment in engine.parameter_shards() if fragment.count} - {torch.float32}
    if masters:
        faults.append(f"master weights in {', '.join(map(str, masters))}")
    low = compute_dtype(name)
    kept = {parameter.dtype for parameter in engine.model.parameters()} - {torch.float32, low}
    if kept:
        faults.append(f"weights in {', '.join(map(str, kept))}")
    reducing = getattr(getattr(engine, "_engine", None), "communication_data_type", torch.float32)
    if low != torch.float32 and reducing != torch.float32:
        faults.append(f"DeepSpeed reduces gradients in {reducing}")
    return faults
