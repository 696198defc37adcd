"""Token embedding whose gradient is summed in fp32 on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, ids):
        ctx.save_for_backward(ids)
        ctx.num_embeddings = len(weight)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        table = grad.new_zeros(ctx.num_embeddings, grad.shape[1])
        if grad.dtype in (torch.float32, torch.float64):
            return table.index_add_(0, ids, grad), None
        # Summed in fp32: added one by one in bf16, the many rows of [MASK] would each be rounded.
        unique_ids, inverse = ids.unique(return_inverse=True)
        sums = torch.zeros(len(unique_ids), grad.shape[1], device=grad.device).index_add_(
            0, inverse, grad.float()
        )
        return table.index_copy_(0, unique_ids, sums.to(grad.dtype)), None


def embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """F.embedding of ids [N]: weight [V, H] -> [N, H]."""
    if weight.device.type != "cpu":
        return F.embedding(ids, weight)  # elsewhere additions would race
    return _Embedding.apply(weight, ids)
