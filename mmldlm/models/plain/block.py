"""One block of the plain transformer: self-attention, cross-attention to a latent where wanted,
MLP.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmldlm.models.dropout import ATTENTION, CROSS, MLP, RowDropout
from mmldlm.models.embedding import embedding
from mmldlm.models.layers import Modulation, modulate
from mmldlm.models.plain.config import PlainConfig
from mmldlm.models.plain.layout import Layout, attend, cross_attend, rotate

KINDS = ("shift", "scale", "gate")
NORM_EPS = 1e-6
KeysValues = tuple[Tensor, Tensor]
"""Keys and values of M tokens, each [B, M, heads, head_dim]."""


class RMSNorm(nn.Module):
    """RMS norm over the last dimension with a weight (arXiv 1910.07467), in the dtype of its
    input.
    """

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape and dtype."""
        return F.rms_norm(x, (x.shape[-1],), None, NORM_EPS).to(x.dtype) * self.weight.to(x.dtype)


class CrossAttention(nn.Module):
    """Attention of every row to the M chunk tokens of its sample's latents; adds nothing at the
    start (gate of 0).

    Over one token the softmax is 1: the same vector is then added at every position. Use K > 1.
    """

    def __init__(self, hidden_size: int, n_heads: int, qk_rmsnorm: bool):
        super().__init__()
        self.n_heads, head_dim = n_heads, hidden_size // n_heads
        self.norm = RMSNorm(hidden_size)
        self.token_norm = RMSNorm(hidden_size)
        self.to_query = nn.Linear(hidden_size, hidden_size, bias=False)
        self.to_key_value = nn.Linear(hidden_size, 2 * hidden_size, bias=False)
        self.query_norm = RMSNorm(head_dim) if qk_rmsnorm else nn.Identity()
        self.key_norm = RMSNorm(head_dim) if qk_rmsnorm else nn.Identity()
        self.to_out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.gate = nn.Parameter(torch.zeros(hidden_size))

    def keys_values(self, tokens: Tensor) -> KeysValues:
        """Of latent tokens [B, M, H]: what sampling computes once."""
        both = self.to_key_value(self.token_norm(tokens)).unflatten(-1, (2, self.n_heads, -1))
        return self.key_norm(both[:, :, 0]), both[:, :, 1]

    def forward(self, rows: Tensor, keys_values: KeysValues, layout: Layout) -> Tensor:
        """[R, H] -> what is added to them, [R, H]."""
        query = self.query_norm(self.to_query(self.norm(rows)).unflatten(-1, (self.n_heads, -1)))
        return self.gate.to(rows.dtype) * self.to_out(cross_attend(query, *keys_values, layout))


