"""The accumulated gradient of every parameter shard of a rank, under every engine."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mmldlm.engines.base import Engine
from mmldlm.engines.deepspeed.engine import DeepSpeedEngine
from mmldlm.engines.parameter_shards import ParameterShard


def gradient_shards(engine: Engine) -> list[tuple[ParameterShard, Tensor | None]]:
    """Engine.parameter_shards(), each with its gradient [count], summed over ranks and
    micro-batches, not clipped.

    Valid between `grad_norm` and `step` or `discard_gradients` only. Gradients are views if the
    engine stores the elements together, and None for parameters without a gradient (ZeRO-1 to 3
    store zeros there). Ranks that hold the same shards (Engine.saves_shards) get the same values.
    No collective, no host sync.
    """
    shards = engine.parameter_shards()
    if not isinstance(engine, DeepSpeedEngine) or engine.stage == 0:
        return [(shard, _slice_of(shard, shard.owner.grad)) for shard in shards]
    flat_gradients = _zero_gradients(engine.zero_optimizer, engine.stage)
    return [
        (shard, flat_gradients[id(shard.owner)].slice(shard.offset, shard.count))
        for shard in shards
    ]


def _slice_of(shard: ParameterShard, gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else shard.slice_of(gradient)


class _ConcatView:
    """A flat tensor that is stored as consecutive pieces."""

    def __init__(self, pieces: list[Tensor]):
        self.pieces = [piece.detach().reshape(-1) for piece in pieces]
        self.starts = [0, *accumulate(piece.numel() for piece in self.pieces)]

    def slice(self, offset: int, count: int) -> Tensor:
        """Elements [offset, offset + count); a view if one piece holds them all."""
        parts, end = [], offset + count
        assert end <= self.starts[-1], "DeepSpeed's gradients do not cover its masters"
        index = bisect_right(self.starts, offset) - 1
        while not parts or self.starts[index] < end:
            start = self.starts[index]
            parts.append(self.pieces[index][max(offset - start, 0) : end - start])
            index += 1
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _zero_gradients(optimizer: Any, stage: int) -> dict[int, _ConcatView]:
    """id of each flat master -> its gradients, in the same layout (DeepSpeed 0.19.8)."""
    if stage == 3:
        flats, is_offloaded = optimizer.fp32_partitioned_groups_flat, optimizer.offload_optimizer
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):
        flats, is_offloaded = optimizer.single_partition_of_fp32_groups, optimizer.cpu_offload
    else:
        flats, grads = (
            optimizer.fp32_groups_flat_partition,
            optimizer.fp32_groups_gradient_flat_partition,
        )
        return {id(flat): _ConcatView([grad]) for flat, grad in zip(flats, grads, strict=True)}
    pieces = [
        [flat.grad] if is_offloaded else optimizer.averaged_gradients[i]
        for i, flat in enumerate(flats)
    ]
    return {id(flat): _ConcatView(parts) for flat, parts in zip(flats, pieces, strict=True)}
