"""Copy a checkpoint's state off the device, so that training continues while it is written."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from mmldlm.engines.parameter_shards import is_sharded


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
            torch.cuda.synchronize()  # the copies are asynchronous
        return copied

    def _copy(self, value: Any) -> Any:
        if is_sharded(value):
            # Not DTensor.from_local: it would move the part back to the mesh's device. This is the
            # protocol of tensor subclasses (torch.utils._python_dispatch).
            names, context = value.detach().__tensor_flatten__()
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
        # numbers, names, torch.Size, DeepSpeed's settings: a training step does not change them
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
