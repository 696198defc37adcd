"""Are the weights and the optimizer's state finite? Asked every audit_every steps and before every checkpoint."""

from __future__ import annotations

import torch

from mmldlm.engines.base import Engine
from mmldlm.engines.ema import WeightAverage

STATES = ("exp_avg", "exp_avg_sq")


def nonfinite_tensors(engine: Engine, average: WeightAverage | None = None) -> dict[str, int]:
    """Names of parameters ("name", "name.exp_avg", "name.ema") -> non-finite elements that this rank holds.

    One host sync when all is well, whatever the number of parameters. No collective.
    """
    fragments = [fragment for fragment in engine.parameter_shards() if fragment.count]
    states = engine.optimizer_state()
    views = [(fragment.name, fragment.slice_of(fragment.owner)) for fragment in fragments]
    for fragment in fragments:
        state = states.get(fragment.owner) or {}
        views += [(f"{fragment.name}.{what}", fragment.slice_of(state[what])) for what in STATES if what in state]
    views += [(frozen.name, frozen.slice_of(frozen.owner)) for frozen in engine.frozen_shards() if frozen.count]
    if average is not None:
        views += [(f"{name}.ema", value) for name, value in average.named_values()]
    if not views:
        return {}
    # The sum of a tensor is non-finite where an element is (or where it overflows fp64, which a weight cannot).
    sums = torch.stack([view.sum(dtype=torch.float64).to(engine.device) for _, view in views])
    if bool(torch.isfinite(sums).all()):
        return {}
    bad = [(name, int((~torch.isfinite(view)).sum())) for name, view in views]
    return {name: count for name, count in bad if count}


def audit_on_all_ranks(engine: Engine, average: WeightAverage | None = None) -> dict[str, int]:
    """nonfinite_tensors over all ranks, the same dict on each. Collective."""
    own = nonfinite_tensors(engine, average)
    if engine.all_agree(not own):
        return {}
    if engine.world_size == 1:
        return own
    gathered: list[dict[str, int] | None] = [None] * engine.world_size
    torch.distributed.all_gather_object(gathered, own)
    total: dict[str, int] = {}
    for part in gathered:
        for name, count in (part or {}).items():
            total[name] = total.get(name, 0) + count
    return total
