"""PlainTransformer: text tokens in, token distributions out, given a latent or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmldlm.models.base import (
    BaseTransformer,
    EncodedLatent,
    LatentInputs,
    ModelOutput,
    TextInputs,
)
from mmldlm.models.dropout import ATTENTION, CROSS, MLP, RowDropout
from mmldlm.models.layers import (
    NORM_EPS,
    Modulation,
    TimestepEmbedding,
    apply_null_condition,
    embed_ids,
    embedding,
    modulate,
    product_dtype,
    random_parameter,
)
from mmldlm.models.packing import computed_text, packed_values, rows_of_positions
from mmldlm.models.plain_config import PlainConfig
from mmldlm.models.plain_layout import (
    Layout,
    attend,
    cross_attend,
    lay_out,
    rotate,
    rotations,
    row_positions,
)
from mmldlm.models.token_scores import TokenQuery, TokenScores, score_tokens
from mmldlm.utils.validation import not_none

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of M tokens, each [B, M, heads, head_dim]."""


# -- encoders -------------------------------------------------------------------------------------


class LatentTokens(nn.Module):
    """N latents of D -> N * K chunk tokens, as LatentEncoder (mmdit.py) makes them."""

    def __init__(self, config: PlainConfig):
        super().__init__()
        self.chunks, self.hidden_size = chunks, width = config.chunks, config.hidden_size
        self.to_tokens = nn.Linear(not_none(config.latent_dim), chunks * width)
        self.chunk_position = random_parameter(chunks, width)
        self.latent_position = random_parameter(config.num_latents, 1, width)
        self.null_tokens = random_parameter(chunks, width)

    def forward(self, latents: Tensor, is_null: Tensor | None) -> Tensor:
        """[B, N, D], [B] bool -> [B, N * K, H]."""
        batch, count, _ = latents.shape
        tokens = self.to_tokens(latents.to(self.chunk_position.dtype)).view(
            batch, count, self.chunks, self.hidden_size
        )
        if is_null is not None:
            tokens = apply_null_condition(tokens, self.null_tokens, is_null)
        return (tokens + self.chunk_position + self.latent_position[:count]).flatten(1, 2)


class PooledLatent(nn.Module):
    """N latents of D -> one vector of C, their mean."""

    def __init__(self, config: PlainConfig):
        super().__init__()
        dim, cond = not_none(config.latent_dim), config.cond_width
        self.to_pooled = nn.Sequential(nn.Linear(dim, cond), nn.SiLU(), nn.Linear(cond, cond))
        self.null_pooled = nn.Parameter(torch.zeros(cond))

    def forward(self, latents: Tensor, is_null: Tensor | None) -> Tensor:
        """[B, N, D], [B] bool -> [B, C]."""
        pooled = self.to_pooled(latents.to(self.null_pooled.dtype)).mean(dim=1)
        return (
            pooled if is_null is None else apply_null_condition(pooled, self.null_pooled, is_null)
        )


