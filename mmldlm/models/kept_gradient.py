"""Memory of vocabulary-sized gradients that is used again every step on a CPU.

There malloc takes blocks of this size from the kernel anew, page by zeroed page, each time: about as slow as a tenth of
the head's matrix products. A GPU's caching allocator keeps them anyway.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()


def gradient_memory(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised tensor of weight's shape; the one given out before, if nobody holds it any more."""
    if weight.device.type != "cpu" or not weight.is_leaf:
        return torch.empty(weight.shape, dtype=dtype, device=weight.device)
    buffer = _kept.get(weight)
    if buffer is None or buffer.shape != weight.shape or buffer.dtype != dtype or _num_holders(buffer) > 1:
        buffer = torch.empty(weight.shape, dtype=dtype)
        _kept[weight] = buffer
    return buffer.view(weight.shape)


def _num_holders(tensor: Tensor) -> int:
    """Tensors that share its memory, itself included (the two handles of this question taken off)."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, ids):
        ctx.save_for_backward(weight, ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, grad):
        weight, ids = ctx.saved_tensors
        return gradient_memory(weight, grad.dtype).zero_().index_add_(0, ids, grad), None


def embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """F.embedding of ids [N]: weight [V, H] -> [N, H]."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.float64):
        return F.embedding(ids, weight)  # elsewhere additions would race, or round one by one
    return _Embedding.apply(weight, ids)
