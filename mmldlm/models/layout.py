"""Where the rows of a batch stand: real text tokens, then latent tokens, and the order in which attention reads them.

The blocks work on rows [R, H] instead of [B, S, H]: what is computed for a row (norms, projections, MLP) is computed
for real tokens only, however long the longest text of the batch is. Attention alone needs the samples apart.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.models.layers import rotary_table

QK_EPS = 1e-6
# Below this share of real positions, attention runs sample by sample (or over ragged rows on a GPU) instead of over a
# rectangle with a mask.
RECTANGLE_FILL = 0.9


class Layout(NamedTuple):
    """B samples, S text positions, L latent tokens a sample; N text rows, R = N + B * L rows, P attention positions.

    Attributes:
        num_text: N; rows [0, N) are text, [N, R) latent (sample by sample).
        sample: [R] row of the modulation table [2 B, ...]: b for a text row of sample b, B + b for a latent row.
        stream: [R] 0 for text rows, 1 for latent rows.
        order: [P] row that stands at each attention position (sample by sample, text before latent tokens).
        back: [R] attention position of each row.
        cos, sin: [R, 1, 1, head_dim] rotary factors of the rows (1 and 0 for latent rows); sin carries the sign of the
            rotation's two halves.
        to_samples: [2 B, R] ones where a row belongs to a sample's stream; on a CPU in fp32 None. zeros: [2 B, 1].
        first: [B] row of each sample's first text token.
        eps: [1] added to the mean square of queries and keys. unit: [6, 1], 1 where a modulation is a scale.
        key_mask: [B, 1, 1, S + L] keys that may be attended to, None when all may.
        lengths: rows of each sample, where attention runs sample by sample (CPU); else None.
        starts: [B + 1] int32 first position of each sample, where attention runs over ragged rows (GPU); else None.
        batch: B. longest: S + L.
    """

    num_text: int
    sample: Tensor
    stream: Tensor
    order: Tensor
    back: Tensor
    cos: Tensor
    sin: Tensor
    to_samples: Tensor | None
    zeros: Tensor
    first: Tensor
    eps: Tensor
    unit: Tensor
    key_mask: Tensor | None
    lengths: tuple[int, ...] | None
    starts: Tensor | None
    batch: int
    longest: int

    def sum_by_sample(self, rows: Tensor) -> Tensor:
        """[R, K] -> [2 B, K] sums over the rows of each sample's stream."""
        if self.to_samples is None:  # 3 to 10 times as fast on a CPU as the product
            return torch.index_add(self.zeros.expand(-1, rows.shape[1]), 0, self.sample, rows)
        # Elsewhere additions would race, and in bf16 each would round.
        return torch.mm(self.to_samples, rows)


def make_layout(
    positions: Tensor | None,
    mask: Tensor | None,
    batch: int,
    length: int,
    latents: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    ragged: str | None = None,
) -> Layout:
    """The layout of a batch.

    Args:
        positions: [N] int64 places in B * S of the text rows, ascending, at least one a sample; None: all of them.
        mask: [B, S] bool, text keys that may be attended to; None: all. With positions, it must name just those.
        batch, length, latents: B, S, L. head_dim: of attention. dtype: of the rows.
        ragged: with positions, how attention leaves padding out: "loop" (sample by sample, which reads the lengths on
            the host), "varlen" (one kernel over ragged rows), None (a rectangle with the mask).
    """
    indices = torch.arange(batch * (length + latents), device=device)
    latent_sample = (indices[: batch * latents] // latents) + batch
    if positions is None:
        place = indices[: batch * length]
    else:
        place = positions
    num_text = place.shape[0]
    row = place // length  # sample of each text row
    sample = torch.cat([row, latent_sample])
    cos, sin = rotary_table(length, head_dim, device)
    at = place % length
    cos = torch.cat([cos[at], cos.new_ones(batch * latents, head_dim // 2)])
    sin = torch.cat([sin[at], sin.new_zeros(batch * latents, head_dim // 2)])
    rows = torch.arange(2 * batch, device=device)
    stream = (sample >= batch).long()
    first = torch.searchsorted(place, rows[:batch] * length)

    lengths = starts = key_mask = None
    if positions is None or ragged is None:
        # A rectangle: position b * (S + L) + s for text, then the latent tokens.
        width = length + latents
        back = torch.cat(
            [row * width + at, (latent_sample - batch) * width + length + indices[: batch * latents] % latents]
        )
        if num_text == batch * length:
            order = back.argsort()
        else:  # what stands at a padded position is masked as a key and dropped as a query
            # (of its own sample: a value that is not finite must not reach a neighbour)
            order = first.repeat_interleave(width, output_size=batch * width)
            order = order.index_copy(0, back, indices[: num_text + batch * latents])
        if mask is not None:
            key_mask = torch.cat([mask, mask.new_ones(batch, latents)], dim=1)[:, None, None]
    else:
        order = (sample % batch).argsort(stable=True)
        back = order.argsort()
        counts = torch.zeros(batch, dtype=torch.int64, device=device).index_add_(0, row, torch.ones_like(row)) + latents
        if ragged == "loop":
            lengths = tuple(map(int, counts.numpy()))  # on a CPU nobody waits for this
        else:
            starts = F.pad(counts.cumsum(0), (1, 0)).int()
    adds = device.type == "cpu" and dtype in (torch.float32, torch.float64)
    return Layout(
        num_text=num_text,
        sample=sample,
        stream=stream,
        order=order,
        back=back,
        cos=torch.cat([cos, cos], -1)[:, None, None].to(dtype),
        sin=torch.cat([-sin, sin], -1)[:, None, None].to(dtype),
        to_samples=None if adds else (rows[:, None] == sample).to(dtype),
        zeros=cos.new_zeros(2 * batch, 1, dtype=dtype),
        first=first,
        eps=torch.full((1,), QK_EPS, dtype=torch.promote_types(dtype, torch.float32), device=device),
        unit=(torch.arange(6, device=device) % 3 == 1)[:, None].to(dtype),
        key_mask=key_mask,
        lengths=lengths,
        starts=starts,
        batch=batch,
        longest=length + latents,
    )


def attend(qkv: Tensor, layout: Layout) -> Tensor:
    """Bidirectional attention inside every sample: [P, 3, heads, head_dim] -> [P, heads * head_dim]."""
    if qkv.device.type == "cpu" and qkv.dtype in (torch.bfloat16, torch.float16):
        # torch's flash attention on a CPU needs five times as long for a bf16 backward pass as for an fp32 one.
        return attend(qkv.float(), layout).to(qkv.dtype)
    if layout.starts is not None:
        from torch.nn.attention.varlen import varlen_attn

        longest = layout.longest
        mixed = varlen_attn(*qkv.unbind(1), layout.starts, layout.starts, longest, longest)
        return mixed.flatten(1)
    if layout.lengths is not None:
        samples = zip(*(part.transpose(0, 1)[None].split(layout.lengths, dim=2) for part in qkv.unbind(1)))
        mixed = [F.scaled_dot_product_attention(*sample) for sample in samples]
        return torch.cat([part[0].transpose(0, 1) for part in mixed]).flatten(1)
    query, key, value = (part.unflatten(0, (layout.batch, -1)).transpose(1, 2) for part in qkv.unbind(1))
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=layout.key_mask)
    return mixed.transpose(1, 2).flatten(0, 1).flatten(1)
