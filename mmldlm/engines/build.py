"""Build the engine that engine.kind names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mmldlm.config.schema import Config
from mmldlm.engines.deepspeed_config import merged_config
from mmldlm.errors import UserError

if TYPE_CHECKING:
    # preflight calls check_engine, and starts without torch.
    from torch import nn

    from mmldlm.engines.base import Engine
    from mmldlm.engines.parameter_plan import ParameterPlan


def build_engine(model: nn.Module, config: Config, plan: ParameterPlan) -> Engine:
    """Freeze what the plan freezes and wrap the model in the engine that config.engine.kind names.

    Collective.
    """
    plan.set_requires_grad(model)
    kind = config.engine.kind
    engine_class: Callable[[nn.Module, Config, ParameterPlan], Engine]
    if kind in ("single", "ddp"):
        from mmldlm.engines.torch_engines import DdpEngine, SingleEngine

        engine_class = SingleEngine if kind == "single" else DdpEngine
    elif kind == "fsdp":
        from mmldlm.engines.fsdp import FsdpEngine

        engine_class = FsdpEngine
    else:
        from mmldlm.engines.deepspeed import DeepSpeedEngine

        engine_class = DeepSpeedEngine
    engine = engine_class(model, config, plan)
    if config.optimizer.kind == "muon":
        from mmldlm.engines.muon import attach_muon

        attach_muon(engine, plan)
    return engine


def check_engine(config: Config, world_size: int) -> None:
    """Check the engine's settings, without starting a rank.

    Raises:
        UserError: DeepSpeed settings that disagree or are for another engine, a world size that
            does not fit it.
    """
    engine = config.engine
    if engine.kind == "deepspeed":
        merged_config(config, world_size)
    elif engine.deepspeed_config is not None or engine.zero_stage is not None:
        raise UserError(
            "DeepSpeed settings only with engine.kind=deepspeed",
            f"engine.kind={engine.kind} with engine.deepspeed_config or engine.zero_stage",
            "drop them, or set engine.kind=deepspeed",
        )
    if engine.kind == "single" and world_size != 1:
        raise UserError(
            "one process for engine.kind=single",
            f"{world_size} processes",
            "set engine.kind=deepspeed, fsdp or ddp, or start one process",
        )
    if engine.kind != "fsdp" and engine.hsdp_replicas != 1:
        raise UserError(
            "engine.hsdp_replicas only with engine.kind=fsdp (HSDP)",
            f"engine.hsdp_replicas={engine.hsdp_replicas} with engine.kind={engine.kind}",
            "drop engine.hsdp_replicas, or set engine.kind=fsdp",
        )
    if engine.kind != "fsdp" and engine.shard_gradients:
        raise UserError(
            "engine.shard_gradients only with engine.kind=fsdp",
            f"engine.shard_gradients=true with engine.kind={engine.kind}",
            "drop engine.shard_gradients (ZeRO-2 and 3 always shard them), or set"
            " engine.kind=fsdp",
        )
    if world_size % engine.hsdp_replicas:
        raise UserError(
            "engine.hsdp_replicas that divides the number of ranks",
            f"engine.hsdp_replicas={engine.hsdp_replicas} with {world_size} rank(s)",
            "choose a divisor, e.g. the number of nodes",
        )
