"""Memory of vocabulary-sized tensors that is used again every step on a CPU.

There malloc takes blocks of this size from the kernel anew, page by zeroed page, each time: about as slow as a tenth of
the head's matrix products. A GPU's caching allocator keeps them anyway.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()


def reusable_buffer(weight: Tensor, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised tensor; of the same use for the same weight in the memory given out before, if nobody holds it."""
    if weight.device.type != "cpu" or not weight.is_leaf:
        return torch.empty(shape, dtype=dtype, device=weight.device)
    buffers, size = _kept.setdefault(weight, {}), math.prod(shape)
    buffer = buffers.get(use)
    if buffer is None or buffer.numel() < size or buffer.dtype != dtype or _num_holders(buffer) > 1:
        buffers[use] = buffer = torch.empty(size, dtype=dtype)
    return buffer[:size].view(shape)


def gradient_memory(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised tensor of weight's shape."""
    return reusable_buffer(weight, f"gradient in {dtype}", weight.shape, dtype)


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
        found = gradient_memory(weight, grad.dtype).zero_()
        if grad.dtype in (torch.float32, torch.float64):
            return found.index_add_(0, ids, grad), None
        # Summed in fp32: added one by one in bf16, the many rows of [MASK] would each be rounded.
        places, which = ids.unique(return_inverse=True)
        sums = torch.zeros(len(places), grad.shape[1], device=grad.device).index_add_(0, which, grad.float())
        return found.index_copy_(0, places, sums.to(grad.dtype)), None


def embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """F.embedding of ids [N]: weight [V, H] -> [N, H]."""
    if weight.device.type != "cpu":
        return F.embedding(ids, weight)  # elsewhere additions would race
    return _Embedding.apply(weight, ids)
