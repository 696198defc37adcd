"""The MMDiT (Multimodal Diffusion Transformer): text tokens and latents in, distributions of
tokens and latents out.

Two streams, text and latents, keep their own weights and meet in one joint attention, as in SD3
(arXiv 2403.03206):

    tokens  [B, S]     -> TextEncoder   -> text rows   [N, H]      -+
                                                                     +-> MMDiTBlock, n_blocks times
    latents [B, n, D]  -> LatentEncoder -> latent rows [B * L, H]  -+             |
                                        \\-> pooled latent [B, C] -+    adaLN-Zero |
    both timesteps     -> TimestepEmbedding ---------------------+-> condition ---+
                                                                                  v
    TextHead: logits [M, V], or the scores of targets         LatentHead: latents [B, n, P * D]

    pooled latent -> length head: [B, max_seq_len]

A latent is K chunk tokens, so L = n * K. Rows are real tokens only (packing.py); a block computes
as one operation where that pays, with the same results (fused_block.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmldlm.models import pretrained_io
from mmldlm.models.base import (
    BaseTransformer,
    EncodedLatent,
    LatentInputs,
    ModelOutput,
    TextInputs,
)
from mmldlm.models.dropout import ATTENTION, MLP, RowDropout
from mmldlm.models.fused_block import BlockCall, BlockWeights, FusedBlock
from mmldlm.models.layers import (
    NORM_EPS,
    QK_EPS,
    Modulation,
    QKNorm,
    StreamLinear,
    TimestepEmbedding,
    apply_null_condition,
    cache_tensor,
    embed_ids,
    has_no_hooks,
    modulate,
    product_dtype,
    random_parameter,
)
from mmldlm.models.mmdit_config import ModelConfig
from mmldlm.models.packing import (
    Packing,
    PackingShape,
    attend,
    computed_text,
    modulation_of_rows,
    pack,
    packed_values,
    ragged_kind,
    rotate,
    row_positions,
    rows_of_positions,
    select_rows,
    to_positions,
    to_rows,
)
from mmldlm.models.token_scores import TokenQuery, TokenScores, score_tokens
from mmldlm.utils.validation import not_none

# -- encoders -------------------------------------------------------------------------------------


class TextEncoder(nn.Module):
    """Token embedding times a constant, and the learned null text of samples without a text."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.scale = config.token_embedding_scale
        self.token_embedding = nn.Embedding(not_none(config.vocab_size), config.hidden_size)
        self.null_text = random_parameter(config.hidden_size)

    def forward(self, tokens: Tensor, first_rows: Tensor, is_null: Tensor | None) -> Tensor:
        """[N] ids, [B] row of each sample's first token, [B] bool -> [N, H].

        A null sample starts with the null text; the caller masks or leaves out what follows it.
        """
        x = embed_ids(self.token_embedding, tokens)
        x = x if self.scale == 1 else x * self.scale
        if is_null is None:
            return x
        return apply_null_condition(x, self.null_text, is_null, first_rows)