# -- block ----------------------------------------------------------------------------------------


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
        """Keys and values of latent tokens [B, M, H], which sampling computes once."""
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
        self.n_heads = config.n_heads
        self.causal = config.causal
        head_dim = width // config.n_heads
        # Those of attention, then of the MLP.
        kinds = 2 * ("shift", "scale", "gate")
        self.modulation = None
        if config.is_modulated:
            self.modulation = Modulation(config.cond_width, width, kinds)
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
            rows: Rows before the block. [R, H]
            condition: SiLU'd conditioning vector, under adaLN. [B, C]
            layout: Layout of the rows.
            latent: For cross-attention, tokens [B, M, H] or this block's keys and values of them.
            kept: Rows whose output is used, for the last block; None: all. [Q]
            dropout: Dropout of this layer, for all rows; None: none.

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
            rows: New rows. [B * S, H]
            condition, latent: As in `forward`.
            layout: Layout of the new rows alone.
            past: Buffers of keys and values, into which the new ones are written at `length`. [B,
                heads, capacity, head_dim]
            length: Number of filled positions in the buffers.
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
            assert self.attention_norm is not None
            hidden = self.attention_norm(rows)
        else:
            shift, scale = of_rows(table[:, : 2 * rows.shape[1]], layout.sample, 2)
            hidden = _modulated_norm(rows, shift, scale)
        query, key, value = self.to_qkv(hidden).unflatten(-1, (3, self.n_heads, -1)).unbind(1)
        return self.query_norm(query), self.key_norm(key), value

    def _finish(
        self,
        rows: Tensor,
        mixed: Tensor,
        table: Tensor | None,
        layout: Layout,
        latent: Tensor | KeysValues | None,
        kept_rows: Tensor | None,
        dropout: RowDropout | None = None,
    ) -> Tensor:
        """All behind self-attention; of the kept rows only, as soon as cross-attention needs no
        others.
        """
        sample, width = layout.sample, rows.shape[1]
        if kept_rows is not None and self.cross is None:
            dropout = None if dropout is None else dropout.select(kept_rows)
            rows = rows[kept_rows]
            mixed = mixed[kept_rows]
            sample = sample[kept_rows]
            kept_rows = None
        gate = None if table is None else of_rows(table[:, 2 * width : 3 * width], sample, 1)[0]
        rows = _add(rows, _drop(self.to_out(mixed), dropout, ATTENTION), gate)
        if self.cross is not None:
            assert latent is not None
            keys_values = latent if isinstance(latent, tuple) else self.cross.keys_values(latent)
            rows = rows + _drop(self.cross(rows, keys_values, layout), dropout, CROSS)
        if kept_rows is not None:
            dropout = None if dropout is None else dropout.select(kept_rows)
            rows, sample = rows[kept_rows], sample[kept_rows]
        if table is None:
            assert self.mlp_norm is not None
            outer = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(rows))))
            return rows + _drop(outer, dropout, MLP)
        shift, scale, gate = of_rows(table[:, 3 * width :], sample, 3)
        outer = self.mlp_out(F.gelu(self.mlp_in(_modulated_norm(rows, shift, scale))))
        return _add(rows, _drop(outer, dropout, MLP), gate)


