"""The slices of weights, masters and gradients that DeepSpeed's ZeRO optimizers keep on a rank."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mmldlm.engines.shards import ParameterShard


def master_shards(
    optimizer: Any, names: dict[Tensor, str], stage: int, rank: int
) -> list[ParameterShard]:
    """Shards of the fp32 masters that this rank updates.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer.
        names: Parameter -> name (DeepSpeedEngine.param_names).
        stage: ZeRO stage, 1 to 3.
        rank: Rank of this process.
    """
    if stage == 3:
        return _stage3_shards(optimizer, names, rank)
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        # Under round_robin_gradients the flat order differs from the optimizer's.
        groups = optimizer.round_robin_bit16_groups
        flats = optimizer.single_partition_of_fp32_groups
        offsets = optimizer.round_robin_bit16_offsets
    else:
        groups, flats = optimizer.bf16_groups, optimizer.fp32_groups_flat_partition
        offsets = [[0, *accumulate(p.numel() for p in group)][:-1] for group in groups]
    shards = []
    for group, flat, starts in zip(groups, flats, offsets, strict=True):
        low = rank * flat.numel()
        for parameter, start in zip(group, starts, strict=True):
            first = max(start, low)
            count = min(start + parameter.numel(), low + flat.numel()) - first
            if count > 0:
                shape = tuple(parameter.shape)
                shards.append(
                    ParameterShard(
                        names[parameter], shape, first - start, count, flat, first - low
                    )
                )
    return shards


def _stage3_shards(optimizer: Any, names: dict[Tensor, str], rank: int) -> list[ParameterShard]:
    shards = []
    for group, flat in zip(
        optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True
    ):
        offset = 0
        for parameter in group:
            size = parameter.ds_tensor.ds_numel
            shards.append(local_partition(names[parameter], parameter, flat, offset, rank))
            offset += size
        assert offset == flat.numel(), "a ZeRO-3 sub-group is not the sum of its partitions"
    return [shard for shard in shards if shard.count]


def local_partition(
    name: str, parameter: Any, owner: Tensor, offset: int, rank: int
) -> ParameterShard:
    """This rank's partition of a ZeRO-3 parameter, at this offset in the owner."""
    size = parameter.ds_tensor.ds_numel
    count = max(0, min(size, parameter.ds_numel - rank * size))
    return ParameterShard(
        name, tuple(parameter.ds_shape), rank * size if count else 0, count, owner, offset
    )


def copy_masters_to_model(optimizer: Any, stage: int) -> None:
    """Round the masters into the weights that the model computes with, on all ranks.

    Collective.
    """
    if stage < 3:
        optimizer.update_lp_params()
        return
    # Small parameters stay gathered between steps: release them, change the partitions, gather
    # them again.
    optimizer._partition_all_parameters()
    for sub_group in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


class _ConcatView:
    """A flat tensor that is stored as consecutive pieces."""

    def __init__(self, pieces: list[Tensor]):
        self.pieces = [piece.detach().reshape(-1) for piece in pieces]
        self.starts = [0, *accumulate(piece.numel() for piece in self.pieces)]

    def slice(self, offset: int, count: int) -> Tensor:
        """Elements [offset, offset + count); a view if one piece holds them all."""
        parts: list[Tensor] = []
        end = offset + count
        assert end <= self.starts[-1], "DeepSpeed's gradients do not cover its masters"
        index = bisect_right(self.starts, offset) - 1
        while not parts or self.starts[index] < end:
            start = self.starts[index]
            parts.append(self.pieces[index][max(offset - start, 0) : end - start])
            index += 1
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def zero_gradients(optimizer: Any, stage: int) -> dict[int, _ConcatView]:
    """id of each flat master -> its gradients, in the same layout (DeepSpeed 0.19.8)."""
    if stage == 3:
        flats, is_offloaded = optimizer.fp32_partitioned_groups_flat, optimizer.offload_optimizer
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):
        flats, is_offloaded = optimizer.single_partition_of_fp32_groups, optimizer.cpu_offload
    else:
        flats = optimizer.fp32_groups_flat_partition
        grads = optimizer.fp32_groups_gradient_flat_partition
        return {id(flat): _ConcatView([grad]) for flat, grad in zip(flats, grads, strict=True)}
    pieces = [
        [flat.grad] if is_offloaded else optimizer.averaged_gradients[i]
        for i, flat in enumerate(flats)
    ]
    return {id(flat): _ConcatView(parts) for flat, parts in zip(flats, pieces, strict=True)}


def keep_until_reduced(optimizer: Any) -> None:
    """Keep the memory of a gradient that ZeRO-2 clears until its reduction is done.

    DeepSpeed reduces a gradient larger than a bucket where it lies, on a stream of its own, and
    clears it at once on ranks that own no part of it: the backward pass would write into memory
    that the reduction still reads and writes. Gradients in buckets, and those of a rank's own
    part, it keeps.

    Args:
        optimizer: DeepSpeedZeroOptimizer of stage 2.
    """
    if optimizer.reduction_stream is None or not optimizer.overlap_comm:
        return
    clear = optimizer.clear_grad_attribute

    def clear_when_reduced(parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.numel() > optimizer.reduce_bucket_size:
            parameter.grad.record_stream(optimizer.reduction_stream)
        clear(parameter)

    optimizer.clear_grad_attribute = clear_when_reduced