class PlainBlock(nn.Module):
    """Pre-norm attention and MLP, with adaLN-Zero (arXiv 2212.09748) or weighted RMS norms; linear
    layers have no biases."""

    def __init__(self, config: PlainConfig):
        super().__init__()
        width, inner = config.hidden_size, int(config.hidden_size * config.mlp_ratio)
        self.n_heads, self.causal, head_dim = (
            config.n_heads,
            config.causal,
            width // config.n_heads,
        )
        self.modulation = (
            Modulation(config.cond_width, width, 2 * KINDS) if config.is_modulated else None
        )
        self.attention_norm = None if config.is_modulated else RMSNorm(width)
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.query_norm = RMSNorm(head_dim) if config.qk_rmsnorm else nn.Identity()
        self.key_norm = RMSNorm(head_dim) if config.qk_rmsnorm else nn.Identity()
        self.to_out = nn.Linear(width, width, bias=False)
        crosses = config.conditioning == "cross_attention"
        self.cross = CrossAttention(width, config.n_heads, config.qk_rmsnorm) if crosses else None
        self.mlp_norm = None if config.is_modulated else RMSNorm(width)
        self.mlp_in = nn.Linear(width, inner, bias=False)
        self.mlp_out = nn.Linear(inner, width, bias=False)

    def forward(
        self,
        rows: Tensor,
        condition: Tensor | None,
        layout: Layout,
        latent: Tensor | KeysValues | None = None,
        kept: Tensor | None = None,
        dropout: RowDropout | None = None,
    ) -> Tensor:
        """Run the block.

        Args:
            rows: [R, H].
            condition: SiLU'd conditioning vector, under adaLN. [B, C]
            layout: of the rows.
            latent: tokens [B, M, H] for cross-attention, or this block's keys and values of them.
            kept: rows whose output is used, for the last block. None: all. [Q]
            dropout: of the outputs of attention, cross-attention and MLP in this layer, for all
                rows. None: none.

        Returns:
            [R, H], or [Q, H].
        """
        table = None if self.modulation is None else self.modulation(condition)
        query, key, value = self._queries_keys_values(rows, table, layout)
        mixed = attend(
            rotate(query, layout.rotation),
            rotate(key, layout.rotation),
            value,
            layout,
            self.causal,
        )
        return self._finish(rows, mixed, table, layout, latent, kept, dropout)

    def forward_cached(
        self,
        rows: Tensor,
        condition: Tensor | None,
        layout: Layout,
        latent: KeysValues | None,
        past: KeysValues,
        length: int,
    ) -> Tensor:
        """Run the block on S new rows of every sample, which see the `length` positions before
        them.

        Args:
            rows: [B * S, H]. condition, latent: as in `forward`.
            layout: of the new rows alone.
            past: buffers [B, heads, capacity, head_dim]; the new keys and values are written at
                `length`.
            length: positions in the buffers that are filled.
        """
        table = None if self.modulation is None else self.modulation(condition)
        query, key, value = self._queries_keys_values(rows, table, layout)
        query, key = rotate(query, layout.rotation), rotate(key, layout.rotation)
        query, key, value = (
            x.unflatten(0, (layout.batch, -1)).transpose(1, 2) for x in (query, key, value)
        )
        end = length + layout.width
        for buffer, new in zip(past, (key, value)):
            buffer[:, :, length:end] = new
        mask = None
        if layout.width > 1:
            mask = torch.ones(layout.width, end, dtype=torch.bool, device=rows.device).tril(length)
        mixed = F.scaled_dot_product_attention(
            query, past[0][:, :, :end], past[1][:, :, :end], attn_mask=mask
        )
        return self._finish(
            rows, mixed.transpose(1, 2).flatten(0, 1).flatten(1), table, layout, latent, None
        )

    def _queries_keys_values(
        self, rows: Tensor, table: Tensor | None, layout: Layout
    ) -> tuple[Tensor, ...]:
        if table is None:
            hidden = self.attention_norm(rows)
        else:
            hidden = _modulated_norm(
                rows, *of_rows(table[:, : 2 * rows.shape[1]], layout.sample, 2)
            )
        query, key, value = self.to_qkv(hidden).unflatten(-1, (3, self.n_heads, -1)).unbind(1)
        return self.query_norm(query), self.key_norm(key), value

    def _finish(
        self,
        rows: Tensor,
        mixed: Tensor,
        table: Tensor | None,
        layout: Layout,
        latent: Tensor | KeysValues | None,
        kept: Tensor | None,
        dropout: RowDropout | None = None,
    ) -> Tensor:
        """All behind self-attention; of the kept rows only, as soon as cross-attention needs no
        others.
        """
        sample, width = layout.sample, rows.shape[1]
        if kept is not None and self.cross is None:
            dropout = None if dropout is None else dropout.select(kept)
            rows, mixed, sample, kept = rows[kept], mixed[kept], sample[kept], None
        gate = None if table is None else of_rows(table[:, 2 * width : 3 * width], sample, 1)[0]
        rows = _add(rows, _drop(self.to_out(mixed), dropout, ATTENTION), gate)
        if self.cross is not None:
            keys_values = latent if isinstance(latent, tuple) else self.cross.keys_values(latent)
            rows = rows + _drop(self.cross(rows, keys_values, layout), dropout, CROSS)
        if kept is not None:
            dropout = None if dropout is None else dropout.select(kept)
            rows, sample = rows[kept], sample[kept]
        if table is None:
            return rows + _drop(
                self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(rows)))), dropout, MLP
            )
        shift, scale, gate = of_rows(table[:, 3 * width :], sample, 3)
        outer = self.mlp_out(F.gelu(self.mlp_in(_modulated_norm(rows, shift, scale))))
        return _add(rows, _drop(outer, dropout, MLP), gate)


def _modulated_norm(rows: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    normal = F.layer_norm(rows, (rows.shape[-1],), eps=NORM_EPS)
    return modulate(normal, shift.to(normal.dtype), scale.to(normal.dtype)).to(rows.dtype)


def _drop(branch: Tensor, dropout: RowDropout | None, place: int) -> Tensor:
    return branch if dropout is None else dropout.drop(branch, place)


def _add(rows: Tensor, branch: Tensor, gate: Tensor | None) -> Tensor:
    return (
        rows + branch
        if gate is None
        else torch.addcmul(rows, gate.to(rows.dtype), branch.to(rows.dtype))
    )


def of_rows(table: Tensor, sample: Tensor, parts: int) -> tuple[Tensor, ...]:
    """[B, parts * H] -> parts times [R, H]; an embedding, whose gradient sums without races."""
    return embedding(table.contiguous(), sample).chunk(parts, dim=-1)