def _modulated_norm(rows: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    normal = F.layer_norm(rows, (rows.shape[-1],), eps=NORM_EPS)
    return modulate(normal, shift.to(normal.dtype), scale.to(normal.dtype)).to(rows.dtype)


def _drop(branch: Tensor, dropout: RowDropout | None, site: int) -> Tensor:
    return branch if dropout is None else dropout.drop(branch, site)


def _add(rows: Tensor, branch: Tensor, gate: Tensor | None) -> Tensor:
    return (
        rows + branch
        if gate is None
        else torch.addcmul(rows, gate.to(rows.dtype), branch.to(rows.dtype))
    )


def of_rows(table: Tensor, sample: Tensor, parts: int) -> tuple[Tensor, ...]:
    """[B, parts * H] -> parts times [R, H]; an embedding, whose gradient sums without races."""
    return embedding(table.contiguous(), sample).chunk(parts, dim=-1)


# -- head -----------------------------------------------------------------------------------------


class PlainTextHead(nn.Module):
    """A norm (adaLN or weighted), then a linear layer over the vocabulary."""

    def __init__(self, config: PlainConfig):
        super().__init__()
        width = config.hidden_size
        self.mask_token_id = not_none(config.mask_token_id)
        self.modulation = None
        if config.is_modulated:
            self.modulation = Modulation(config.cond_width, width, ("shift", "scale"))
        self.norm = None if config.is_modulated else RMSNorm(width)
        self.weight = random_parameter(not_none(config.vocab_size), width)
        self.bias = nn.Parameter(torch.zeros(not_none(config.vocab_size)))

    def forward(
        self, rows: Tensor, sample: Tensor, condition: Tensor | None, query: TokenQuery
    ) -> TokenScores:
        """Answer the query, whose positions have the rows [M, H] of the samples [M]."""
        if self.modulation is None:
            assert self.norm is not None
            rows = self.norm(rows)
        else:
            shift, scale = of_rows(self.modulation(condition), sample, 2)
            rows = F.layer_norm(rows, (rows.shape[-1],), eps=NORM_EPS).to(rows.dtype)
            rows = modulate(rows, shift.to(rows.dtype), scale.to(rows.dtype))
        return score_tokens(rows, self.weight, self.bias, query, self.mask_token_id)


# -- model ----------------------------------------------------------------------------------------


class PlainTransformer(BaseTransformer):
    """One-stream transformer over text (causal or bidirectional), given a latent as
    `config.conditioning` says.

    RoPE on text, QK-RMSNorm, pre-norm blocks with or without adaLN-Zero (DiT, arXiv 2212.09748). A
    causal model reads at each position the token before it (at the first one a learned start) and
    scores the position's own token.

    Args:
        config: Shape and vocabulary; latent_dim, vocab_size and the token ids must be set.

    Raises:
        UserError: one of those is missing.
    """

    config_class: ClassVar[type[PlainConfig]] = PlainConfig
    config: PlainConfig
    blocks: Sequence[PlainBlock]

    def __init__(self, config: PlainConfig):
        super().__init__(config)
        width, cond = config.hidden_size, config.cond_width
        num_ids = not_none(config.vocab_size) + config.extra_input_tokens
        self.token_embedding = nn.Embedding(num_ids, width)
        self.start_token = random_parameter(width) if config.causal else None
        self.latent_tokens = self.latent_pooled = self.null_length = None
        if config.has_latent_tokens:
            self.latent_tokens = LatentTokens(config)
        if config.pools_latent:
            self.latent_pooled = PooledLatent(config)
        self.timestep = TimestepEmbedding(cond) if config.reads_time else None
        blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.n_blocks))
        self.blocks = cast("Sequence[PlainBlock]", blocks)
        self.text_head = PlainTextHead(config)
        self.length_head = None
        if config.has_length_head:
            self.length_head = nn.Sequential(
                nn.SiLU(), nn.Linear(cond, cond), nn.SiLU(), nn.Linear(cond, config.max_seq_len)
            )
            if not config.pools_latent:
                self.null_length = nn.Parameter(torch.zeros(cond))
        self._initialize()

    @torch.no_grad()
    def _initialize(self) -> None:
        self.initialize_layers()
        branches = 1.0 if self.config.is_modulated else (2 * self.config.n_blocks) ** -0.5
        for block in self.blocks:
            for weight in block.to_qkv.weight.chunk(3):
                nn.init.xavier_uniform_(weight)
            if block.cross is not None:
                for weight in block.cross.to_key_value.weight.chunk(2):
                    nn.init.xavier_uniform_(weight)
            # Without gates the residual stream would grow with the depth (GPT-2).
            block.to_out.weight.mul_(branches)
            block.mlp_out.weight.mul_(branches)
        if self.config.tie_embeddings:
            self.text_head.weight = cast("nn.Parameter", self.token_embedding.weight)

    # -- forward

    def encode_latents(
        self, latents: LatentInputs | None, batch: int | None = None, caches: bool = False
    ) -> EncodedLatent:
        """Encode latents as the blocks read them, for `forward`; nothing in an unconditional
        model.

        Args:
            latents: Clean latents; None: the learned null, of `batch` samples.
            batch: B, without latents.
            caches: Whether to compute the keys and values of all cross-attentions, too (for
                sampling).

        Raises:
            ValueError: shapes that do not fit the config, or latents for a model that reads none.
        """
        config = self.config
        if config.conditioning == "none":
            if latents is not None:
                raise ValueError(
                    "this model is unconditional (model.conditioning=none): it reads no latents"
                )
            return EncodedLatent()
        points, timesteps, is_null = self.latent_points(latents, batch)
        if timesteps is not None:
            raise ValueError("PlainTransformer reads clean latents: they have no timesteps")
        tokens = None if self.latent_tokens is None else self.latent_tokens(points, is_null)
        pooled = None if self.latent_pooled is None else self.latent_pooled(points, is_null)
        keys_values = None
        if caches and tokens is not None and config.conditioning == "cross_attention":
            keys_values = tuple(not_none(block.cross).keys_values(tokens) for block in self.blocks)
        return EncodedLatent(tokens, pooled, keys_values)

    def forward(
        self,
        text: TextInputs | None,
        latents: LatentInputs | EncodedLatent | None = None,
        query: TokenQuery | None = None,
        *,
        dropout_keys: Tensor | None = None,
    ) -> ModelOutput:
        """Token distributions and length; a call of MultimodalMMDiT, for text alone.

        Args:
            text: Texts. A causal model takes the clean tokens, too: what stands at a position
                changes the logits of later ones only. Timesteps are read with model.reads_time.
                None: length_logits alone.
            latents: Clean latents, or what `encode_latents` made of them. None: the learned null.
            query: Text positions to score; None: logits of all.
            dropout_keys: int64, random, one per sample; needed in training with model.dropout,
                unused otherwise. [B]

        Raises:
            ValueError: on shapes that do not fit the config, latents for a model that reads none,
                dropout without keys, or (on a CPU) a scored position that is padding.
        """
        if text is None:
            assert isinstance(latents, LatentInputs), "without a text there are latents"
            return ModelOutput(length_logits=self.length_logits(latents))
        self.check_text(text)
        tokens, batch = text.tokens, len(text.tokens)
        encoded = latents
        if not isinstance(encoded, EncodedLatent):
            encoded = self.encode_latents(encoded, batch)
        condition = self.condition(encoded, text.timesteps, batch)

        query = TokenQuery() if query is None else query
        # Without positions all logits are computed, those of padding included.
        scored = query.positions
        computed, mask = computed_text(text, leaves_padding=scored is not None)
        rows = self._text_rows(tokens, computed)
        prefix = encoded.tokens if self.config.conditioning == "prefix" else None
        layout = self._lay_out(computed, mask, tokens, prefix, product_dtype(rows))
        if prefix is not None and layout.order is not None:
            both = torch.cat([prefix.flatten(0, 1).to(rows.dtype), rows])
            rows = both.index_select(0, layout.order)
        kept_rows = layout.text_rows
        if scored is not None:
            text_rows = rows_of_positions(scored, computed)
            kept_rows = text_rows if kept_rows is None else kept_rows.index_select(0, text_rows)
        dropout = self._dropout(dropout_keys, computed, tokens, prefix, layout)
        rows = self._run_blocks(rows, condition, layout, encoded, kept_rows, dropout)

        sample = layout.sample if kept_rows is None else layout.sample.index_select(0, kept_rows)
        scores = self.text_head(rows, sample, condition, query)
        if scored is None and scores.logits is not None:
            scores = scores._replace(logits=scores.logits.view(*tokens.shape, -1))
        length_logits = None
        if self.length_head is not None:
            length_logits = self._length_logits(encoded, batch)
        return ModelOutput(scores, length_logits=length_logits)

    def length_logits(self, latents: LatentInputs | None, batch: int | None = None) -> Tensor:
        """[B, max_seq_len] fp32 logits of the lengths 1.. alone, without a pass through the
        blocks.
        """
        count = batch if latents is None else len(latents.values)
        assert count is not None, "batch is needed without latents"
        return self._length_logits(self.encode_latents(latents, count), count)

    def _length_logits(self, encoded: EncodedLatent, batch: int) -> Tensor:
        assert self.length_head is not None, "a causal model has no length head"
        pooled = encoded.pooled
        if pooled is None:
            pooled = not_none(self.null_length).expand(batch, -1)
        return self.length_head(pooled).float()

    def condition(
        self, encoded: EncodedLatent, timesteps: Tensor | None, batch: int
    ) -> Tensor | None:
        """[B, C] SiLU'd sum of the timestep's embedding and the pooled latent, as far as the
        blocks read them.
        """
        if not self.config.is_modulated:
            return None
        parts = []
        if self.timestep is not None:
            clean = (
                torch.zeros(batch, device=self.latent_mean.device)
                if timesteps is None
                else timesteps
            )
            parts.append(self.timestep(clean))
        if self.config.conditioning == "adaln" or self.config.reads_pooled:
            parts.append(not_none(encoded.pooled))
        return nn.functional.silu(sum(parts[1:], parts[0]))

    def _lay_out(
        self,
        computed: Tensor | None,
        mask: Tensor | None,
        tokens: Tensor,
        prefix: Tensor | None,
        dtype: torch.dtype,
    ) -> Layout:
        head_dim = self.config.hidden_size // self.config.n_heads
        # A loop over lengths would be compiled again for every batch.
        may_loop = not self._blocks_are_compiled
        num_prefix = 0 if prefix is None else prefix.shape[1]
        shape = (tokens.shape[0], tokens.shape[1])
        layout = lay_out(
            computed, mask, shape, num_prefix, head_dim, dtype, tokens.device, may_loop
        )
        if self._blocks_are_compiled:
            # Else a batch of head_dim / 2 samples would be taken for the same size.
            torch._dynamo.mark_static(layout.rotation, [1, 2, 3])
        return layout

    def _dropout(
        self,
        keys: Tensor | None,
        computed: Tensor | None,
        tokens: Tensor,
        prefix: Tensor | None,
        layout: Layout,
    ) -> RowDropout | None:
        """Dropout of all rows, where this pass has any."""
        rate = self.config.dropout if self.training else 0.0
        if rate == 0:
            return None
        if keys is None:
            raise ValueError("model.dropout needs dropout_keys in training (or model.eval())")
        num_prefix = 0 if prefix is None else prefix.shape[1]
        sites = 3 if self.config.conditioning == "cross_attention" else 2
        shape = (tokens.shape[0], tokens.shape[1])
        position = row_positions(computed, shape, num_prefix, layout.order, tokens.device)
        return RowDropout.of_rows(keys, layout.sample, position, len(self.blocks), rate, sites)

    def _text_rows(self, tokens: Tensor, computed: Tensor | None) -> Tensor:
        """[N, H] embeddings of the text; a causal model reads it one position late."""
        if self.start_token is not None:
            tokens = nn.functional.pad(tokens[:, :-1], (1, 0))
        rows = self.embed(packed_values(tokens, computed))
        if self.start_token is None:
            return rows
        first = torch.arange(0, tokens.numel(), tokens.shape[1], device=tokens.device)
        first = first if computed is None else torch.searchsorted(computed, first)
        return rows.index_copy(0, first, self.start_token.to(rows.dtype).expand(len(first), -1))

    def embed(self, ids: Tensor) -> Tensor:
        """[N] -> [N, H]."""
        rows = embed_ids(self.token_embedding, ids)
        scale = self.config.token_embedding_scale
        return rows if scale == 1 else rows * scale

    def _run_blocks(
        self,
        rows: Tensor,
        condition: Tensor | None,
        layout: Layout,
        encoded: EncodedLatent,
        kept: Tensor | None,
        dropout: RowDropout | None,
    ) -> Tensor:
        """[R, H] -> [Q, H], the kept rows."""
        checkpointed = self.config.recomputed_blocks if torch.is_grad_enabled() else range(0)
        crosses = self.config.conditioning == "cross_attention"
        # Compiled, the last block would need a graph of its own.
        last = None if self._blocks_are_compiled else len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            latent = None
            if crosses:
                latent = encoded.tokens if encoded.keys_values is None else encoded.keys_values[i]
            layer_dropout = None if dropout is None else dropout.of_layer(i)
            arguments = (
                rows,
                condition,
                layout,
                latent,
                kept if i == last else None,
                layer_dropout,
            )
            if i in checkpointed:
                # There are no random numbers to keep, and reading their state would make the host
                # wait.
                rows = checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                rows = block(*arguments)
        return rows if last is not None or kept is None else rows.index_select(0, kept)


