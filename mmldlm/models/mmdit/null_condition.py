"""Learned nulls in the place of a condition that is not given, in a third of torch.where's operations."""

from __future__ import annotations

import torch
from torch import Tensor


class _Nulled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, null, is_null, at):
        ctx.null_shape, ctx.null_dtype, ctx.dtype = null.shape, null.dtype, x.dtype
        mask = is_null.view(-1, *(1,) * (x.dim() - 1))
        ctx.save_for_backward(mask, at)
        if at is None:
            return torch.where(mask, null, x)
        return x.index_copy(0, at, torch.where(mask, null.to(x.dtype), x.index_select(0, at)))

    @staticmethod
    def backward(ctx, grad):
        mask, at = ctx.saved_tensors
        of_samples = grad if at is None else grad.index_select(0, at)
        given = of_samples.masked_fill(mask, 0)
        # Of the null: what the samples with it have more.
        of_null = (of_samples - given).sum_to_size(ctx.null_shape).to(ctx.null_dtype)
        return given.to(ctx.dtype) if at is None else grad.index_copy(0, at, given), of_null, None, None


def apply_null_condition(x: Tensor, null: Tensor, is_null: Tensor, at: Tensor | None = None) -> Tensor:
    """x with a null in the place of some samples' values, in the wider dtype of both (with `at` in x's).

    Args:
        x: [B, ...] values of samples; with `at` [N, H] rows.
        null: [...] what stands for "not given" (broadcast).
        is_null: [B] bool. at: [B] the one row of each sample that is replaced.
    """
    return _Nulled.apply(x, null, is_null, at)
