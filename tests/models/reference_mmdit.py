"""Reference for the fused blocks of the MMDiT, in plain, padded PyTorch.

`use_reference_blocks(model)` makes a model compute its blocks this way: every text position,
padding included, one operation after the other, attention as a softmax over a masked matrix.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rotary(x: Tensor, positions: Tensor, theta: float = 1e4) -> Tensor:
    """RoPE on x [heads, T, D] at positions [T]: dimensions 2 d and 2 d + 1 turn together."""
    half = x.shape[-1] // 2
    inverse = theta ** (-torch.arange(half, dtype=torch.float32) * 2 / x.shape[-1])
    angles = positions.float()[:, None] * inverse
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)


def axial(x: Tensor, grid: list[int], tokens: int) -> Tensor:
    """RoPE on x [heads, T, D] of a grid's latents, each with so many tokens: half of D by row,
    half by column.
    """
    place = torch.arange(x.shape[1]) // tokens
    by_row, by_column = x.chunk(2, dim=-1)
    return torch.cat(
        [rotary(by_row, place // grid[1]), rotary(by_column, place % grid[1])], dim=-1
    )


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def stream_weight(layer, number: int) -> Tensor:
    """A stream's weight [O, I]: 0 text, 1 latents."""
    return layer.weight.chunk(2)[number]


def reference_block(
    block, text: Tensor, latent: Tensor, condition: Tensor, places=None
) -> tuple[Tensor, Tensor]:
    """One block on one sample: text [n, H] (all real), latent [L, H], condition [C]; places: the
    arguments of axial.
    """
    streams = ((0, text), (1, latent))
    parts, queries, keys, values = [], [], [], []
    for number, x in streams:
        shift, scale, gate, *rest = block.modulation(condition).chunk(2)[number].chunk(6)
        hidden = F.layer_norm(x, x.shape[-1:], eps=1e-6) * scale + shift
        projected = hidden @ stream_weight(block.to_qkv, number).T
        query, key, value = projected.view(len(x), 3, block.n_heads, -1).permute(1, 2, 0, 3)
        if block.qk_norm is not None:
            of_query, of_key = block.qk_norm.weight.chunk(2)[number].chunk(2)
            query, key = rms(query, of_query), rms(key, of_key)
        if number == 0:
            positions = torch.arange(len(x))
            query, key = rotary(query, positions), rotary(key, positions)
        elif places is not None:
            query, key = axial(query, *places), axial(key, *places)
        parts.append((gate, *rest))
        queries.append(query), keys.append(key), values.append(value)
    query, key, value = (torch.cat(t, 1) for t in (queries, keys, values))
    scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
    mixed = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
    out = []
    for (number, x), (gate, shift, scale, mlp_gate), given in zip(
        streams, parts, (mixed[: len(text)], mixed[len(text) :])
    ):
        x = x + gate * (given @ stream_weight(block.to_out, number).T)
        hidden = F.layer_norm(x, x.shape[-1:], eps=1e-6) * scale + shift
        inner = F.gelu(hidden @ stream_weight(block.mlp_in, number).T)
        out.append(x + mlp_gate * (inner @ stream_weight(block.mlp_out, number).T))
    return out[0], out[1]


def reference_forward(block, rows: Tensor, condition: Tensor, packing, places=None) -> Tensor:
    """What block.forward(rows, condition, packing) must give, sample by sample.

    Keys that the packing's mask forbids are left out of their sample, so their rows come back
    unchanged.
    """
    out = rows.clone()
    latents = (len(rows) - packing.num_text) // packing.batch
    for b in range(packing.batch):
        of_text = (packing.sample[: packing.num_text] == b).nonzero()[:, 0]
        if packing.key_mask is not None and packing.order.shape[0] == len(rows):
            of_text = of_text[packing.key_mask[b, 0, 0, : len(of_text)]]
        of_latent = packing.num_text + b * latents + torch.arange(latents)
        text, latent = reference_block(block, rows[of_text], rows[of_latent], condition[b], places)
        out = out.index_copy(0, of_text, text).index_copy(0, of_latent, latent)
    return out


def use_reference_blocks(model) -> None:
    """Replace the forward pass of every block of a model; all rows are computed, used or not."""

    config = model.config
    places = (config.latent_grid, config.tokens_per_latent) if config.latent_rope else None

    def replaced(block):
        def forward(rows, condition, packing, recompute=False, output_packing=None, dropout=None):
            assert dropout is None
            out = reference_forward(block, rows, condition, packing, places)
            kept = None if output_packing is None else output_packing.kept_rows
            return out if kept is None else out[kept]

        return forward

    for block in model.blocks:
        block.forward = replaced(block)
