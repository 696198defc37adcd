"""PlainTransformer: text tokens in, token distributions out, given a latent or not."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmldlm.models.dropout import RowDropout
from mmldlm.models.embedding import embedding
from mmldlm.models.latent_transformer import EncodedLatent, LatentTransformer, rows_of_positions
from mmldlm.models.layers import Modulation, TimestepEmbedding, compute_dtype, has_no_hooks
from mmldlm.models.linear_cross_entropy import Candidates
from mmldlm.models.plain.block import PlainBlock
from mmldlm.models.plain.config import PlainConfig
from mmldlm.models.plain.encoders import LatentTokens, PooledLatent
from mmldlm.models.plain.head import LogitsFunction, PlainTextHead
from mmldlm.models.plain.layout import Layout, lay_out, row_positions


class PlainTransformer(LatentTransformer):
    """One-stream transformer over text (causal or bidirectional), given a latent as
    `config.conditioning` says.

    RoPE on text, QK-RMSNorm, pre-norm blocks with or without adaLN-Zero (DiT, arXiv 2212.09748). A
    causal model reads at each position the token before it (at the first one a learned start) and
    scores the position's own token.

    Args:
        config: shape and vocabulary; latent_dim, vocab_size and the token ids must be set.

    Raises:
        UserError: one of those is missing or out of range.
    """

    def __init__(self, config: PlainConfig):
        super().__init__(config)
        width, cond, dim = config.hidden_size, config.cond_width, config.latent_dim
        self.token_embedding = nn.Embedding(config.vocab_size + config.extra_input_tokens, width)
        self.start_token = nn.Parameter(torch.randn(width) * 0.02) if config.causal else None
        self.latent_tokens = self.latent_pooled = self.null_length = None
        if config.has_latent_tokens:
            self.latent_tokens = LatentTokens(dim, config.chunks, config.num_latents, width)
        if config.pools_latent:
            self.latent_pooled = PooledLatent(dim, cond)
        self.timestep = TimestepEmbedding(cond) if config.reads_time else None
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.n_blocks))
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
        for module in self.modules():
            if isinstance(module, Modulation):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
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
            self.text_head.weight = self.token_embedding.weight

    # -- latents
    # ---------------------------------------------------------------------------------------------

    def encode_latents(
        self,
        latents: Tensor | None,
        is_null: Tensor | None = None,
        batch: int | None = None,
        caches: bool = False,
    ) -> EncodedLatent | None:
        """Latents as the blocks read them, for `forward(encoded=...)`; None in an unconditional
        model.

        Args:
            latents: in model space. None: the learned null, for `batch` samples. [B, D] or [B, N,
                D]
            is_null: bool, samples whose latents are replaced by the learned null. [B]
            batch: B, without latents.
            caches: compute the keys and values of all cross-attentions, too (sampling).

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
        if latents is None:
            device = self.latent_mean.device
            latents = torch.zeros(batch, config.num_latents, config.latent_dim, device=device)
            is_null = torch.ones(batch, dtype=torch.bool, device=device)
        points = latents[:, None] if latents.dim() == 2 else latents
        self.check_latents(points)
        tokens = None if self.latent_tokens is None else self.latent_tokens(points, is_null)
        pooled = None if self.latent_pooled is None else self.latent_pooled(points, is_null)
        keys_values = None
        if caches and config.conditioning == "cross_attention":
            keys_values = tuple(block.cross.keys_values(tokens) for block in self.blocks)
        return EncodedLatent(tokens, pooled, keys_values)

    # -- forward
    # ---------------------------------------------------------------------------------------------

    def forward(
        self,
        text_tokens: Tensor | None,
        latents: Tensor | None = None,
        text_timesteps: Tensor | None = None,
        latent_timesteps: None = None,
        attention_mask: Tensor | None = None,
        *,
        latent_is_null: Tensor | None = None,
        token_positions: Tensor | None = None,
        text_positions: Tensor | None = None,
        text_targets: Tensor | None = None,
        text_weights: Tensor | None = None,
        text_candidates: Candidates | None = None,
        text_function: LogitsFunction | None = None,
        encoded: EncodedLatent | None = None,
        dropout_keys: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Token distributions; the contract of MultimodalMMDiT.forward for text alone.

        Args:
            text_tokens: int64, S <= max_seq_len. A causal model takes the clean tokens, too: what
                stands at a position changes the logits of later ones only. None: length_logits
                alone. [B, S]
            latents: in model space, clean. None: the learned null latent. [B, D] or [B, N, D]
            text_timesteps: in [0, 1]; read if config.reads_time. None: 0. [B]
            latent_timesteps: None (a place that MultimodalMMDiT has).
            attention_mask: bool, True for real tokens, which padding follows. None: all real. [B,
                S]
            latent_is_null: bool, samples whose latents are replaced by the learned null. [B]
            token_positions: int64 indices into B * S, ascending, of the real tokens. With
                text_positions, only these are computed. None: found from the mask on a CPU; on a
                GPU padding is computed, too. [N]
            text_positions: int64 indices into B * S of the logits to compute, real tokens. None:
                all of B * S. [M]
            text_targets: int64 clean tokens at text_positions (None: at all of B * S, flat); their
                NLLs are returned instead of logits. [M]
            text_weights: fp32 weight of each target in text_loss_sum. [M] text_candidates: see
                Candidates.
            text_function: function of chunks of the logits (head.py), whose results are returned
                instead of them: a loss over the vocabulary that never holds [M, V], forward or
                backward. It must read no random numbers.
            encoded: result of `encode_latents` in place of latents.
            dropout_keys: int64, random, of each sample; needed in training with model.dropout,
                unused otherwise. [B]

        Returns:
            text_logits: fp32 with -inf for [MASK]; absent with targets or a function. [M, V], or
                [B, S, V] without positions
            text_loss_sum (fp32 scalar), text_nll and text_correct [M]: with targets.
            text_function [M, ...]: with a function.
            length_logits: of lengths 1..max_seq_len (EOS counted), given the latent; absent in a
                causal model. [B, max_seq_len]

        Raises:
            ValueError: on shapes that do not fit the config, latents for a model that reads none,
                dropout without keys, or (on a CPU) a scored position that is padding.
        """
        if latent_timesteps is not None:
            raise ValueError("PlainTransformer reads clean latents: latent_timesteps must be None")
        if text_tokens is None:
            return {"length_logits": self.length_logits(latents)}
        self.check_length(text_tokens)
        if encoded is None:
            encoded = self.encode_latents(latents, latent_is_null, len(text_tokens))
        condition = self.condition(encoded, text_timesteps, len(text_tokens))
        selects = text_positions is not None
        packed, mask = self._packed_positions(
            text_tokens, attention_mask, token_positions, selects
        )
        rows = self._text_rows(text_tokens, packed)
        prefix = encoded.tokens if self.config.conditioning == "prefix" else None
        layout = self._lay_out(packed, mask, text_tokens, prefix, compute_dtype(rows))
        if prefix is not None:
            rows = torch.cat([prefix.flatten(0, 1).to(rows.dtype), rows]).index_select(
                0, layout.order
            )
        kept = layout.text_rows
        if selects:
            text_rows = rows_of_positions(text_positions, packed)
            kept = text_rows if kept is None else kept.index_select(0, text_rows)
        dropout = self._dropout(dropout_keys, packed, text_tokens, prefix, layout)
        rows = self._run_blocks(rows, condition, layout, encoded, kept, dropout)
        sample = layout.sample if kept is None else layout.sample.index_select(0, kept)
        out = self.text_head(
            rows, sample, condition, text_targets, text_weights, text_candidates, text_function
        )
        if not selects and "text_logits" in out:
            out["text_logits"] = out["text_logits"].view(*text_tokens.shape, -1)
        if self.length_head is not None:
            out["length_logits"] = self._length_logits(encoded, len(text_tokens))
        return out

    def length_logits(self, latents: Tensor | None, batch: int | None = None) -> Tensor:
        """[B, max_seq_len] fp32 logits of the lengths 1.. alone, without a pass through the
        blocks.
        """
        count = batch if latents is None else len(latents)
        return self._length_logits(self.encode_latents(latents, None, count), count)

    def _length_logits(self, encoded: EncodedLatent, batch: int) -> Tensor:
        pooled = self.null_length.expand(batch, -1) if encoded.pooled is None else encoded.pooled
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
            parts.append(encoded.pooled)
        return nn.functional.silu(sum(parts[1:], parts[0]))

    @staticmethod
    def _packed_positions(
        tokens: Tensor, mask: Tensor | None, positions: Tensor | None, selects: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Which positions of the text [B, S] are computed ([N], None for all), and which may be
        attended to.
        """
        mask = None if mask is None else mask.bool()
        if not selects:
            return None, mask
        if positions is None and mask is not None and mask.device.type == "cpu":
            positions = mask.flatten().nonzero()[:, 0]
        if positions is not None and len(positions) == tokens.numel():
            return None, None
        return positions, mask

    def _lay_out(
        self,
        packed: Tensor | None,
        mask: Tensor | None,
        tokens: Tensor,
        prefix: Tensor | None,
        dtype: torch.dtype,
    ) -> Layout:
        head_dim = self.config.hidden_size // self.config.n_heads
        may_loop = (
            not self._blocks_are_compiled
        )  # a loop over lengths would be compiled again for every batch
        num_rows, shape = (
            0 if prefix is None else prefix.shape[1],
            (tokens.shape[0], tokens.shape[1]),
        )
        layout = lay_out(packed, mask, shape, num_rows, head_dim, dtype, tokens.device, may_loop)
        if (
            self._blocks_are_compiled
        ):  # else a batch of head_dim / 2 samples would be taken for the same size
            torch._dynamo.mark_static(layout.rotation, (1, 2, 3))
        return layout

    def _dropout(
        self,
        keys: Tensor | None,
        packed: Tensor | None,
        tokens: Tensor,
        prefix: Tensor | None,
        layout: Layout,
    ) -> RowDropout | None:
        """Dropout of all rows, where this pass has any."""
        rate = self.dropout_rate(keys)
        if rate == 0:
            return None
        num_prefix = 0 if prefix is None else prefix.shape[1]
        places = 3 if self.config.conditioning == "cross_attention" else 2
        shape = (tokens.shape[0], tokens.shape[1])
        position = row_positions(packed, shape, num_prefix, layout.order, tokens.device)
        return RowDropout.of_rows(keys, layout.sample, position, len(self.blocks), rate, places)

    def _text_rows(self, tokens: Tensor, packed: Tensor | None) -> Tensor:
        """[N, H] embeddings of the text; a causal model reads it one position late."""
        if self.start_token is not None:
            tokens = nn.functional.pad(tokens[:, :-1], (1, 0))
        rows = self.embed(
            tokens.flatten() if packed is None else tokens.flatten().index_select(0, packed)
        )
        if self.start_token is None:
            return rows
        first = torch.arange(0, tokens.numel(), tokens.shape[1], device=tokens.device)
        first = first if packed is None else torch.searchsorted(packed, first)
        return rows.index_copy(0, first, self.start_token.to(rows.dtype).expand(len(first), -1))

    def embed(self, ids: Tensor) -> Tensor:
        """[N] -> [N, H]."""
        table = self.token_embedding
        rows = embedding(table.weight, ids) if has_no_hooks(table, nn.Embedding) else table(ids)
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
        recompute = self.config.gradient_checkpointing and torch.is_grad_enabled()
        crosses = self.config.conditioning == "cross_attention"
        # Compiled, the last block would need a graph of its own.
        last = None if self._blocks_are_compiled else len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            latent = None
            if crosses:
                latent = encoded.tokens if encoded.keys_values is None else encoded.keys_values[i]
            own = None if dropout is None else dropout.of_layer(i)
            arguments = (rows, condition, layout, latent, kept if i == last else None, own)
            if (
                recompute
            ):  # no random numbers to keep: reading their state would make the host wait
                rows = checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                rows = block(*arguments)
        return rows if last is not None or kept is None else rows.index_select(0, kept)