# -- one token after the other --------------------------------------------------------------------


@dataclass
class TextCache:
    """Keys and values of B texts of equal length (and of their prefixes).

    Attributes:
        latent: Latents of the samples.
        past: Buffers of each block, each [B, heads, capacity, head_dim].
        prefix: Number of rows before the text.
        length: Number of filled positions, the prefix among them.
    """

    latent: EncodedLatent
    past: list[KeysValues]
    prefix: int
    length: int = 0

    @property
    def batch(self) -> int:
        """B."""
        return self.past[0][0].shape[0]

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) the texts rows [B'] int64: finished texts leave, beams are
        reordered.
        """
        self.past = [
            (key.index_select(0, rows), value.index_select(0, rows)) for key, value in self.past
        ]
        self.latent = self.latent.select(rows)


def start_text(
    model: PlainTransformer,
    latents: Tensor | None,
    batch: int | None = None,
) -> TextCache:
    """Return the cache of B empty texts; the prefix is computed here.

    Args:
        model: Causal model.
        latents: In model space; None: the null latent, or an unconditional model. [B, D] or [B, N,
            D]
        batch: B, without latents.
    """
    config = model.config
    assert config.causal, "only a causal model keeps keys and values"
    inputs = None if latents is None else LatentInputs(latents)
    count = batch if latents is None else len(latents)
    assert count is not None, "batch is needed without latents"
    encoded = model.encode_latents(inputs, count, caches=True)
    tokens = encoded.tokens if config.conditioning == "prefix" else None
    prefix = 0 if tokens is None else tokens.shape[1]
    capacity, head_dim = prefix + config.max_seq_len, config.hidden_size // config.n_heads
    new = not_none(model.start_token).new_empty
    shape = (count, config.n_heads, capacity, head_dim)
    cache = TextCache(encoded, [(new(shape), new(shape)) for _ in model.blocks], prefix)
    if tokens is not None:
        _extend(model, tokens.flatten(0, 1), cache, prefix)
    return cache


def next_logits(model: PlainTransformer, cache: TextCache, tokens: Tensor | None = None) -> Tensor:
    """Logits of the next token of each text.

    Args:
        cache: Cache of the texts so far; it is extended in place.
        tokens: Last token of each text, which the cache does not have yet; None: the texts are
            empty. [B] int64

    Returns:
        [B, V] fp32, -inf for [MASK].
    """
    if tokens is None:
        rows = not_none(model.start_token).expand(cache.batch, -1)
    else:
        rows = model.embed(tokens)
    rows = _extend(model, rows, cache, 1)
    sample = torch.arange(cache.batch, device=rows.device)
    condition = model.condition(cache.latent, None, cache.batch)
    return not_none(model.text_head(rows, sample, condition, TokenQuery()).logits)


def _extend(model: PlainTransformer, rows: Tensor, cache: TextCache, steps: int) -> Tensor:
    """Run the blocks on `steps` new rows of each text, [B * steps, H]."""
    config, device = model.config, rows.device
    table = rotations(
        config.max_seq_len, cache.prefix, config.hidden_size // config.n_heads, device
    )
    rotation = table[cache.length : cache.length + steps].repeat(cache.batch, 1, 1, 1)
    sample = torch.arange(cache.batch, device=device).repeat_interleave(steps)
    layout = Layout(cache.batch, steps, sample, None, None, rotation)
    condition = model.condition(cache.latent, None, cache.batch)
    for i, block in enumerate(model.blocks):
        latent = None if cache.latent.keys_values is None else cache.latent.keys_values[i]
        rows = block.forward_cached(rows, condition, layout, latent, cache.past[i], cache.length)
    cache.length += steps
    return rows
