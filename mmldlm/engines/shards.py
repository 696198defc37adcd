"""The slice of each parameter that a rank holds. Engines read each other's checkpoints by these
slices. Also: pinned copies of such slices, for checkpoints that are written in the background.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class ParameterShard:
    """Elements [start, start + count) of a flattened parameter.

    Attributes:
        name: Name of the parameter.
        shape: Shape of the unsharded parameter.
        start: First element.
        count: Number of elements.
        owner: Tensor that the optimizer updates (a parameter, a shard of it, or a flat group of
            several).
        offset: Offset of the elements in the owner.
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


def is_sharded(value: Any) -> TypeGuard[DTensor]:
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


class PinnedSnapshot:
    """Copies every tensor in a tree of dicts, lists and tuples into host memory, which is reused
    by the next call.

    The memory is pinned for tensors on a GPU: only then does the copy run at the bus's speed.
    Sharded tensors stay sharded, with their local part on the host.
    """

    def __init__(self):
        self._buffers: list[Tensor] = []

    def __call__(self, tree: Any) -> Any:
        self._next = 0
        copied = self._copy(tree)
        if torch.cuda.is_available():
            # The copies are asynchronous.
            torch.cuda.synchronize()
        return copied

    def _copy(self, value: Any) -> Any:
        if is_sharded(value):
            # Not DTensor.from_local: it would move the part back to the mesh's device. This is the
            # protocol of tensor subclasses (torch.utils._python_dispatch).
            names, context = value.detach().__tensor_flatten__()  # type: ignore[attr-defined]
            inner = {name: getattr(value, name) for name in names} | {
                "_local_tensor": self._tensor(value.to_local())
            }
            return type(value).__tensor_unflatten__(inner, context, value.shape, value.stride())
        if isinstance(value, Tensor):
            return self._tensor(value)
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self._copy(item)) for key, item in value.items())
        if type(value) in (list, tuple):
            return type(value)(self._copy(item) for item in value)
        # Numbers, names, torch.Size, DeepSpeed's settings: a training step does not change them.
        return value

    def _tensor(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        slot, self._next = self._next, self._next + 1
        if slot == len(self._buffers):
            self._buffers.append(torch.empty(0))
        buffer = self._buffers[slot]
        if buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[slot] = buffer
        return buffer.copy_(tensor, non_blocking=True)
