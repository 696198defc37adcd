"""Padding-free rows of a batch, sample by sample (prefix, then text), and attention over them.

Norms, projections and the MLP run on real rows alone. Attention sees a rectangle [B, W], ragged
rows (a GPU kernel), or one sample after the other (a CPU with much padding).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.models.layers import cache_tensor, rotary_table, without_autocast
from mmldlm.models.packing import RECTANGLE_FILL, attend_ragged, attention_dtype, has_varlen


class Layout(NamedTuple):
    """N text rows of B samples, and P prefix rows of each; R = N + B * P rows, W = P + S positions
    per sample.

    Attributes:
        batch: B.
        width: W.
        sample: Sample of each row. [R] int64
        text_rows: Row of each text token; None: all rows are text. [N] int64
        order: Index of each row into (prefix rows, then text rows); None without a prefix. [R]
            int64
        rotation: Rotary cos and sin of each row; a prefix row does not turn. [R, 1, head_dim / 2,
            2]
        slots: Position in B * W of each row; None: the rows are the rectangle, or no rectangle is
            used. [R] int64
        key_mask: Keys that may be attended to in the rectangle; None: all. [B, 1, 1, W] bool
        lengths: Rows per sample, where attention runs sample by sample.
        starts: First row of each sample, where attention runs over ragged rows. [B + 1] int32
    """

    batch: int
    width: int
    sample: Tensor
    text_rows: Tensor | None
    order: Tensor | None
    rotation: Tensor
    slots: Tensor | None = None
    key_mask: Tensor | None = None
    lengths: tuple[int, ...] | None = None
    starts: Tensor | None = None


def lay_out(
    positions: Tensor | None,
    mask: Tensor | None,
    shape: tuple[int, int],
    prefix: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    may_loop: bool = True,
) -> Layout:
    """Lay out a batch.

    Args:
        positions: Ascending indices into B * S of the text rows, at least one per sample; None:
            all. [N] int64
        mask: Text keys that may be attended to, where positions is None; None: all. [B, S] bool
        shape: B and S.
        prefix: P.
        head_dim: Width of a query.
        dtype: Dtype in which attention computes.
        device: Device of the rows.
        may_loop: Whether attention may run sample by sample, which reads the lengths on the host.
    """
    batch, length = shape
    width = prefix + length
    if positions is None:
        key_mask = None if mask is None else F.pad(mask, (prefix, 0), value=True)[:, None, None]
        slots = torch.arange(batch * width, device=device)
        layout = _rows(slots, shape, prefix, head_dim, device)
        return layout._replace(key_mask=key_mask)
    slots = positions + prefix * (positions // length + 1)
    if prefix:
        starts = torch.arange(0, batch * width, width, device=device)[:, None]
        slots = (
            torch.cat([(starts + torch.arange(prefix, device=device)).flatten(), slots])
            .sort()
            .values
        )
    layout = _rows(slots, shape, prefix, head_dim, device)
    filled = len(slots) / (batch * width)
    if device.type == "cpu" and may_loop and filled < RECTANGLE_FILL:
        return layout._replace(
            lengths=tuple(torch.bincount(layout.sample, minlength=batch).tolist())
        )
    if has_varlen(dtype, head_dim, device):
        edges = torch.arange(0, (batch + 1) * width, width, device=device)
        return layout._replace(starts=torch.searchsorted(slots, edges).int())
    key_mask = torch.zeros(batch * width, dtype=torch.bool, device=device).index_fill_(
        0, slots, True
    )
    return layout._replace(slots=slots, key_mask=key_mask.view(batch, 1, 1, width))


def _rows(
    slots: Tensor, shape: tuple[int, int], prefix: int, head_dim: int, device: torch.device
) -> Layout:
    """The layout of rows at these positions in B * W, [R]."""
    batch, length = shape
    width = prefix + length
    sample, offset = slots // width, slots % width
    rotation = rotations(length, prefix, head_dim, device).index_select(0, offset)
    if not prefix:
        return Layout(batch, width, sample, None, None, rotation)
    # Stable: the order of prefix rows and of text rows stays that of the samples.
    where = (offset >= prefix).to(torch.int8).argsort(stable=True)
    order = torch.empty_like(where).index_copy_(0, where, torch.arange(len(where), device=device))
    return Layout(batch, width, sample, where[batch * prefix :], order, rotation)


def row_positions(
    positions: Tensor | None,
    shape: tuple[int, int],
    prefix: int,
    order: Tensor | None,
    device: torch.device,
) -> Tensor:
    """[R] number of each row in its sample: text from 0 upwards, whatever the padding, a prefix
    from -1 downwards.

    Args:
        positions, shape, prefix: Those given to `lay_out`.
        order: That of its layout.
    """
    batch, length = shape
    text = (
        torch.arange(batch * length, device=device) if positions is None else positions
    ) % length
    if order is None:
        return text
    before = -1 - torch.arange(prefix, device=device).repeat(batch)
    return torch.cat([before, text]).index_select(0, order)


@cache_tensor
def rotations(length: int, prefix: int, head_dim: int, device: torch.device) -> Tensor:
    """[P + S, 1, head_dim / 2, 2] rotary cos and sin, fp32; of a prefix row 1 and 0."""
    shape = (prefix, head_dim // 2)
    still = torch.stack([torch.ones(shape, device=device), torch.zeros(shape, device=device)], -1)
    return torch.cat([still, rotary_table(length, head_dim, device)])[:, None]


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """RoPE of [R, heads, head_dim] by [R, 1, head_dim / 2, 2], computed in at least fp32."""
    exact = x if x.dtype == torch.float64 else x.float()
    even, odd = exact.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotation.to(exact.dtype).unbind(-1)
    return (
        torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).to(x.dtype)
    )


def attend(query: Tensor, key: Tensor, value: Tensor, layout: Layout, causal: bool) -> Tensor:
    """Attention inside every sample: three times [R, heads, head_dim] -> [R, heads * head_dim]."""
    low, exact = query.dtype, attention_dtype(query.dtype, query.device)
    with without_autocast(query):
        query, key, value = (x.to(exact) for x in (query, key, value))
        return _attend(query, key, value, layout, causal).to(low)


def _attend(query: Tensor, key: Tensor, value: Tensor, layout: Layout, causal: bool) -> Tensor:
    if layout.starts is not None:
        edges = (layout.starts, layout.starts, layout.width, layout.width)
        window = (-1, 0) if causal else (-1, -1)
        return attend_ragged(query, key, value, *edges, window_size=window)
    if layout.lengths is not None:
        queries, keys, values = (
            x.transpose(0, 1)[None].split(layout.lengths, dim=2) for x in (query, key, value)
        )
        samples = [
            F.scaled_dot_product_attention(q, k, v, is_causal=causal)[0].transpose(0, 1)
            for q, k, v in zip(queries, keys, values)
        ]
        return torch.cat(samples).flatten(1)
    query, key, value = (to_rectangle(x, layout) for x in (query, key, value))
    # Padding follows the text, so that a causal position never sees it.
    mask = None if causal else layout.key_mask
    return from_rectangle(
        F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal), layout
    )


def cross_attend(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
    """Attention of rows [R, heads, head_dim] to M tokens of their sample [B, M, heads, head_dim]
    -> [R, H].
    """
    low, exact = query.dtype, attention_dtype(query.dtype, query.device)
    with without_autocast(query):
        query, key, value = (x.to(exact) for x in (query, key, value))
        if layout.starts is not None:
            tokens = key.shape[1]
            ends = torch.arange(
                0, (layout.batch + 1) * tokens, tokens, dtype=torch.int32, device=query.device
            )
            edges = (layout.starts, ends, layout.width, tokens)
            return attend_ragged(query, key.flatten(0, 1), value.flatten(0, 1), *edges).to(low)
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        if layout.lengths is not None:
            parts = query.transpose(0, 1)[None].split(layout.lengths, dim=2)
            samples = [
                F.scaled_dot_product_attention(part, k, v)[0].transpose(0, 1)
                for part, k, v in zip(parts, key.split(1), value.split(1))
            ]
            return torch.cat(samples).flatten(1).to(low)
        mixed = F.scaled_dot_product_attention(to_rectangle(query, layout), key, value)
        return from_rectangle(mixed, layout).to(low)


def to_rectangle(x: Tensor, layout: Layout) -> Tensor:
    """[R, heads, head_dim] -> [B, heads, W, head_dim]; padding holds zeros."""
    if layout.slots is not None:
        x = x.new_zeros(layout.batch * layout.width, *x.shape[1:]).index_copy(0, layout.slots, x)
    return x.unflatten(0, (layout.batch, -1)).transpose(1, 2)


def from_rectangle(x: Tensor, layout: Layout) -> Tensor:
    """[B, heads, W, head_dim] -> [R, heads * head_dim]."""
    x = x.transpose(1, 2).flatten(0, 1).flatten(1)
    return x if layout.slots is None else x.index_select(0, layout.slots)
