"""The accumulated gradient and the AdamW group of every piece of weight that a rank holds, under every engine."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mmldlm.engines.base import Engine
from mmldlm.engines.deepspeed.engine import DeepSpeedEngine
from mmldlm.engines.parameter_shards import ParameterShard


def gradient_fragments(engine: Engine) -> list[tuple[ParameterShard, Tensor | None]]:
    """Engine.parameter_shards(), each with its gradient: [count], summed over ranks and micro-batches, not clipped.

    Only between `grad_norm` and `apply` or `discard`. Views wherever the engine keeps the elements together. None
    where no gradient came at all; ZeRO-1 to 3 keep zeros there. Where several ranks hold the same fragments
    (Engine.saves_shards), each of them gets the same values. No collective, no host sync.
    """
    fragments = engine.parameter_shards()
    if not isinstance(engine, DeepSpeedEngine) or engine.stage == 0:
        return [(fragment, _of(fragment, fragment.owner.grad)) for fragment in fragments]
    flats = _zero_gradients(engine._optimizer, engine.stage)
    return [(fragment, flats[id(fragment.owner)].cut(fragment.offset, fragment.count)) for fragment in fragments]


def _of(fragment: ParameterShard, gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else fragment.of(gradient)


class _ConcatView:
    """Tensors that stand one after the other for one flat tensor."""

    def __init__(self, pieces: list[Tensor]):
        self.pieces = [piece.detach().reshape(-1) for piece in pieces]
        self.starts = [0, *accumulate(piece.numel() for piece in self.pieces)]

    def cut(self, offset: int, count: int) -> Tensor:
        """Elements [offset, offset + count); a view when one piece holds them all."""
        found, end = [], offset + count
        assert end <= self.starts[-1], "DeepSpeed's gradients do not cover its masters"
        place = bisect_right(self.starts, offset) - 1
        while not found or self.starts[place] < end:
            start = self.starts[place]
            found.append(self.pieces[place][max(offset - start, 0) : end - start])
            place += 1
        return found[0] if len(found) == 1 else torch.cat(found)


def _zero_gradients(optimizer: Any, stage: int) -> dict[int, _ConcatView]:
    """id of each flat master -> its gradients, in the same layout (DeepSpeed 0.19.8)."""
    if stage == 3:
        flats, offloaded = optimizer.fp32_partitioned_groups_flat, optimizer.offload_optimizer
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):
        flats, offloaded = optimizer.single_partition_of_fp32_groups, optimizer.cpu_offload
    else:
        flats, grads = optimizer.fp32_groups_flat_partition, optimizer.fp32_groups_gradient_flat_partition
        return {id(flat): _ConcatView([grad]) for flat, grad in zip(flats, grads, strict=True)}
    pieces = [[flat.grad] if offloaded else optimizer.averaged_gradients[i] for i, flat in enumerate(flats)]
    return {id(flat): _ConcatView(parts) for flat, parts in zip(flats, pieces, strict=True)}


def optimizer_groups(engine: Engine) -> dict[Tensor, dict[str, Any]]:
    """The AdamW group (lr, betas, eps, weight_decay) of every owner of fragments."""
    optimizer = engine._optimizer if isinstance(engine, DeepSpeedEngine) else engine.optimizer
    if isinstance(engine, DeepSpeedEngine) and engine.stage == 3:
        group_of, groups = optimizer.sub_group_to_group_id, optimizer.optimizer.param_groups
        return {flat: groups[group_of[i]] for i, flat in enumerate(optimizer.fp32_partitioned_groups_flat)}
    inner = optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer
    return {owner: group for group in inner.param_groups for owner in group["params"]}
