"""Check weights and optimizer state for non-finite values, periodically and before each
checkpoint.
"""

from __future__ import annotations

import torch

from mmldlm.engines.base import Engine
from mmldlm.engines.ema import WeightAverage
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
    if engine.world_size == 1:
        return local
    gathered: list[dict[str, int] | None] = [None] * engine.world_size
    torch.distributed.all_gather_object(gathered, local)
    total: dict[str, int] = {}
    for part in gathered:
        for name, count in (part or {}).items():
            total[name] = total.get(name, 0) + count
    return total
