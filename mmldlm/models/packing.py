"""The packed (padding-free) layout of a batch, and attention over it.

The blocks work on rows [R, H] instead of [B, S, H], so norms, projections and the MLP run on real
tokens alone, however long the longest text is. Only attention needs the samples apart.

    B  samples                                R = N + B * L  rows: text first, then latents
    S  positions of the longest text          P  positions of attention
    L  latent tokens of a sample              M  text positions that a head scores
    N  text rows: the real tokens             Q  rows behind the last attention: M, then B * L

Two texts `a b c` and `d e`, S = 4, with L = 2 latent tokens each, `u v` and `x y`:

    row           0  1  2  3  4 | 5  6  7  8        stream_ends = (N, R) = (5, 9)
                  a  b  c  d  e | u  v  x  y
    sample        0  0  0  1  1 | 0  0  1  1

    order: which row stands at each position of attention, sample by sample
      "loop"      d  e  x  y | a  b  c  u  v        runs = ((4, 1), (5, 1)), P = R = 9
      "varlen"    a  b  c  u  v | d  e  x  y        starts = [0, 5, 9], P = R = 9
      rectangle   a  b  c  .  u  v | d  e  .  .  x  y       a key_mask hides `.`, P = B * (S + L)

"loop" takes the shortest samples first, with one call for all of a length (CPU); "varlen" is one
kernel over ragged rows (GPU); the rectangle is for GPUs without that kernel, and on a CPU for
batches with little padding and for compiled blocks. Where the head scores `b` and `e` alone,
`restrict_to([1, 4])` is the layout behind the last attention: b e | u v x y, Q = 6.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.models.base import TextInputs
from mmldlm.models.layers import QK_EPS, cache_tensor, rotary_table

# On a CPU, below this fraction of real positions, attention runs over samples of equal length
# instead of over a rectangle with a mask.
RECTANGLE_FILL = 0.9


class Packing(NamedTuple):
    """The layout of a batch; sizes as above, T = 2 streams (text, latents).

    Attributes:
        stream_ends: Row after the last one of each stream: (N, R).
        sample: Sample of each row. [R]
        modulation_index: Row of the modulation table [T * B, ...] that each row uses: T * sample +
            stream. [R]
        modulation_one_hot: The same as ones in a matrix; None on a CPU in fp32. [T * B, R]
        zeros: Zeros of the rows' dtype. [T * B, 1]
        order: Row at each position of attention. [P]
        inverse_order: Position of attention of each row. [R]
        rotation: Rotary cos and sin, of the turn and of its inverse, at least fp32: of the text
            rows, or of all rows where latents have places (`PackingShape.places`). [N or R, 2,
            head_dim / 2, 2]
        first_rows: Row of the first text token of each sample. [B]
        eps: Extension of the length of a query or key, as the other side of a right angle. [1]
        group_offsets: Offsets `stream_ends` as int32, where grouped products are used (CPU). [T]
        key_mask: Keys that may be attended to in the rectangle; None: all. [B, 1, 1, S + L]
        runs: Pairs (rows of a sample, number of such samples), each a call of attention (CPU).
        starts: First position of each sample, for attention over ragged rows (GPU). [B + 1] int32
        batch: B.
        longest: S + L.
        kept_rows: Of a restricted packing, its rows in the whole one. [Q]
    """

    stream_ends: tuple[int, ...]
    sample: Tensor
    modulation_index: Tensor
    modulation_one_hot: Tensor | None
    zeros: Tensor
    order: Tensor
    inverse_order: Tensor
    rotation: Tensor
    first_rows: Tensor
    eps: Tensor
    group_offsets: Tensor | None
    key_mask: Tensor | None
    runs: tuple[tuple[int, int], ...] | None
    starts: Tensor | None
    batch: int
    longest: int
    kept_rows: Tensor | None = None

    @property
    def num_text(self) -> int:
        """Number of text rows, N."""
        return self.stream_ends[0]

    def restrict_to(self, text_rows: Tensor, with_latents: bool = True) -> Packing:
        """Return the layout of the rows that the heads read: text_rows [M], then all latent rows
        or none.

        What describes the inputs of attention (order, rotation, first_rows, ...) stays that of all
        rows.
        """
        num_text, kept_rows = text_rows.shape[0], text_rows
        if with_latents:
            latent_rows = torch.arange(
                self.num_text, self.modulation_index.shape[0], device=text_rows.device
            )
            kept_rows = torch.cat([text_rows, latent_rows])
        index, one_hot = self.modulation_index.index_select(0, kept_rows), self.modulation_one_hot
        ends = (num_text, kept_rows.shape[0])
        return self._replace(
            stream_ends=ends,
            sample=self.sample.index_select(0, kept_rows),
            modulation_index=index,
            modulation_one_hot=None
            if one_hot is None
            else _one_hot(index, len(one_hot), one_hot.dtype),
            inverse_order=self.inverse_order.index_select(0, kept_rows),
            group_offsets=None
            if self.group_offsets is None
            else self.group_offsets.new_tensor(ends),
            kept_rows=kept_rows,
        )

    def sum_by_sample(self, rows: Tensor) -> Tensor:
        """[R, K] -> [T * B, K] sums over the rows of each sample's stream."""
        # On a CPU this is 3 to 10 times as fast as the product.
        if self.modulation_one_hot is None:
            return torch.index_add(
                self.zeros.expand(-1, rows.shape[1]), 0, self.modulation_index, rows
            )
        # Elsewhere additions would race, and in bf16 each would round.
        return torch.mm(self.modulation_one_hot, rows)


