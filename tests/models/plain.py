"""The MMDiT's blocks in plain, padded PyTorch: the reference that the fused ones are compared with.

`use_plain_blocks(model)` makes a model compute its blocks this way: every text position, padding included, one
operation after the other, attention as a softmax over a masked matrix.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rotary(x: Tensor, positions: Tensor, theta: float = 1e4) -> Tensor:
    """RoPE on x [heads, T, D] at positions [T]: dimensions d and d + D / 2 turn together."""
    half = x.shape[-1] // 2
    inverse = theta ** (-torch.arange(half, dtype=torch.float32) * 2 / x.shape[-1])
    angles = positions.float()[:, None] * inverse
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def plain_block(block, text: Tensor, latent: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
    """One block on one sample: text [n, H] (all real), latent [L, H], condition [C]."""
    streams = ((block.text, text), (block.latent, latent))
    parts, queries, keys, values = [], [], [], []
    for number, (stream, x) in enumerate(streams):
        shift, scale, gate, *rest = stream.modulation(condition).chunk(6)
        hidden = F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift
        query, key, value = stream.to_qkv(hidden).view(len(x), 3, block.n_heads, -1).permute(1, 2, 0, 3)
        if stream.query_norm is not None:
            query, key = rms(query, stream.query_norm.weight), rms(key, stream.key_norm.weight)
        if number == 0:
            positions = torch.arange(len(x))
            query, key = rotary(query, positions), rotary(key, positions)
        parts.append((gate, *rest))
        queries.append(query), keys.append(key), values.append(value)
    query, key, value = (torch.cat(t, 1) for t in (queries, keys, values))
    scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
    mixed = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
    out = []
    for (stream, x), (gate, shift, scale, mlp_gate), given in zip(
        streams, parts, (mixed[: len(text)], mixed[len(text) :])
    ):
        x = x + gate * stream.to_out(given)
        hidden = F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift
        out.append(x + mlp_gate * stream.mlp_out(F.gelu(stream.mlp_in(hidden), approximate="tanh")))
    return out[0], out[1]


def plain_forward(block, rows: Tensor, condition: Tensor, layout) -> Tensor:
    """What block.forward(rows, condition, layout) must give, sample by sample.

    Keys that the layout's mask forbids are left out of their sample, so their rows come back unchanged.
    """
    out = rows.clone()
    latents = (len(rows) - layout.num_text) // layout.batch
    for b in range(layout.batch):
        of_text = (layout.sample[: layout.num_text] == b).nonzero()[:, 0]
        if layout.key_mask is not None and layout.order.shape[0] == len(rows):
            of_text = of_text[layout.key_mask[b, 0, 0, : len(of_text)]]
        of_latent = layout.num_text + b * latents + torch.arange(latents)
        text, latent = plain_block(block, rows[of_text], rows[of_latent], condition[b])
        out = out.index_copy(0, of_text, text).index_copy(0, of_latent, latent)
    return out


def use_plain_blocks(model) -> None:
    """Replace the forward pass of every block of a model."""
    for block in model.blocks:
        block.forward = lambda rows, condition, layout, block=block: plain_forward(block, rows, condition, layout)
