"""Which elements of which parameter a rank holds: every engine reads the others' checkpoints by
them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class ParameterShard:
    """Elements [start, start + count) of a flattened parameter.

    Attributes:
        name: of the parameter.
        shape: of the unsharded parameter.
        start: first element.
        count: number of elements.
        owner: the tensor that the optimizer updates (a parameter, a shard of it, or a flat group
            of many).
        offset: of the elements in the owner.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    count: int
    owner: Tensor
    offset: int = 0

    def slice_of(self, tensor: Tensor) -> Tensor:
        """The elements as a flat view of the owner, or of a tensor with its layout (a moment, a
        gradient). [count]
        """
        return local_shard(tensor).detach().view(-1)[self.offset : self.offset + self.count]


def is_sharded(value: Any) -> bool:
    """Whether this is a DTensor.

    Its module is not imported for that: engines without it start sooner.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def full_shard(name: str, parameter: Tensor) -> ParameterShard:
    """The shard of a parameter that this rank holds completely."""
    return ParameterShard(name, tuple(parameter.shape), 0, parameter.numel(), parameter)


def dim0_shard(name: str, parameter: DTensor) -> ParameterShard:
    """This rank's rows of a parameter that FSDP2 sharded along dimension 0."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    count, row = parameter.to_local().numel(), parameter.numel() // max(parameter.shape[0], 1)
    assert tuple(shape[1:]) == tuple(parameter.shape[1:]), (
        f"{name} is not sharded along dimension 0"
    )
    return ParameterShard(
        name, tuple(parameter.shape), offset[0] * row if count else 0, count, parameter
    )