def modulation_of_rows(
    table: Tensor, packing: Packing, output_packing: Packing
) -> tuple[Tensor, ...]:
    """[T * B, 6 H] -> shift, scale of attention [R, H]; its gate, the MLP's shift, scale and gate
    [Q, H].
    """
    if output_packing is packing:
        return _of_rows(table, packing).view(-1, 6, table.shape[1] // 6).unbind(1)
    inputs, outputs = table.tensor_split((table.shape[1] // 3,), 1)
    return (
        *_of_rows(inputs, packing).chunk(2, 1),
        *_of_rows(outputs, output_packing).chunk(4, 1),
    )


def _of_rows(table: Tensor, packing: Packing) -> Tensor:
    """[T * B, K] -> [R, K]: the entry of each row's sample and stream."""
    return _TableLookup.apply(table, packing.modulation_index, packing.modulation_one_hot)


# The gradient of torch's index_select adds rows with atomics: 22 % of a compiled step on an H200,
# and in another order each time.
class _TableLookup(torch.autograd.Function):
    """table [K, W], index [R], the index as ones [K, R] or None -> [R, W]; the gradient is one
    product.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor, one_hot: Tensor | None) -> Tensor:
        ctx.save_for_backward(index, one_hot)
        ctx.num_entries = table.shape[0]
        return table.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        index, one_hot = ctx.saved_tensors
        if one_hot is None:
            sums = grad.new_zeros(ctx.num_entries, grad.shape[1])
            return sums.index_add(0, index, grad), None, None
        return torch.mm(one_hot.to(grad.dtype), grad), None, None


class _Reorder(torch.autograd.Function):
    """x [R, ...], index [P], its inverse [R] -> [P, ...]; the gradient is the inverse gather.

    Places that the inverse does not name must have a gradient of 0.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def to_positions(x: Tensor, packing: Packing) -> Tensor:
    """Rows [R, ...] -> positions of attention [P, ...].

    Padded positions are masked as keys and dropped as queries, so their gradients are 0.
    """
    return _Reorder.apply(x, packing.order, packing.inverse_order)


def to_rows(x: Tensor, packing: Packing, output_packing: Packing) -> Tensor:
    """Positions of attention [P, ...] -> the rows whose outputs are used [Q, ...]."""
    order, inverse = packing.order, output_packing.inverse_order
    if output_packing.kept_rows is None and order.shape == inverse.shape:
        return _Reorder.apply(x, inverse, order)
    return x.index_select(0, inverse)


def select_rows(x: Tensor, output_packing: Packing) -> Tensor:
    """[R, H] -> [Q, H]."""
    return x if output_packing.kept_rows is None else x.index_select(0, output_packing.kept_rows)


def rotate(queries_keys: Tensor, packing: Packing) -> Tensor:
    """Turn (RoPE) queries and keys [R, 2, heads, head_dim] by the positions of their rows; the
    last rows, of latents without a position, stay.
    """
    num_turned = packing.rotation.shape[0]
    cos, sin = packing.rotation[:, 0, None, None].to(queries_keys.dtype).unbind(-1)
    even, odd = queries_keys[:num_turned].unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([turned, queries_keys[num_turned:]])


def computed_text(text: TextInputs, leaves_padding: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return which positions of the text [B, S] are computed ([N], None for all), and which may be
    attended to ([B, S] bool, None for all).

    Args:
        leaves_padding: Whether padding may be left out; where nothing lists the real tokens, they
            are found from the mask if that is free.
    """
    tokens, positions = text.tokens, text.token_positions
    if leaves_padding and positions is not None and len(positions) == tokens.numel():
        return None, None
    keys = None if text.attention_mask is None else text.attention_mask.bool()
    if text.is_null is not None:
        only_first = torch.arange(tokens.shape[1], device=tokens.device) == 0
        others = torch.ones_like(tokens, dtype=torch.bool) if keys is None else keys
        keys = torch.where(text.is_null[:, None], only_first, others)
    if not leaves_padding:
        return None, keys
    if positions is None and keys is not None and keys.device.type == "cpu":
        positions = keys.flatten().nonzero()[:, 0]
        if len(positions) == tokens.numel():
            return None, None
    return positions, keys


def packed_values(values: Tensor, computed: Tensor | None) -> Tensor:
    """[N] values of the rows of the text, from [B, S]; computed [N]: their positions in B * S,
    None: all.
    """
    return values.flatten() if computed is None else values.flatten().index_select(0, computed)


def rows_of_positions(positions: Tensor, computed: Tensor | None) -> Tensor:
    """[M] index among the computed text tokens of positions in B * S.

    Args:
        computed: Positions that are computed, ascending; None: all. [N]

    Raises:
        ValueError: (on a CPU) a position that is not computed.
    """
    if computed is None:
        return positions
    rows = torch.searchsorted(computed, positions.contiguous())
    if computed.device.type == "cpu" and not torch.equal(
        computed[rows.clamp_max(len(computed) - 1)], positions
    ):
        raise ValueError("the query's positions name padding: only real tokens are computed")
    return rows


class PackingShape(NamedTuple):
    """What a packing is made for.

    Attributes:
        batch: B.
        length: S.
        latents: L.
        head_dim: Width of a query.
        dtype: Dtype of the rows.
        device: Device of the rows.
        places: Rows and columns of the grid of latents that turn by their place, and the tokens of
            each latent; None: latents do not turn.
    """

    batch: int
    length: int
    latents: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    places: tuple[int, int, int] | None = None


def pack(
    positions: Tensor | None, mask: Tensor | None, shape: PackingShape, ragged: str | None = None
) -> Packing:
    """Pack a batch.

    Args:
        positions: Indices into B * S of the text rows, ascending, at least one per sample; None:
            all of them. [N]
        mask: bool, text keys that may be attended to; None: all. With positions, it must name just
            those. [B, S]
        shape: Sizes, dtype and device.
        ragged: With positions, how attention leaves padding out: "loop" (which reads the lengths
            on the host), "varlen", or None for the rectangle.
    """
    if positions is None:
        dense = _pack_dense(shape)
        return dense if mask is None else dense._replace(key_mask=_key_mask(mask, shape.latents))

    batch, length, latents, device = shape.batch, shape.length, shape.latents, shape.device
    num_text, width = positions.shape[0], length + latents
    row, offset = positions // length, positions % length
    latent_sample = torch.arange(batch, device=device).repeat_interleave(
        latents, output_size=batch * latents
    )
    sample = torch.cat([row, latent_sample])
    first_rows = torch.searchsorted(
        positions, torch.arange(0, batch * length, length, device=device)
    )
    runs = starts = key_mask = None
    if ragged is None:
        # A rectangle: position b * (S + L) + s for text, then the latent tokens.
        inverse_order = sample * width
        inverse_order[:num_text] += offset
        inverse_order[num_text:] += length + torch.arange(latents, device=device).repeat(batch)
        # A padded position holds a row of its own sample, masked as a key and dropped as a query:
        # a value that is not finite must not reach another sample.
        order = first_rows.repeat_interleave(width, output_size=batch * width)
        order = order.index_copy(0, inverse_order, torch.arange(len(inverse_order), device=device))
        key_mask = None if mask is None else _key_mask(mask, latents)
    else:
        counts = (
            torch.zeros(batch, dtype=torch.int64, device=device).index_add_(
                0, row, torch.ones_like(row)
            )
            + latents
        )
        if ragged == "loop":
            order = (counts * batch).index_select(0, sample).add_(sample).argsort(stable=True)
            # A CPU tensor: there is no device to wait for.
            lengths, numbers = counts.unique(return_counts=True)
            runs = tuple(zip(lengths.tolist(), numbers.tolist()))
        else:
            order = sample.argsort(stable=True)
            starts = F.pad(counts.cumsum(0), (1, 0)).int()
        inverse_order = order.argsort()
    packing = _build(sample, num_text, inverse_order, order, offset, first_rows, shape)
    return packing._replace(key_mask=key_mask, runs=runs, starts=starts)


def _pack_dense(shape: PackingShape) -> Packing:
    """The packing of B texts that all have S tokens."""
    batch, length, latents, device = shape.batch, shape.length, shape.latents, shape.device
    width, num_text = length + latents, batch * length
    positions = torch.arange(batch * width, device=device).view(batch, width)
    inverse_order = torch.cat([positions[:, :length].flatten(), positions[:, length:].flatten()])
    offset = torch.arange(length, device=device).repeat(batch)
    first_rows = torch.arange(0, num_text, length, device=device)
    sample = inverse_order // width
    return _build(
        sample, num_text, inverse_order, inverse_order.argsort(), offset, first_rows, shape
    )


def _build(
    sample: Tensor,
    num_text: int,
    inverse_order: Tensor,
    order: Tensor,
    offset: Tensor,
    first_rows: Tensor,
    shape: PackingShape,
) -> Packing:
    """A packing from the order of its rows; offset [N]: position of each text row in its text."""
    batch, length, latents, head_dim, dtype, device, _ = shape
    on_cpu = device.type == "cpu"
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    ends = (num_text, len(sample))
    index = len(ends) * sample
    index[num_text:] += 1
    adds = on_cpu and dtype in (torch.float32, torch.float64)
    return Packing(
        stream_ends=ends,
        sample=sample,
        modulation_index=index,
        modulation_one_hot=None if adds else _one_hot(index, len(ends) * batch, dtype),
        zeros=torch.zeros(len(ends) * batch, 1, dtype=dtype, device=device),
        order=order,
        inverse_order=inverse_order,
        rotation=_rotations_of_rows(offset, exact, shape),
        first_rows=first_rows,
        # mean square + QK_EPS = (length^2 + head_dim QK_EPS) / head_dim
        eps=torch.full((1,), (head_dim * QK_EPS) ** 0.5, dtype=exact, device=device),
        group_offsets=torch.tensor(ends, dtype=torch.int32, device=device) if on_cpu else None,
        key_mask=None,
        runs=None,
        starts=None,
        batch=batch,
        longest=length + latents,
    )


def _one_hot(index: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """[R] -> [size, R]."""
    return (torch.arange(size, device=index.device)[:, None] == index).to(dtype)


def row_positions(positions: Tensor | None, length: int, packing: Packing) -> Tensor:
    """[R] number of each row in its sample: of text from 0 upwards, whatever the padding, of
    latents from -1 downwards.

    Args:
        positions: Those given to `pack`.
        length: S.
    """
    num_text, device = packing.num_text, packing.sample.device
    text = torch.arange(num_text, device=device) if positions is None else positions
    num_latent = packing.sample.shape[0] - num_text
    latent = torch.arange(num_latent, device=device) % (num_latent // packing.batch)
    return torch.cat([text % length, -1 - latent])


def _rotations_of_rows(offset: Tensor, dtype: torch.dtype, shape: PackingShape) -> Tensor:
    """`Packing.rotation`; offset [N]: position of each text row in its text."""
    text = _rotations(shape.length, shape.head_dim, dtype, shape.device).index_select(0, offset)
    if shape.places is None:
        return text
    latent = _grid_rotations(*shape.places, shape.head_dim, dtype, shape.device)[: shape.latents]
    return torch.cat([text, latent.repeat(shape.batch, 1, 1, 1)])


@cache_tensor
def _rotations(length: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[S, 2, head_dim / 2, 2] cos and sin of the turn, then of its inverse."""
    return _with_inverse(rotary_table(length, head_dim, device).to(dtype))


@cache_tensor
def _grid_rotations(
    rows: int, columns: int, tokens: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[rows * columns * tokens, 2, head_dim / 2, 2] of a grid's latents, row by row, each with so
    many tokens.

    Axial RoPE (EVA-02, arXiv 2303.11331; JiT, arXiv 2511.13720): the first half of a head's pairs
    turns by the row, the second by the column, each with the frequencies of a text in a head of
    half the width.
    """
    by_row = rotary_table(rows, head_dim // 2, device)[:, None].expand(-1, columns, -1, -1)
    by_column = rotary_table(columns, head_dim // 2, device)[None].expand(rows, -1, -1, -1)
    turn = torch.cat([by_row, by_column], dim=2).flatten(0, 1)
    return _with_inverse(turn.repeat_interleave(tokens, dim=0).to(dtype))


def _with_inverse(turn: Tensor) -> Tensor:
    """[n, pairs, 2] cos and sin -> [n, 2, pairs, 2] of the turn, then of its inverse."""
    inverse = turn.clone()
    inverse[..., 1].neg_()
    return torch.stack([turn, inverse], 1)


def _key_mask(mask: Tensor, latents: int) -> Tensor:
    """[B, S] -> [B, 1, 1, S + L], all latents allowed."""
    return torch.cat([mask, mask.new_ones(mask.shape[0], latents)], dim=1)[:, None, None]


@functools.cache
def has_varlen(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Whether this GPU's flash attention takes ragged rows of this kind: 16 bits, heads of 8 k
    elements up to 256.
    """
    fits = dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256
    return fits and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def ragged_kind(
    positions: Tensor | None, shape: PackingShape, dtype: torch.dtype, is_compiled: bool
) -> str | None:
    """How attention leaves padding out: `ragged` of `pack`, for activations of a dtype."""
    if positions is None:
        return None
    if positions.device.type != "cpu":
        return "varlen" if has_varlen(dtype, shape.head_dim, positions.device) else None
    num_latent = shape.batch * shape.latents
    filled = (positions.shape[0] + num_latent) / (shape.batch * shape.length + num_latent)
    # A loop over lengths would be compiled again for every batch.
    return "loop" if filled < RECTANGLE_FILL and not is_compiled else None


def attention_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which attention runs: never a low one on a CPU.

    torch's flash attention is slower in bf16 there than in fp32, and bf16 scores would hold 8 bits
    only.
    """
    return (
        torch.float32
        if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16)
        else dtype
    )


def attend_ragged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_key: int,
    **options: Any,
) -> Tensor:
    """Attention inside every sample of ragged rows, one kernel of a GPU: queries [P, heads,
    head_dim], keys and values [K, heads, head_dim] -> [P, heads * head_dim].

    Args:
        starts, key_starts: First row of each sample, and the end. [B + 1] int32
        longest, longest_key: Most rows of a sample.
        options: Those of `varlen_attn`.
    """
    from torch.nn.attention.varlen import varlen_attn

    mixed = varlen_attn(query, key, value, starts, key_starts, longest, longest_key, **options)
    # A pair is returned only where it is asked for.
    assert isinstance(mixed, Tensor)
    return mixed.flatten(1)


def attend(qkv: Tensor, packing: Packing, scale: float | None = None) -> Tensor:
    """Bidirectional attention inside every sample: [P, 3, heads, head_dim] -> [P, heads *
    head_dim].

    scale: Factor of queries times keys; None: 1 / sqrt(head_dim).
    """
    exact = attention_dtype(qkv.dtype, qkv.device)
    if qkv.dtype != exact:
        return attend(qkv.to(exact), packing, scale).to(qkv.dtype)
    if packing.starts is not None:
        query, key, value = qkv.unbind(1)
        edges = (packing.starts, packing.starts, packing.longest, packing.longest)
        return attend_ragged(query, key, value, *edges, scale=scale)
    if packing.runs is not None:
        sizes = [length * num_samples for length, num_samples in packing.runs]
        parts = zip(qkv.split(sizes), packing.runs)
        return torch.cat(
            [_attend_rectangle(part, num_samples, None, scale) for part, (_, num_samples) in parts]
        )
    return _attend_rectangle(qkv, packing.batch, packing.key_mask, scale)


def _attend_rectangle(
    qkv: Tensor, batch: int, key_mask: Tensor | None, scale: float | None
) -> Tensor:
    """[B * S, 3, heads, head_dim] of samples of equal length -> [B * S, heads * head_dim]."""
    query, key, value = (part.transpose(1, 2) for part in qkv.unflatten(0, (batch, -1)).unbind(2))
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=key_mask, scale=scale)
    return mixed.transpose(1, 2).reshape(len(qkv), -1)
