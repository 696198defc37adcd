"""Which elements of which parameter DeepSpeed's ZeRO optimizers hold, read from the live objects
(0.19.8).

ZeRO-1 and 2 (DeepSpeedZeroOptimizer, BF16_Optimizer): a group's parameters are concatenated into a
flat tensor, padded and split into equal slices, one per rank. ZeRO-3: every parameter is split
into equal partitions, padded at its own end, one per rank; the partitions of a sub-group are
concatenated.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmldlm.engines.parameter_shards import ParameterShard


def master_shards(
    optimizer: Any, names: dict[Tensor, str], stage: int, rank: int
) -> list[ParameterShard]:
    """Shards of the fp32 masters that this rank updates.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer.
        names: parameter -> name (DeepSpeedEngine.param_names).
        stage: ZeRO stage, 1 to 3.
        rank: of this process.
    """
    if stage == 3:
        return _stage3_shards(optimizer, names, rank)
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        # Under round_robin_gradients the flat order differs from the optimizer's.
        groups, flats = (
            optimizer.round_robin_bit16_groups,
            optimizer.single_partition_of_fp32_groups,
        )
        offsets = [[offset for offset in group] for group in optimizer.round_robin_bit16_offsets]
    else:
        groups, flats = optimizer.bf16_groups, optimizer.fp32_groups_flat_partition
        offsets = [_cumulative_sizes([p.numel() for p in group]) for group in groups]
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
    name: str, parameter: Tensor, owner: Tensor, offset: int, rank: int
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


def _cumulative_sizes(sizes: list[int]) -> list[int]:
    sums = [0]
    for size in sizes[:-1]:
        sums.append(sums[-1] + size)
    return sums