def grid_positions(rows: int, columns: int, width: int) -> Tensor:
    """Two-dimensional sinusoids of a grid's positions, row by row; [rows * columns, width] fp32,
    of amplitude 1.

    The formula of MAE (arXiv 2111.06377) and DiT (arXiv 2212.09748): with n = width / 4 and w_k =
    10000^(-k / n), k = 0 .. n - 1, a place (r, c) is [sin(c w), cos(c w), sin(r w), cos(r w)]. A
    width that 4 does not divide takes the start of the next one that it does.
    """
    count = -(-width // 4)
    frequencies = 1e4 ** (-torch.arange(count, dtype=torch.float64) / count)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    angles = [coordinate.reshape(-1, 1) * frequencies for coordinate in (column, row)]
    parts = [function(angle) for angle in angles for function in (torch.sin, torch.cos)]
    return torch.cat(parts, dim=1)[:, :width].float()


@cache_tensor
def _fixed_positions(
    rows: int, columns: int, width: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """`grid_positions` as [rows * columns, 1, width]."""
    return grid_positions(rows, columns, width)[:, None].to(device, dtype)


class LatentEncoder(nn.Module):
    """n latents of D -> n * K chunk tokens and one pooled vector, with learned null embeddings.

    Each latent has a learned position, which starts from noise or, with a latent_grid, from
    `grid_positions`. Images of several sizes (latent_grids) have the fixed `grid_positions` of
    their own grid, which is known by its number of latents.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        width, cond, chunks = config.hidden_size, config.cond_dim, config.tokens_per_latent
        dim = not_none(config.latent_dim)
        self.config = config
        self.tokens_per_latent, self.hidden_size = chunks, width
        self.to_tokens = nn.Linear(dim, chunks * width)
        self.to_pooled = nn.Sequential(nn.Linear(dim, cond), nn.SiLU(), nn.Linear(cond, cond))
        self.chunk_position = random_parameter(chunks, width)
        self.latent_position = None
        if not config.latent_grids:
            self.latent_position = random_parameter(config.num_latents, 1, width)
        self.null_tokens = random_parameter(chunks, width)
        self.null_pooled = nn.Parameter(torch.zeros(cond))
        # After the draw, so that the other weights start as without a grid.
        if config.latent_grid is not None and self.latent_position is not None:
            rows, columns = config.latent_grid
            self.latent_position.data.copy_(grid_positions(rows, columns, width)[:, None])

    def forward(self, latents: Tensor, is_null: Tensor | None) -> tuple[Tensor, Tensor]:
        """[B, n, D], [B] bool -> tokens [B, n * K, H], pooled [B, C]; a ValueError for n without a
        grid in model.latent_grids.
        """
        batch, count, _ = latents.shape
        tokens = self.to_tokens(latents)
        tokens = tokens.view(batch, count, self.tokens_per_latent, self.hidden_size)
        pooled = self.to_pooled(latents)
        pooled = pooled.squeeze(1) if count == 1 else pooled.mean(dim=1)
        if is_null is not None:
            tokens = apply_null_condition(tokens, self.null_tokens, is_null)
            pooled = apply_null_condition(pooled, self.null_pooled, is_null)
        tokens = tokens + self.chunk_position + self._positions(count, tokens)
        return tokens.flatten(1, 2), pooled

    def _positions(self, count: int, tokens: Tensor) -> Tensor:
        if self.latent_position is not None:
            return self.latent_position[:count]
        rows, columns = not_none(self.config.grid_of(count))
        return _fixed_positions(rows, columns, self.hidden_size, tokens.dtype, tokens.device)


# -- block ----------------------------------------------------------------------------------------


class MMDiTBlock(nn.Module):
    """Joint attention over [text | latents] and one MLP per stream, under adaLN-Zero (DiT, arXiv
    2212.09748); docs/architecture.md has its equations.

    Linear layers have no biases: before `to_qkv` and `mlp_in` adaLN's shift does the same per
    sample, and large models train more stably without them (PaLM, arXiv 2204.02311).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        width, mlp_width = config.hidden_size, int(config.hidden_size * config.mlp_ratio)
        self.n_heads = config.n_heads
        # Those of attention, then of the MLP.
        kinds = 2 * ("shift", "scale", "gate")
        self.modulation = Modulation(config.cond_dim, width, kinds, groups=2)
        self.to_qkv = StreamLinear(width, 3 * width)
        self.qk_norm = QKNorm(width // config.n_heads, QK_EPS) if config.qk_rmsnorm else None
        self.to_out = StreamLinear(width, width)
        self.mlp_in = StreamLinear(width, mlp_width)
        self.mlp_out = StreamLinear(mlp_width, width)

    def forward(
        self,
        rows: Tensor,
        condition: Tensor,
        packing: Packing,
        recompute: bool = False,
        output_packing: Packing | None = None,
        dropout: RowDropout | None = None,
    ) -> Tensor:
        """Run the block.

        Args:
            rows: Text rows, then latent rows. [R, H]
            condition: SiLU'd conditioning vector. [B, C]
            packing: Layout of the rows.
            recompute: Whether to save only the inputs for the backward pass (where `runs_fused`).
            output_packing: The Q rows whose outputs are used (`Packing.restrict_to`), for the last
                block: behind attention, only these are computed. None: all.
            dropout: Dropout of this layer, for all rows; None: none.

        Returns:
            The rows after the block, [R, H]; with output_packing [Q, H].
        """
        output_packing = packing if output_packing is None else output_packing
        if dropout is not None:
            dropout = dropout.select(output_packing.kept_rows)
        if self.runs_fused():
            return self._forward_fused(
                rows, condition, packing, output_packing, dropout, recompute
            )

        ends, width = packing.stream_ends, rows.shape[1]
        table = self.modulation(condition).unflatten(1, (len(ends), -1)).flatten(0, 1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation_of_rows(
            table, packing, output_packing
        )

        hidden = modulate(F.layer_norm(rows, (width,), eps=NORM_EPS), shift, scale)
        qkv = self.to_qkv(hidden, ends).view(len(rows), 3, self.n_heads, -1)
        queries_keys, values = qkv[:, :2], qkv[:, 2:]
        if self.qk_norm is not None:
            queries_keys = self.qk_norm(queries_keys, ends)
        qkv = torch.cat([rotate(queries_keys, packing), values], dim=1)
        mixed = to_rows(attend(to_positions(qkv, packing), packing), packing, output_packing)

        ends = output_packing.stream_ends
        attended = self.to_out(mixed, ends)
        attended = attended if dropout is None else dropout.drop(attended, ATTENTION)
        rows = torch.addcmul(select_rows(rows, output_packing), gate, attended)

        hidden = modulate(F.layer_norm(rows, (width,), eps=NORM_EPS), mlp_shift, mlp_scale)
        outer = self.mlp_out(F.gelu(self.mlp_in(hidden, ends)), ends)
        outer = outer if dropout is None else dropout.drop(outer, MLP)
        return torch.addcmul(rows, mlp_gate, outer)

    def runs_fused(self) -> bool:
        """Whether the block computes as one operation.

        Not under torch.compile, which fuses and chooses what to save; and a hooked or replaced
        layer must really be called.
        """
        layers = self._modules.values()
        kinds = (Modulation, StreamLinear, QKNorm)
        return not torch.compiler.is_compiling() and all(
            layer is None or has_no_hooks(layer, *kinds) for layer in layers
        )

    def _forward_fused(
        self,
        rows: Tensor,
        condition: Tensor,
        packing: Packing,
        output_packing: Packing,
        dropout: RowDropout | None,
        recompute: bool,
    ) -> Tensor:
        weights = BlockWeights(
            self.modulation.weight, self.modulation.bias, self.to_qkv.weight,
            None if self.qk_norm is None else self.qk_norm.weight,
            self.to_out.weight, self.mlp_in.weight, self.mlp_out.weight,
        )  # fmt: skip
        low = product_dtype(weights.qkv)
        call = BlockCall(packing, output_packing, self.n_heads, dropout, low)
        # Decided here, because inside a Function the grad mode is always off.
        saves = torch.is_grad_enabled() and not recompute
        return FusedBlock.apply(rows, condition, call, saves, *weights)

    @staticmethod
    def split_streams(
        output: Tensor, rows: Tensor, condition: Tensor, packing: Packing, recompute: bool = False,
        output_packing: Packing | None = None, dropout: RowDropout | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return the output of forward(...) with these arguments as text rows and latent rows."""
        ends = (packing if output_packing is None else output_packing).stream_ends
        return output.tensor_split(ends[:-1])


# -- heads ----------------------------------------------------------------------------------------


class TextHead(nn.Module):
    """adaLN, then a linear layer over the vocabulary, run only on the rows whose logits
    are used.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        width, vocab_size = config.hidden_size, not_none(config.vocab_size)
        self.mask_token_id = not_none(config.mask_token_id)
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=NORM_EPS)
        self.modulation = Modulation(config.cond_dim, width, ("shift", "scale"))
        self.weight = random_parameter(vocab_size, width)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(
        self, rows: Tensor, sample: Tensor, condition: Tensor, query: TokenQuery
    ) -> TokenScores:
        """Answer the query, whose positions have the rows [M, H] of the samples [M]."""
        shift, scale = self.modulation(condition).index_select(0, sample).chunk(2, dim=-1)
        rows = modulate(self.norm(rows), shift, scale)
        return score_tokens(rows, self.weight, self.bias, query, self.mask_token_id)


class LatentHead(nn.Module):
    """adaLN, then the K chunk outputs of each latent, concatenated and projected (never averaged)
    to P predictions.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.tokens_per_latent = config.tokens_per_latent
        self.norm = nn.LayerNorm(config.hidden_size, elementwise_affine=False, eps=NORM_EPS)
        self.modulation = Modulation(config.cond_dim, config.hidden_size, ("shift", "scale"))
        self.to_latent = nn.Linear(
            config.tokens_per_latent * config.hidden_size,
            config.latent_predictions * not_none(config.latent_dim),
        )

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """[B, n * K, H] -> [B, n, P * D]."""
        shift, scale = self.modulation(condition)[:, None].chunk(2, dim=-1)
        x = modulate(self.norm(x), shift, scale)
        return self.to_latent(x.reshape(x.shape[0], -1, self.tokens_per_latent * x.shape[-1]))


# -- model ----------------------------------------------------------------------------------------


class MultimodalMMDiT(BaseTransformer):
    """Two-stream diffusion transformer over text tokens and sentence embeddings (or images).

    Joint bidirectional attention as in SD3's MMDiT (arXiv 2403.03206), adaLN-Zero conditioning
    (DiT, arXiv 2212.09748) on both timesteps and the pooled latent, RoPE on text (on latents with
    latent_rope), QK-RMSNorm, each latent as K chunk tokens.

    A subclass whose latents are not vectors overrides what reads and predicts them:
    `make_latent_encoder`, `make_latent_head`, `initialize_latents`, `encode_points` and
    `latent_outputs` (tasks/image_codes). One that reads more than texts and latents overrides
    `encode_points` and `embed_text`, which are given `side_inputs` (tasks/corrector).

    Args:
        config: Shape and vocabulary; latent_dim, vocab_size and the token ids must be set.

    Raises:
        UserError: one of those is missing, or latent_rope without a latent_grid.
    """

    config_class: ClassVar[type[ModelConfig]] = ModelConfig
    config: ModelConfig
    blocks: Sequence[MMDiTBlock]

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        config.check_places()
        cond = config.cond_dim
        self.text_encoder = TextEncoder(config)
        self.latent_encoder = self.make_latent_encoder()
        self.text_timestep = TimestepEmbedding(cond)
        self.latent_timestep = TimestepEmbedding(cond)
        blocks = nn.ModuleList(MMDiTBlock(config) for _ in range(config.n_blocks))
        self.blocks = cast("Sequence[MMDiTBlock]", blocks)
        self.text_head = TextHead(config)
        self.latent_head = self.make_latent_head()
        # Sampling must not see a text's true length, so the model also learns p(length | latent).
        self.length_head = nn.Sequential(
            nn.SiLU(), nn.Linear(cond, cond), nn.SiLU(), nn.Linear(cond, config.max_seq_len)
        )
        self._initialize()

    def _initialize(self) -> None:
        self.initialize_layers()
        self.initialize_latents()
        if self.config.tie_embeddings:
            self.text_head.weight = cast("nn.Parameter", self.text_encoder.token_embedding.weight)

    # -- forward

    def forward(
        self,
        text: TextInputs | None,
        latents: LatentInputs | EncodedLatent | None = None,
        query: TokenQuery | None = None,
        *,
        latent_query: Any = None,
        dropout_keys: Tensor | None = None,
        side_inputs: Any = None,
    ) -> ModelOutput:
        """Joint forward pass.

        Args:
            text: Texts; None: latents only, with the learned null text.
            latents: Latents, or what `encode_latents` made of them; then only `text` is returned.
                None: text only, with the learned null latent.
            query: Text positions to score; None: logits of all.
            latent_query: What a subclass is asked of the latents (`latent_outputs`).
            dropout_keys: int64, random, one per sample; needed in training with model.dropout,
                unused otherwise. [B]
            side_inputs: What a subclass reads besides (`encode_points`, `embed_text`).

        Raises:
            ValueError: on shapes that do not fit the config, dropout without keys, token_positions
                that leave text out without an attention_mask, or (on a CPU) a scored position that
                is padding.
        """
        reads_text = text is not None
        if text is None:
            text, query = self._null_text(latents)
        self.check_text(text)
        encoded = latents
        if not isinstance(encoded, EncodedLatent):
            encoded = self.encode_latents(encoded, len(text.tokens), side_inputs=side_inputs)
        assert encoded.tokens is not None and encoded.pooled is not None
        condition = F.silu(self._condition(encoded.pooled, text.timesteps, encoded.timesteps))

        query = TokenQuery() if query is None else query
        # Without positions all logits are computed, those of padding included.
        scored = query.positions
        computed, packing = self._pack(text, encoded.tokens, leaves_padding=scored is not None)
        text_rows = self.embed_text(
            text, computed, packing, encoded, side_inputs if reads_text else None
        )
        # Layout of the rows that a head reads.
        output_packing = packing
        if scored is not None:
            read = rows_of_positions(scored, computed)
            output_packing = packing.restrict_to(read, not isinstance(latents, EncodedLatent))
        dropout = self._dropout(dropout_keys, computed, text.tokens.shape[1], packing)
        rows = torch.cat([text_rows, encoded.tokens.flatten(0, 1)])
        rows = self._run_blocks(rows, condition, packing, output_packing, dropout)
        text_rows, latent_rows = rows.tensor_split(output_packing.stream_ends[:-1])

        latent_output = length_logits = scores = None
        if not isinstance(latents, EncodedLatent):
            latent_rows = latent_rows.view(*encoded.tokens.shape[:2], -1)
            latent_output = self.latent_outputs(latent_rows, condition, latents, latent_query)
            length_logits = self._length_logits(encoded.pooled, encoded.timesteps)
        if reads_text:
            sample = output_packing.sample[: output_packing.num_text]
            scores = self.text_head(text_rows, sample, condition, query)
            if scored is None and scores.logits is not None:
                scores = scores._replace(logits=scores.logits.view(*text.tokens.shape, -1))
        return ModelOutput(scores, latent_output, length_logits)

    def _null_text(
        self, latents: LatentInputs | EncodedLatent | None
    ) -> tuple[TextInputs, TokenQuery]:
        """The texts of latents without any: one token each, which the learned null replaces and
        which nothing asks for.
        """
        if not isinstance(latents, LatentInputs):
            raise ValueError("forward needs text or latents")
        batch, device = len(latents.values), latents.values.device
        pad_token_id = not_none(self.config.pad_token_id)
        tokens = torch.full((batch, 1), pad_token_id, dtype=torch.int64, device=device)
        is_null = torch.ones(batch, dtype=torch.bool, device=device)
        rows = torch.arange(batch, device=device)
        return TextInputs(tokens, is_null=is_null, token_positions=rows), TokenQuery(rows[:0])

    def _condition(
        self, pooled: Tensor, text_timesteps: Tensor | None, latent_timesteps: Tensor | None
    ) -> Tensor:
        """[B, C] sum of both timesteps' embeddings and the pooled latent."""
        if text_timesteps is None or latent_timesteps is None:
            zero = torch.zeros(len(pooled), device=pooled.device)
        return (
            self.text_timestep(zero if text_timesteps is None else text_timesteps)
            + self.latent_timestep(zero if latent_timesteps is None else latent_timesteps)
            + pooled
        )

    def _length_logits(self, pooled: Tensor, latent_timesteps: Tensor | None) -> Tensor:
        """[B, max_seq_len] fp32 logits of p(length | latent) where the latent is clean, else of
        p(length).
        """
        if latent_timesteps is not None:
            null = self.latent_encoder.null_pooled
            assert isinstance(null, Tensor)
            pooled = apply_null_condition(pooled, null, latent_timesteps > 0)
        return self.length_head(pooled).float()

    def _pack(
        self, text: TextInputs, latent_tokens: Tensor, leaves_padding: bool
    ) -> tuple[Tensor | None, Packing]:
        """Which positions of the text [B, S] are computed ([N], None for all), and the packing of
        the batch.
        """
        config, tokens = self.config, text.tokens
        positions, keys = computed_text(text, leaves_padding)
        if positions is not None and keys is None:
            raise ValueError(
                "token_positions leaves text out, so attention_mask must name it as padding"
            )
        chunks, num_tokens = config.tokens_per_latent, latent_tokens.shape[1]
        grid = config.grid_of(num_tokens // chunks) if config.latent_rope else None
        shape = PackingShape(
            tokens.shape[0],
            tokens.shape[1],
            num_tokens,
            config.hidden_size // config.n_heads,
            self.text_encoder.null_text.dtype,
            tokens.device,
            None if grid is None else (grid[0], grid[1], chunks),
        )
        # The dtype of an activation: under ZeRO-3, reading a weight gathers it.
        low = product_dtype(latent_tokens)
        ragged = ragged_kind(positions, shape, low, self._blocks_are_compiled)
        packing = pack(positions, keys, shape, ragged)
        if self._blocks_are_compiled:
            # Else a batch of head_dim / 2 samples would be taken for the same size.
            torch._dynamo.mark_static(packing.rotation, [1, 2, 3])
        return positions, packing

    def _dropout(
        self, keys: Tensor | None, computed: Tensor | None, length: int, packing: Packing
    ) -> RowDropout | None:
        """Dropout of all rows, where this pass has any."""
        rate = self.config.dropout if self.training else 0.0
        if rate == 0:
            return None
        if keys is None:
            raise ValueError("model.dropout needs dropout_keys in training (or model.eval())")
        position = row_positions(computed, length, packing)
        return RowDropout.of_rows(keys, packing.sample, position, len(self.blocks), rate)

    def _run_blocks(
        self,
        rows: Tensor,
        condition: Tensor,
        packing: Packing,
        output_packing: Packing,
        dropout: RowDropout | None,
    ) -> Tensor:
        """[R, H] -> [Q, H], the rows of the output packing."""
        checkpointed = self.config.recomputed_blocks if torch.is_grad_enabled() else range(0)
        # Compiled, the last block would need a graph of its own: minutes for a fraction of one
        # block.
        last = None if self._blocks_are_compiled else self.blocks[-1]
        for layer, block in enumerate(self.blocks):
            layer_dropout = None if dropout is None else dropout.of_layer(layer)
            layer_outputs = output_packing if block is last else None
            recompute = layer in checkpointed
            arguments = (rows, condition, packing, recompute, layer_outputs, layer_dropout)
            # A fused block saves its inputs only by itself.
            if recompute and (self._blocks_are_compiled or not block.runs_fused()):
                rows = checkpoint(block, *arguments, use_reentrant=False)
            else:
                rows = block(*arguments)
        return select_rows(rows, output_packing) if last is None else rows

    # -- what a subclass may override

    def make_latent_encoder(self) -> nn.Module:
        """Return what turns latents and `is_null` into chunk tokens and a pooled vector, with the
        learned `null_pooled`.
        """
        return LatentEncoder(self.config)

    def make_latent_head(self) -> nn.Module:
        """Return what `latent_outputs` predicts latents with."""
        return LatentHead(self.config)

    def initialize_latents(self) -> None:
        """Initialize the latents' encoder and head where they differ from the common rules."""
        assert isinstance(self.latent_head, LatentHead)
        nn.init.zeros_(self.latent_head.to_latent.weight)

    def encode_latents(
        self,
        latents: LatentInputs | None,
        batch: int | None = None,
        caches: bool = False,
        *,
        side_inputs: Any = None,
    ) -> EncodedLatent:
        """Encode latents as the blocks read them, for `forward`.

        Args:
            latents: Latents; None: the learned null, of `batch` samples.
            batch: B, without latents.
            caches: Unused (PlainTransformer has it).
            side_inputs: Those of `forward`.

        Raises:
            ValueError: shapes that do not fit the config.
        """
        latents = self.latent_points(latents, batch)
        encoded = self.encode_points(latents, side_inputs)
        return encoded._replace(timesteps=latents.timesteps)

    def encode_points(self, latents: LatentInputs, side_inputs: Any) -> EncodedLatent:
        """Encode latents of shape [B, n, D]."""
        if side_inputs is not None:
            raise ValueError(f"side_inputs are not read by {type(self).__name__}")
        return EncodedLatent(*self.latent_encoder(self.scaled_points(latents), latents.is_null))

    def scaled_points(self, latents: LatentInputs) -> Tensor:
        """[B, n, D] latents as the latent encoder reads them, in the weights' dtype."""
        points, timesteps = latents.values, latents.timesteps
        if self.config.scale_noisy_latents and timesteps is not None:
            points = points * torch.cos(0.5 * math.pi * timesteps)[:, None, None].to(points.dtype)
        return points.to(self.text_encoder.null_text.dtype)

    def embed_text(
        self,
        text: TextInputs,
        computed: Tensor | None,
        packing: Packing,
        encoded: EncodedLatent,
        side_inputs: Any,
    ) -> Tensor:
        """[N, H] rows of the text, as the first block reads them.

        Args:
            text: Texts of the batch.
            computed: Positions in B * S of the rows; None: all. [N]
            packing: Layout of the batch.
            encoded: Latents of the batch.
            side_inputs: Those of `forward`; None without a text.
        """
        ids = packed_values(text.tokens, computed)
        return self.text_encoder(ids, packing.first_rows, text.is_null)

    def latent_outputs(
        self, rows: Tensor, condition: Tensor, latents: LatentInputs | None, query: Any
    ) -> Any:
        """Return what `forward` returns as `latent`.

        Args:
            rows: Latent rows after the last block. [B, n * K, H]
            condition: SiLU'd conditioning vector. [B, C]
            latents: Those of `forward`.
            query: Argument latent_query of `forward`.
        """
        if query is not None:
            raise ValueError(f"latent_query is not read by {type(self).__name__}")
        prediction = self.latent_head(rows, condition).float()
        # The prediction has the shape of the latents, [B, D] where that was given.
        if latents is None or latents.values.dim() == 2:
            # Of one latent a view, whose gradient is one too: a slice's is a copy.
            only = prediction.shape[1] == 1
            prediction = prediction.squeeze(1) if only else prediction[:, 0]
        return prediction

    # -- parameters and files

    def parameter_groups(self) -> dict[str, list[str]]:
        """Return the names of the parameters in the groups text, latent and shared (MM-LDLM's
        freezing groups).
        """
        groups: dict[str, list[str]] = {"text": [], "latent": [], "shared": []}
        sides = {
            "text_encoder": "text",
            "text_head": "text",
            "length_head": "text",
            "latent_encoder": "latent",
            "latent_head": "latent",
        }
        for name, _ in self.named_parameters():
            groups[sides.get(name.split(".")[0], "shared")].append(name)
        return groups

    @classmethod
    def from_pretrained(
        cls, path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> MultimodalMMDiT:
        """Load a model that `mmldlm convert` or `save_pretrained` wrote.

        Args:
            path: Local folder with model.safetensors and config.json, or the name of a Hugging
                Face repository.
            device: Device of the model.
            dtype: Dtype of the weights; the latent statistics stay fp32.

        Raises:
            UserError: missing files, or tensors that do not fit the config; nothing is loaded
                partly.
        """
        return pretrained_io.read(cls, path, device, dtype)
