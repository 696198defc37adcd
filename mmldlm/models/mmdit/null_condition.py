"""Replace dropped conditions with learned null embeddings."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_null_condition(
    x: Tensor, null: Tensor, is_null: Tensor, rows: Tensor | None = None
) -> Tensor:
    """x with the null embedding in place of some samples' values, in the wider dtype of both (with
    `rows` in x's).

    Args:
        x: values of samples [B, ...]; with `rows` [N, H].
        null: embedding of a condition that is not given, broadcast to a sample's values.
        is_null: samples without a condition. [B] bool
        rows: the one row of each sample that is replaced. [B]
    """
    mask = is_null.view(-1, *(1,) * (x.dim() - 1))
    if rows is None:
        return torch.where(mask, null, x)
    return x.index_copy(0, rows, torch.where(mask, null.to(x.dtype), x.index_select(0, rows)))
