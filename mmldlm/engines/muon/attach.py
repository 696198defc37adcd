"""Give Muon the shards of an engine."""

from __future__ import annotations

from mmldlm.engines.base import Engine
from mmldlm.engines.muon.optimizer import MuonAdamW
from mmldlm.engines.parameter_plan import ParameterPlan


def muon_of(engine: Engine) -> MuonAdamW | None:
    """The engine's optimizer if it is Muon. DeepSpeed wraps it in its own from ZeRO-1 on."""
    outer = getattr(engine, "zero_optimizer", None) or engine.optimizer
    inner = getattr(outer, "optimizer", outer)
    return inner if isinstance(inner, MuonAdamW) else None


def attach_muon(engine: Engine, plan: ParameterPlan) -> None:
    """Attach the optimizer of a new engine to the shards that it updates. Collective."""
    owners = [owner for owner, group in engine.optimizer_groups().items() if group["muon"]]
    muon_of(engine).attach(
        [[owner] for owner in owners] if engine.steps_one_by_one else [owners],
        engine.parameter_shards(),
        plan.matrices,
        engine.device,
        engine.process_group(),
    )
