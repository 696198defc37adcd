"""Where DeepSpeed's ZeRO optimizers keep which element of which parameter, read off the live objects (0.19.8).

ZeRO-1 and 2 (DeepSpeedZeroOptimizer, BF16_Optimizer): a group's parameters stand one after the other in a flat tensor,
padded, cut into equal slices, one a rank. ZeRO-3: every parameter gives an equal share, padded at its own end, to
every rank; the shares of a sub-group stand one after the other.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmldlm.engines.parameter_shards import ParameterShard


def master_shards(optimizer: Any, names: dict[Tensor, str], stage: int, rank: int) -> list[ParameterShard]:
    """Fragments of the fp32 masters that this rank updates.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer. names: parameter -> name (DeepSpeedEngine.param_names).
    """
    if stage == 3:
        return _shares(optimizer, names, rank)
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        # Under round_robin_gradients the flat order is another than the optimizer's.
        groups, flats = optimizer.round_robin_bit16_groups, optimizer.single_partition_of_fp32_groups
        offsets = [[offset for offset in group] for group in optimizer.round_robin_bit16_offsets]
    else:
        groups, flats = optimizer.bf16_groups, optimizer.fp32_groups_flat_partition
        offsets = [_cumulative_sizes([p.numel() for p in group]) for group in groups]
    found = []
    for group, flat, starts in zip(groups, flats, offsets, strict=True):
        low = rank * flat.numel()
        for parameter, start in zip(group, starts, strict=True):
            first = max(start, low)
            count = min(start + parameter.numel(), low + flat.numel()) - first
            if count > 0:
                shape = tuple(parameter.shape)
                found.append(ParameterShard(names[parameter], shape, first - start, count, flat, first - low))
    return found


def _shares(optimizer: Any, names: dict[Tensor, str], rank: int) -> list[ParameterShard]:
    found = []
    for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        offset = 0
        for parameter in group:
            share = parameter.ds_tensor.ds_numel
            found.append(local_partition(names[parameter], parameter, flat, offset, rank))
            offset += share
        assert offset == flat.numel(), "a ZeRO-3 sub-group is not the sum of its shares"
    return [fragment for fragment in found if fragment.count]


def local_partition(name: str, parameter: Tensor, owner: Tensor, offset: int, rank: int) -> ParameterShard:
    """This rank's share of a ZeRO-3 parameter, standing in owner from offset on."""
    share = parameter.ds_tensor.ds_numel
    count = max(0, min(share, parameter.ds_numel - rank * share))
    return ParameterShard(name, tuple(parameter.ds_shape), rank * share if count else 0, count, owner, offset)


def copy_masters_to_model(optimizer: Any, stage: int) -> None:
    """Round the masters into the weights that the model computes with, on all ranks. Collective."""
    if stage < 3:
        optimizer.update_lp_params()
        return
    # Small parameters stay gathered between steps: give them back, change the shares, gather them again.
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
