"""Where the rows of a batch stand: real text tokens, then latent tokens, and the order in which attention reads them.

The blocks work on rows [R, H] instead of [B, S, H]: what is computed for a row (norms, projections, MLP) is computed
for real tokens only, however long the longest text of the batch is. Attention alone needs the samples apart.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.models.layers import cache_tensors, rotary_table

QK_EPS = 1e-6
# Below this share of real positions, attention runs sample by sample (or over ragged rows on a GPU) instead of over a
# rectangle with a mask.
RECTANGLE_FILL = 0.9


class Packing(NamedTuple):
    """B samples, S text positions, L latent tokens a sample; N text rows, R = N + B * L rows, P attention positions.

    Attributes:
        num_text: N; rows [0, N) are text, [N, R) latent (sample by sample).
        sample: [R] sample of each row.
        owner: [R] row of the modulation table [2 B, ...]: 2 b for a text row of sample b, 2 b + 1 for a latent row.
        order: [P] row that stands at each attention position (sample by sample, text before latent tokens).
        back: [R] attention position of each row.
        rotation: [N, 2, head_dim / 2, 2] rotary cos and sin of the text rows, of the turn and of the turn back, in fp32
            at least.
        to_owners: [2 B, R] ones where a row belongs to a sample's stream; on a CPU in fp32 None. zeros: [2 B, 1].
        first: [B] row of each sample's first text token.
        eps: [1] what the length of a query or key is extended by (as a right angle's other side).
        ends: [2] int32 rows after the text's and the latents' last, where grouped products are used (CPU); else None.
        key_mask: [B, 1, 1, S + L] keys that may be attended to, None when all may.
        lengths: rows of each sample, where attention runs sample by sample (CPU); else None.
        starts: [B + 1] int32 first position of each sample, where attention runs over ragged rows (GPU); else None.
        read: [R] rows of the layout that this one was made of (`reading`); None where it was made of none.
        batch: B. longest: S + L.
    """

    num_text: int
    sample: Tensor
    owner: Tensor
    order: Tensor
    back: Tensor
    rotation: Tensor
    to_owners: Tensor | None
    zeros: Tensor
    first: Tensor
    eps: Tensor
    ends: Tensor | None
    key_mask: Tensor | None
    lengths: tuple[int, ...] | None
    starts: Tensor | None
    batch: int
    longest: int
    read: Tensor | None = None

    def restrict_to(self, text_rows: Tensor) -> Packing:
        """The layout of the rows that the heads read of a batch: text_rows [M], then all latent rows.

        What belongs to attention's inputs (order, rotation, first, ...) stays that of all rows.
        """
        num_text, num_rows = text_rows.shape[0], self.owner.shape[0]
        of_latents = cache_tensors(torch.arange)(self.num_text, num_rows, device=text_rows.device)
        read = torch.cat([text_rows, of_latents])
        owner = self.owner.index_select(0, read)
        ends = self.ends
        return self._replace(
            num_text=num_text,
            sample=self.sample.index_select(0, read),
            owner=owner,
            back=self.back.index_select(0, read),
            to_owners=None if self.to_owners is None else _one_hot(owner, self.batch, self.to_owners.dtype),
            ends=None if ends is None else ends.new_tensor([num_text, len(read)]),
            read=read,
        )

    def sum_by_sample(self, rows: Tensor) -> Tensor:
        """[R, K] -> [2 B, K] sums over the rows of each sample's stream."""
        if self.to_owners is None:  # 3 to 10 times as fast on a CPU as the product
            return torch.index_add(self.zeros.expand(-1, rows.shape[1]), 0, self.owner, rows)
        # Elsewhere additions would race, and in bf16 each would round.
        return torch.mm(self.to_owners, rows)


def pack(
    positions: Tensor | None,
    mask: Tensor | None,
    batch: int,
    length: int,
    latents: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    ragged: str | None = None,
) -> Packing:
    """The layout of a batch; of one without padding it is kept for the next of its shape.

    Args:
        positions: [N] int64 places in B * S of the text rows, ascending, at least one a sample; None: all of them.
        mask: [B, S] bool, text keys that may be attended to; None: all. With positions, it must name just those.
        batch, length, latents: B, S, L. head_dim: of attention. dtype: of the rows.
        ragged: with positions, how attention leaves padding out: "loop" (sample by sample, which reads the lengths on
            the host), "varlen" (one kernel over ragged rows), None (a rectangle with the mask).
    """
    if positions is None:
        dense = cache_tensors(_dense)(batch, length, latents, head_dim, dtype, device)
        return dense if mask is None else dense._replace(key_mask=_key_mask(mask, latents))

    num_text, width = positions.shape[0], length + latents
    row, at = positions // length, positions % length
    of_latents = torch.arange(batch, device=device).repeat_interleave(latents, output_size=batch * latents)
    sample = torch.cat([row, of_latents])
    first = torch.searchsorted(positions, torch.arange(0, batch * length, length, device=device))
    lengths = starts = key_mask = None
    if ragged is None:
        # A rectangle: position b * (S + L) + s for text, then the latent tokens.
        back = sample * width
        back[:num_text] += at
        back[num_text:] += length + torch.arange(latents, device=device).repeat(batch)
        # What stands at a padded position is masked as a key and dropped as a query (it is a row of its own sample: a
        # value that is not finite must not reach a neighbour).
        order = first.repeat_interleave(width, output_size=batch * width)
        order = order.index_copy(0, back, torch.arange(len(back), device=device))
        key_mask = None if mask is None else _key_mask(mask, latents)
    else:
        order = sample.argsort(stable=True)
        back = order.argsort()
        counts = torch.zeros(batch, dtype=torch.int64, device=device).index_add_(0, row, torch.ones_like(row)) + latents
        if ragged == "loop":
            lengths = tuple(map(int, counts.numpy()))  # on a CPU nobody waits for this
        else:
            starts = F.pad(counts.cumsum(0), (1, 0)).int()
    return _layout(
        sample, num_text, back, order, at, first, batch, length, latents, head_dim, dtype,
        key_mask=key_mask, lengths=lengths, starts=starts,
    )  # fmt: skip


def _dense(batch: int, length: int, latents: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Packing:
    """The layout of B texts that all have S tokens."""
    width, num_text = length + latents, batch * length
    places = torch.arange(batch * width, device=device).view(batch, width)
    back = torch.cat([places[:, :length].flatten(), places[:, length:].flatten()])
    at = torch.arange(length, device=device).repeat(batch)
    first = torch.arange(0, num_text, length, device=device)
    return _layout(back // width, num_text, back, back.argsort(), at, first, batch, length, latents, head_dim, dtype)


def _layout(
    sample: Tensor, num_text: int, back: Tensor, order: Tensor, at: Tensor, first: Tensor,
    batch: int, length: int, latents: int, head_dim: int, dtype: torch.dtype,
    key_mask: Tensor | None = None, lengths: tuple[int, ...] | None = None, starts: Tensor | None = None,
) -> Packing:  # fmt: skip
    """A layout from its rows' places; at [N]: of each text row in its text."""
    device = sample.device
    on_cpu = device.type == "cpu"
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    owner = 2 * sample
    owner[num_text:] += 1
    adds = on_cpu and dtype in (torch.float32, torch.float64)
    return Packing(
        num_text=num_text,
        sample=sample,
        owner=owner,
        order=order,
        back=back,
        rotation=cache_tensors(_rotations)(length, head_dim, exact, device).index_select(0, at),
        to_owners=None if adds else _one_hot(owner, batch, dtype),
        zeros=torch.zeros(2 * batch, 1, dtype=dtype, device=device),
        first=first,
        # mean square + QK_EPS = (length^2 + head_dim QK_EPS) / head_dim
        eps=torch.full((1,), (head_dim * QK_EPS) ** 0.5, dtype=exact, device=device),
        ends=torch.tensor([num_text, len(sample)], dtype=torch.int32, device=device) if on_cpu else None,
        key_mask=key_mask,
        lengths=lengths,
        starts=starts,
        batch=batch,
        longest=length + latents,
    )


def _one_hot(owner: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
    """[R] -> [2 B, R]."""
    return (torch.arange(2 * batch, device=owner.device)[:, None] == owner).to(dtype)


def _rotations(length: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[S, 2, head_dim / 2, 2] cos and sin of the turn, then of the turn back."""
    turn = rotary_table(length, head_dim, device).to(dtype)
    back = turn.clone()
    back[..., 1].neg_()
    return torch.stack([turn, back], 1)


def _key_mask(mask: Tensor, latents: int) -> Tensor:
    """[B, S] -> [B, 1, 1, S + L], all latents allowed."""
    return torch.cat([mask, mask.new_ones(mask.shape[0], latents)], dim=1)[:, None, None]


@functools.cache
def has_varlen(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Whether this GPU's flash attention takes ragged rows of this kind: 16 bits, heads of 8 k elements up to 256."""
    fits = dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256
    return fits and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def attention_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which attention runs.

    On a CPU never a low one: torch's flash attention is slower in bf16 there than in fp32. Products of bf16 around a
    softmax of fp32 scores gain 5 % on that, bf16 scores 30 %, but those hold 8 bits.
    """
    return torch.float32 if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16) else dtype


def attend(qkv: Tensor, layout: Packing, scale: float | None = None) -> Tensor:
    """Bidirectional attention inside every sample: [P, 3, heads, head_dim] -> [P, heads * head_dim].

    scale: of queries times keys; None: 1 / sqrt(head_dim).
    """
    exact = attention_dtype(qkv.dtype, qkv.device)
    if qkv.dtype != exact:
        return attend(qkv.to(exact), layout, scale).to(qkv.dtype)
    if layout.starts is not None:
        from torch.nn.attention.varlen import varlen_attn

        longest = layout.longest
        mixed = varlen_attn(*qkv.unbind(1), layout.starts, layout.starts, longest, longest, scale=scale)
        return mixed.flatten(1)
    if layout.lengths is not None:
        samples = zip(*(part.transpose(0, 1)[None].split(layout.lengths, dim=2) for part in qkv.unbind(1)))
        mixed = [F.scaled_dot_product_attention(*sample, scale=scale) for sample in samples]
        return torch.cat([part[0].transpose(0, 1) for part in mixed]).flatten(1)
    query, key, value = (part.unflatten(0, (layout.batch, -1)).transpose(1, 2) for part in qkv.unbind(1))
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=layout.key_mask, scale=scale)
    return mixed.transpose(1, 2).flatten(0, 1).flatten(1)
