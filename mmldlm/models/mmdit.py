"""MultimodalMMDiT: text tokens and latents in, token distributions and latents out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmldlm.models import pretrained_io
from mmldlm.models.dropout import ATTENTION, MLP, RowDropout
from mmldlm.models.fused_block import BlockWeights, FusedBlock
from mmldlm.models.latent_transformer import EncodedLatent, LatentTransformer, rows_of_positions
from mmldlm.models.layers import (
    NORM_EPS,
    QK_EPS,
    Modulation,
    QKNorm,
    StreamLinear,
    TimestepEmbedding,
    apply_null_condition,
    cache_tensor,
    compute_dtype,
    embedding,
    has_no_hooks,
    modulate,
)
from mmldlm.models.linear_cross_entropy import Candidates, linear_cross_entropy, linear_logits
from mmldlm.models.mmdit_config import ModelConfig
from mmldlm.models.packing import (
    Packing,
    PackingShape,
    attend,
    modulation_of_rows,
    pack,
    packed_positions,
    ragged_kind,
    row_positions,
    select_rows,
    text_keys,
)


class TextEncoder(nn.Module):
    """Token embedding times a constant, and the learned null text of samples without a text."""

    def __init__(self, vocab_size: int, hidden_size: int, scale: float = 1.0):
        super().__init__()
        self.scale = scale
        self.token_embedding = nn.Embedding(vocab_size, hidden_size)
        self.null_text = nn.Parameter(torch.randn(hidden_size) * 0.02)

    def forward(self, tokens: Tensor, first_rows: Tensor, is_null: Tensor | None) -> Tensor:
        """[N] ids, [B] row of each sample's first token, [B] bool -> [N, H].

        A null sample starts with the null text; the caller masks or leaves out what follows it.
        """
        table = self.token_embedding
        x = embedding(table.weight, tokens) if has_no_hooks(table, nn.Embedding) else table(tokens)
        x = x if self.scale == 1 else x * self.scale
        return (
            x if is_null is None else apply_null_condition(x, self.null_text, is_null, first_rows)
        )


def grid_positions(rows: int, columns: int, width: int) -> Tensor:
    """Two-dimensional sinusoids of a grid's places, row by row; [rows * columns, width] fp32, of
    amplitude 1.

    The formula of MAE (arXiv 2111.06377) and DiT (arXiv 2212.09748): with n = width / 4 and w_k =
    10000^(-k / n), k = 0 .. n - 1, a place (r, c) is [sin(c w), cos(c w), sin(r w), cos(r w)]. A
    width that 4 does not divide takes the start of the next one that it does.
    """
    count = -(-width // 4)
    frequencies = 1e4 ** (-torch.arange(count, dtype=torch.float64) / count)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    angles = [place.reshape(-1, 1) * frequencies for place in (column, row)]
    parts = [function(angle) for angle in angles for function in (torch.sin, torch.cos)]
    return torch.cat(parts, dim=1)[:, :width].float()


@cache_tensor
def _fixed_positions(
    rows: int, columns: int, width: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """`grid_positions` as [rows * columns, 1, width]."""
    return grid_positions(rows, columns, width)[:, None].to(device, dtype)


class LatentEncoder(nn.Module):
    """N latents of D -> N * K chunk tokens and one pooled vector; learned nulls of samples without
    a latent.

    Args:
        latent_dim: D.
        tokens_per_latent: K.
        num_latents: N.
        hidden_size: width H of a token.
        cond_dim: width C of the pooled vector.
        grid: rows and columns of the latents, N in all: `latent_position` starts from
            `grid_positions`. None: from noise of standard deviation 0.02. It is learned either
            way.
        grids: of images of several sizes, known by their number of places: `grid_positions` of the
            sample's own grid, fixed, take the place of `latent_position`.
    """

    def __init__(
        self,
        latent_dim: int,
        tokens_per_latent: int,
        num_latents: int,
        hidden_size: int,
        cond_dim: int,
        grid: list[int] | None = None,
        grids: list[list[int]] | None = None,
    ):
        super().__init__()
        self.grids = {math.prod(own): own for own in grids or []}
        self.tokens_per_latent, self.hidden_size = tokens_per_latent, hidden_size
        self.to_tokens = nn.Linear(latent_dim, tokens_per_latent * hidden_size)
        self.to_pooled = nn.Sequential(
            nn.Linear(latent_dim, cond_dim), nn.SiLU(), nn.Linear(cond_dim, cond_dim)
        )
        self.chunk_position = nn.Parameter(torch.randn(tokens_per_latent, hidden_size) * 0.02)
        self.latent_position = None
        if not self.grids:
            self.latent_position = nn.Parameter(torch.randn(num_latents, 1, hidden_size) * 0.02)
        self.null_tokens = nn.Parameter(torch.randn(tokens_per_latent, hidden_size) * 0.02)
        self.null_pooled = nn.Parameter(torch.zeros(cond_dim))
        # After the draw, so that the other weights start as without a grid.
        if grid is not None and self.latent_position is not None:
            self.latent_position.data.copy_(grid_positions(*grid, hidden_size)[:, None])

    def forward(self, latents: Tensor, is_null: Tensor | None) -> tuple[Tensor, Tensor]:
        """[B, N, D], [B] bool -> tokens [B, N * K, H], pooled [B, C]; a ValueError for N without a
        grid of `grids`.
        """
        batch, count, _ = latents.shape
        tokens = self.to_tokens(latents).view(
            batch, count, self.tokens_per_latent, self.hidden_size
        )
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
        if count not in self.grids:
            raise ValueError(
                f"{count} latents, but model.latent_grids is {list(self.grids.values())}"
            )
        return _fixed_positions(*self.grids[count], self.hidden_size, tokens.dtype, tokens.device)


KINDS = ("shift", "scale", "gate")


class MMDiTBlock(nn.Module):
    """Joint attention over [text | latent] and one MLP per stream, all under adaLN-Zero (DiT,
    arXiv 2212.09748).

    Linear layers have no biases: adaLN's shift of their inputs does the same per sample, and large
    models train more stably without them (PaLM, arXiv 2204.02311).

    Args:
        hidden_size: width H.
        n_heads: number of attention heads.
        cond_dim: width of the conditioning vector.
        mlp_ratio: MLP width over H.
        qk_rmsnorm: RMS-normalize queries and keys in every head.
        num_streams: number of streams.
    """

    def __init__(
        self,
        hidden_size: int,
        n_heads: int,
        cond_dim: int,
        mlp_ratio: float,
        qk_rmsnorm: bool,
        num_streams: int = 2,
    ):
        super().__init__()
        self.n_heads = n_heads
        mlp_width = int(hidden_size * mlp_ratio)
        self.modulation = Modulation(cond_dim, hidden_size, 2 * KINDS, groups=num_streams)
        self.to_qkv = StreamLinear(hidden_size, 3 * hidden_size, num_streams)
        self.qk_norm = QKNorm(hidden_size // n_heads, QK_EPS, num_streams) if qk_rmsnorm else None
        self.to_out = StreamLinear(hidden_size, hidden_size, num_streams)
        self.mlp_in = StreamLinear(hidden_size, mlp_width, num_streams)
        self.mlp_out = StreamLinear(mlp_width, hidden_size, num_streams)

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
            rows: real text tokens, then latent tokens (packing.py). [R, H]
            condition: SiLU'd conditioning vector. [B, C]
            packing: layout of the rows.
            recompute: save only the inputs for the backward pass (where `runs_fused`).
            output_packing: the Q rows whose outputs are used (`Packing.restrict_to`), for the last
                block: after attention, only these are computed. None: all.
            dropout: of the outputs of attention and MLP in this layer, for all rows. None: none.

        Returns:
            The rows after the block, [R, H]; with output_packing [Q, H].
        """
        output_packing = packing if output_packing is None else output_packing
        if dropout is not None:
            dropout = dropout.select(output_packing.kept_rows)
        if not self.runs_fused():
            return self._forward_reference(rows, condition, packing, output_packing, dropout)
        weights = BlockWeights(
            self.modulation.weight, self.modulation.bias, self.to_qkv.weight,
            None if self.qk_norm is None else self.qk_norm.weight,
            self.to_out.weight, self.mlp_in.weight, self.mlp_out.weight,
        )  # fmt: skip
        needs_grad = torch.is_grad_enabled()  # inside a Function grad mode is always off
        return FusedBlock.apply(
            rows,
            condition,
            packing,
            output_packing,
            self.n_heads,
            dropout,
            recompute,
            needs_grad,
            *weights,
        )

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

    def _forward_reference(
        self,
        rows: Tensor,
        condition: Tensor,
        packing: Packing,
        output_packing: Packing,
        dropout: RowDropout | None,
    ) -> Tensor:
        """The same computation with one call per layer, under autograd."""
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
        num_turned = packing.rotation.shape[0]
        cos, sin = packing.rotation[:, 0, None, None].to(queries_keys.dtype).unbind(-1)
        even, odd = queries_keys[:num_turned].unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
        joint = torch.cat([torch.cat([rotated, queries_keys[num_turned:]]), values], dim=1)
        mixed = attend(joint.index_select(0, packing.order), packing).index_select(
            0, output_packing.inverse_order
        )
        ends = output_packing.stream_ends
        attended = self.to_out(mixed, ends)
        attended = attended if dropout is None else dropout.drop(attended, ATTENTION)
        rows = torch.addcmul(select_rows(rows, output_packing), gate, attended)
        hidden = modulate(F.layer_norm(rows, (width,), eps=NORM_EPS), mlp_shift, mlp_scale)
        outer = self.mlp_out(F.gelu(self.mlp_in(hidden, ends)), ends)
        outer = outer if dropout is None else dropout.drop(outer, MLP)
        return torch.addcmul(rows, mlp_gate, outer)

    @staticmethod
    def split_streams(
        output: Tensor, rows: Tensor, condition: Tensor, packing: Packing, recompute: bool = False,
        output_packing: Packing | None = None, dropout: RowDropout | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The result of forward(...) of these arguments, as text rows and latent rows."""
        ends = (packing if output_packing is None else output_packing).stream_ends
        return output.tensor_split(ends[:-1])


class TextHead(nn.Module):
    """adaLN, then a linear layer over the vocabulary, run only on the rows whose logits
    are used.
    """

    def __init__(self, hidden_size: int, cond_dim: int, vocab_size: int, mask_token_id: int):
        super().__init__()
        self.mask_token_id = mask_token_id
        self.norm = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.modulation = Modulation(cond_dim, hidden_size, ("shift", "scale"))
        self.weight = nn.Parameter(torch.randn(vocab_size, hidden_size) * 0.02)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(
        self,
        rows: Tensor,
        sample: Tensor,
        condition: Tensor,
        targets: Tensor | None,
        weights: Tensor | None,
        candidates: Candidates | None = None,
    ) -> dict[str, Tensor]:
        """Score rows [M, H] of samples [M]; `MultimodalMMDiT.forward` documents the other
        arguments and the result.
        """
        shift, scale = self.modulation(condition).index_select(0, sample).chunk(2, dim=-1)
        rows = modulate(self.norm(rows), shift, scale)
        if targets is not None:
            loss_sum, nll, correct = linear_cross_entropy(
                rows,
                self.weight,
                self.bias,
                targets,
                weights,
                self.mask_token_id,
                candidates=candidates,
            )
            return {"text_loss_sum": loss_sum, "text_nll": nll, "text_correct": correct}
        logits = linear_logits(rows, self.weight, self.bias).float()
        logits[:, self.mask_token_id].fill_(
            float("-inf")
        )  # an assignment would make the host wait for a GPU
        return {"text_logits": logits}


class LatentHead(nn.Module):
    """adaLN, then the K chunk outputs of each latent, concatenated and projected (never averaged)
    to P predictions.
    """

    def __init__(self, hidden_size: int, cond_dim: int, tokens_per_latent: int, outputs: int):
        super().__init__()
        self.tokens_per_latent = tokens_per_latent
        self.norm = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.modulation = Modulation(cond_dim, hidden_size, ("shift", "scale"))
        self.to_latent = nn.Linear(tokens_per_latent * hidden_size, outputs)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """[B, N * K, H] -> [B, N, P * D]."""
        shift, scale = self.modulation(condition)[:, None].chunk(2, dim=-1)
        x = modulate(self.norm(x), shift, scale)
        return self.to_latent(x.reshape(x.shape[0], -1, self.tokens_per_latent * x.shape[-1]))


class _LastRows(NamedTuple):
    """What the heads read: text [M, H] of samples [M], latent [B, N * K, H] or no row, condition
    and pooled [B, C].
    """

    text: Tensor
    sample: Tensor
    latent: Tensor
    condition: Tensor
    pooled: Tensor


class MultimodalMMDiT(LatentTransformer):
    """Two-stream diffusion transformer over text tokens and sentence embeddings.

    Joint bidirectional attention as in SD3's MMDiT (arXiv 2403.03206), adaLN-Zero conditioning
    (DiT, arXiv 2212.09748) on both timesteps and the pooled latent, RoPE on text (on latents with
    latent_rope), QK-RMSNorm, each latent as K chunk tokens.

    A subclass whose latents are no vectors overrides what reads and predicts them:
    `make_latent_encoder`, `make_latent_head`, `initialize_latents`, `encode_latents` and
    `latent_outputs` (tasks/image_codes has an example). One that reads more than texts and latents
    overrides `encode_latents` and `embed_text`, which are given `side_inputs` (tasks/corrector).

    Args:
        config: shape and vocabulary; latent_dim, vocab_size and the token ids must be set.

    Raises:
        UserError: one of those is missing or out of range, or latent_rope without a latent_grid.
    """

    config_class: ClassVar[type[ModelConfig]] = ModelConfig

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        config.check_places()
        width, cond = config.hidden_size, config.cond_dim
        self.text_encoder = TextEncoder(config.vocab_size, width, config.token_embedding_scale)
        self.latent_encoder = self.make_latent_encoder()
        self.text_timestep = TimestepEmbedding(cond)
        self.latent_timestep = TimestepEmbedding(cond)
        self.blocks = nn.ModuleList(
            MMDiTBlock(width, config.n_heads, cond, config.mlp_ratio, config.qk_rmsnorm)
            for _ in range(config.n_blocks)
        )
        self.text_head = TextHead(width, cond, config.vocab_size, config.mask_token_id)
        self.latent_head = self.make_latent_head()
        # Sampling must not see a text's true length, so the model also learns p(length | latent).
        self.length_head = nn.Sequential(
            nn.SiLU(), nn.Linear(cond, cond), nn.SiLU(), nn.Linear(cond, config.max_seq_len)
        )
        self._initialize()

    def _initialize(self) -> None:
        # adaLN-Zero: every block starts as the identity, every head reads the unmodulated norm.
        for module in self.modules():
            if isinstance(module, (Modulation, StreamLinear)):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.initialize_latents()
        if self.config.tie_embeddings:
            self.text_head.weight = self.text_encoder.token_embedding.weight

    # -- latents
    # ---------------------------------------------------------------------------------------------

    def make_latent_encoder(self) -> nn.Module:
        """What turns latents and `is_null` into chunk tokens and a pooled vector, with the learned
        `null_pooled`.
        """
        config = self.config
        return LatentEncoder(
            config.latent_dim,
            config.tokens_per_latent,
            config.num_latents,
            config.hidden_size,
            config.cond_dim,
            config.latent_grid,
            config.latent_grids,
        )

    def make_latent_head(self) -> nn.Module:
        """What `latent_outputs` predicts latents with."""
        config = self.config
        outputs = config.latent_predictions * config.latent_dim
        return LatentHead(config.hidden_size, config.cond_dim, config.tokens_per_latent, outputs)

    def initialize_latents(self) -> None:
        """Start encoder and head of the latents where they differ from the common rules."""
        nn.init.zeros_(self.latent_head.to_latent.weight)

    def latent_outputs(
        self, rows: Tensor, condition: Tensor, latents: Tensor | None, query: Any
    ) -> dict[str, Tensor]:
        """What `forward` returns of the latents.

        Args:
            rows: of the last block. [B, N * K, H]
            condition: [B, C]
            latents, query: latents and latent_query of `forward`.
        """
        if query is not None:
            raise ValueError(f"latent_query is not read by {type(self).__name__}")
        prediction = self.latent_head(rows, condition).float()
        if latents is None or latents.dim() == 2:  # [B, D], as they were given
            only = prediction.shape[1] == 1
            prediction = prediction.squeeze(1) if only else prediction[:, 0]
        return {"latent_pred": prediction}

    def encode_latents(
        self,
        latents: Tensor | None,
        is_null: Tensor | None = None,
        batch: int | None = None,
        caches: bool = False,
        *,
        timesteps: Tensor | None = None,
        side_inputs: Any = None,
    ) -> EncodedLatent:
        """Latents as the blocks read them, for `forward(encoded=...)`.

        Args:
            latents, is_null, timesteps, side_inputs: latents, latent_is_null, latent_timesteps,
                side_inputs of `forward`.
            batch: B, without latents.
            caches: nothing more is computed (a place that PlainTransformer has).

        Raises:
            ValueError: shapes that do not fit the config.
        """
        if side_inputs is not None:
            raise ValueError(f"side_inputs are not read by {type(self).__name__}")
        points, is_null = self.latent_points(latents, is_null, batch, timesteps)
        return EncodedLatent(*self.latent_encoder(points, is_null))

    def latent_points(
        self,
        latents: Tensor | None,
        is_null: Tensor | None,
        batch: int | None,
        timesteps: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """What the latent encoder is given: latents [B, N, D] of the weights' dtype, and is_null
        [B]; the arguments are those of `encode_latents`.
        """
        config, device = self.config, self.latent_mean.device
        if latents is None:
            latents = torch.zeros(batch, config.num_latents, config.latent_dim, device=device)
            is_null = _all_true(latents)
        points = latents[:, None] if latents.dim() == 2 else latents
        self.check_latents(points)
        if config.scale_noisy_latents and timesteps is not None:
            points = points * torch.cos(0.5 * math.pi * timesteps)[:, None, None].to(points.dtype)
        return points.to(self.text_encoder.null_text.dtype), is_null

    # -- text
    # ---------------------------------------------------------------------------------------------

    def embed_text(
        self,
        ids: Tensor,
        packed: Tensor | None,
        packing: Packing,
        is_null: Tensor | None,
        encoded: EncodedLatent,
        side_inputs: Any,
    ) -> Tensor:
        """Rows of the text, as the first block reads them. [R, H]

        Args:
            ids: Tokens of the rows. [R]
            packed: Positions of the rows in B * S; None: all of them. [R]
            packing: Layout of the batch.
            is_null: Samples whose text is replaced by the learned null. [B]
            encoded: Latents of the batch.
            side_inputs: Those of `forward`; None without text_tokens.
        """
        return self.text_encoder(ids, packing.first_rows, is_null)

    # -- forward
    # ---------------------------------------------------------------------------------------------

    def forward(
        self,
        text_tokens: Tensor | None,
        latents: Tensor | None,
        text_timesteps: Tensor | None = None,
        latent_timesteps: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        text_is_null: Tensor | None = None,
        latent_is_null: Tensor | None = None,
        token_positions: Tensor | None = None,
        text_positions: Tensor | None = None,
        text_targets: Tensor | None = None,
        text_weights: Tensor | None = None,
        text_candidates: Candidates | None = None,
        dropout_keys: Tensor | None = None,
        side_inputs: Any = None,
        encoded: EncodedLatent | None = None,
        latent_query: Any = None,
    ) -> dict[str, Tensor]:
        """Joint forward pass.

        Args:
            text_tokens: int64, S <= max_seq_len. None: latent-only, with the learned null text.
                [B, S]
            latents: in model space (`scale_latents`). None: text-only, with the learned null
                latent. [B, D] or [B, N, D]
            text_timesteps, latent_timesteps: in [0, 1], 0 clean, 1 fully masked or pure noise.
                None: 0. [B]
            attention_mask: bool, True for real tokens. None: all real. Tokens at a False position
                do not change results at a True one. [B, S]
            text_is_null, latent_is_null: bool, samples whose text or latents are replaced by the
                learned null. [B]
            token_positions: int64 indices into B * S, ascending, of the text that may be attended
                to (the real tokens; of a null text its first position). With text_positions, only
                these are computed. None: found from the mask on a CPU; on a GPU, where that would
                make the host wait, padding is computed, too. [N]
            text_positions: int64 indices into B * S of the logits to compute, real tokens. None:
                all of B * S. [M]
            text_targets: int64 clean tokens at text_positions; their NLLs are returned instead of
                logits. [M]
            text_weights: fp32 weight of each target in text_loss_sum. [M] text_candidates: see
                Candidates.
            dropout_keys: int64, random, of each sample; needed in training with model.dropout,
                unused otherwise. [B]
            side_inputs: what a subclass reads besides (`encode_latents`, `embed_text`).
            latent_query: what a subclass is asked of the latents (`latent_outputs`).
            encoded: result of `encode_latents` in place of latents: only text_* is returned, given
                text_positions.

        Returns:
            latent_pred: [B, P * D] or, as `latents`, [B, N, P * D]; P: latent_predictions. Of a
                subclass what its `latent_outputs` returns.
            length_logits: of lengths 1..max_seq_len (EOS counted), given the latent if its
                timestep is 0, without it otherwise. [B, max_seq_len]
            text_logits: fp32 with -inf for [MASK]; absent with targets. [M, V], or [B, S, V]
            without positions text_loss_sum (fp32 scalar), text_nll and text_correct [M]: with
            targets. Without text_tokens, no text_*.

        Raises:
            ValueError: on shapes that do not fit the config, dropout without keys, token_positions
                that leave text out without an attention_mask, or (on a CPU) a scored position that
                is padding.
        """
        if text_tokens is None and latents is None:
            raise ValueError("forward needs text_tokens or latents")
        rows = self._run(
            text_tokens,
            latents,
            text_timesteps,
            latent_timesteps,
            attention_mask,
            text_is_null,
            latent_is_null,
            token_positions,
            text_positions,
            dropout_keys,
            side_inputs,
            encoded,
        )
        out = {}
        if encoded is None:
            out = self.latent_outputs(rows.latent, rows.condition, latents, latent_query)
            out["length_logits"] = self.length_head(
                self._pooled_condition(rows.pooled, latent_timesteps)
            ).float()
        if text_tokens is None:
            return out
        out |= self.text_head(
            rows.text, rows.sample, rows.condition, text_targets, text_weights, text_candidates
        )
        if text_positions is None and text_targets is None:
            out["text_logits"] = out["text_logits"].view(*text_tokens.shape, -1)
        return out

    def _run(
        self,
        text_tokens: Tensor | None,
        latents: Tensor | None,
        text_timesteps: Tensor | None,
        latent_timesteps: Tensor | None,
        attention_mask: Tensor | None,
        text_is_null: Tensor | None,
        latent_is_null: Tensor | None,
        token_positions: Tensor | None,
        text_positions: Tensor | None,
        dropout_keys: Tensor | None,
        side_inputs: Any = None,
        encoded: EncodedLatent | None = None,
    ) -> _LastRows:
        """All of `forward` but its heads."""
        given = latents if text_tokens is None else text_tokens
        tokens, key_is_null = text_tokens, text_is_null
        if text_tokens is None:
            tokens = torch.full(
                (len(given), 1), self.config.pad_token_id, dtype=torch.int64, device=given.device
            )
            text_is_null, key_is_null, attention_mask = _all_true(given), None, None
        self.check_length(tokens)
        is_text_alone = encoded is not None
        if encoded is None:
            encoded = self.encode_latents(
                latents,
                latent_is_null,
                len(tokens),
                timesteps=latent_timesteps,
                side_inputs=side_inputs,
            )
        latent, pooled = encoded.tokens, encoded.pooled
        condition = nn.functional.silu(self._condition(pooled, text_timesteps, latent_timesteps))
        selects = (
            text_positions is not None
        )  # without them all logits are computed, those of padding included
        packed, packing = self._pack(
            tokens, latent, attention_mask, key_is_null, token_positions, selects
        )
        ids = tokens.flatten() if packed is None else tokens.flatten().index_select(0, packed)
        text = self.embed_text(
            ids,
            packed,
            packing,
            text_is_null,
            encoded,
            None if text_tokens is None else side_inputs,
        )
        outputs = packing  # of the rows that a head reads
        if text_tokens is None or selects:
            read = (
                packing.first_rows[:0]
                if text_tokens is None
                else rows_of_positions(text_positions, packed)
            )
            outputs = packing.restrict_to(read, with_latents=not is_text_alone)
        dropout = self._dropout(dropout_keys, packed, tokens.shape[1], packing)
        rows = self._run_blocks(
            torch.cat([text, latent.flatten(0, 1)]), condition, packing, outputs, dropout
        )
        text_rows, latent_rows = rows.tensor_split(outputs.stream_ends[:-1])
        if not is_text_alone:
            latent_rows = latent_rows.view(*latent.shape[:2], -1)
        return _LastRows(
            text_rows, outputs.sample[: outputs.num_text], latent_rows, condition, pooled
        )

    def _condition(
        self, pooled: Tensor, text_timesteps: Tensor | None, latent_timesteps: Tensor | None
    ) -> Tensor:
        """[B, C] sum of both timesteps' embeddings and the pooled latent."""
        if text_timesteps is None or latent_timesteps is None:
            clean = torch.zeros(len(pooled), device=pooled.device)
        return (
            self.text_timestep(clean if text_timesteps is None else text_timesteps)
            + self.latent_timestep(clean if latent_timesteps is None else latent_timesteps)
            + pooled
        )

    def _pooled_condition(self, pooled: Tensor, latent_timesteps: Tensor | None) -> Tensor:
        """[B, C] the pooled latent if it is clean, else the null: condition of p(length | latent)
        or p(length).
        """
        if latent_timesteps is None:
            return pooled
        return apply_null_condition(pooled, self.latent_encoder.null_pooled, latent_timesteps > 0)

    def _dropout(
        self, keys: Tensor | None, packed: Tensor | None, length: int, packing: Packing
    ) -> RowDropout | None:
        """Dropout of all rows, where this pass has any."""
        rate = self.dropout_rate(keys)
        if rate == 0:
            return None
        position = row_positions(packed, length, packing)
        return RowDropout.of_rows(keys, packing.sample, position, len(self.blocks), rate)

    def _run_blocks(
        self,
        rows: Tensor,
        condition: Tensor,
        packing: Packing,
        outputs: Packing,
        dropout: RowDropout | None,
    ) -> Tensor:
        """[R, H] -> [Q, H], the rows of the output packing."""
        recompute = self.config.gradient_checkpointing and torch.is_grad_enabled()
        # Compiled, the last block would need a graph of its own: minutes for a fraction of one
        # block.
        last = None if self._blocks_are_compiled else self.blocks[-1]
        for layer, block in enumerate(self.blocks):
            own = None if dropout is None else dropout.of_layer(layer)
            arguments = (
                rows,
                condition,
                packing,
                recompute,
                outputs if block is last else None,
                own,
            )
            if recompute and (self._blocks_are_compiled or not block.runs_fused()):
                rows = checkpoint(block, *arguments, use_reentrant=False)
            else:
                rows = block(*arguments)
        return select_rows(rows, outputs) if last is None else rows

    # -- packing
    # ---------------------------------------------------------------------------------------------

    def _pack(
        self,
        tokens: Tensor,
        latent: Tensor,
        attention_mask: Tensor | None,
        text_is_null: Tensor | None,
        token_positions: Tensor | None,
        selects: bool,
    ) -> tuple[Tensor | None, Packing]:
        """Which positions of the text [B, S] are computed ([N], None for all), and the packing of
        the batch.
        """
        config, num_positions = self.config, tokens.numel()
        positions = keys = None
        if not (
            selects and token_positions is not None and token_positions.shape[0] == num_positions
        ):
            keys = text_keys(attention_mask, text_is_null, tokens)
            positions = packed_positions(token_positions, keys) if selects else None
            if positions is not None and positions.shape[0] == num_positions:
                positions = keys = None
        if positions is not None and keys is None:
            raise ValueError(
                "token_positions leaves text out, so attention_mask must name it as padding"
            )
        head_dim = config.hidden_size // config.n_heads
        dtype = self.text_encoder.null_text.dtype
        own = config.tokens_per_latent
        places = (*config.grid_of(latent.shape[1] // own), own) if config.latent_rope else None
        shape = PackingShape(
            *tokens.shape, latent.shape[1], head_dim, dtype, tokens.device, places
        )
        low = compute_dtype(latent)  # of an activation: under ZeRO-3, reading a weight gathers it
        packing = pack(
            positions, keys, shape, ragged_kind(positions, shape, low, self._blocks_are_compiled)
        )
        if (
            self._blocks_are_compiled
        ):  # else a batch of head_dim / 2 samples would be taken for the same size
            torch._dynamo.mark_static(packing.rotation, (1, 2, 3))
        return positions, packing

    # -- parameters
    # ---------------------------------------------------------------------------------------------

    def parameter_groups(self) -> dict[str, list[str]]:
        """Names of the parameters in the groups text, latent and shared (MM-LDLM's freezing
        groups).
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

    # -- files
    # ---------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls, path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> MultimodalMMDiT:
        """Load a model that `mmldlm convert` or `save_pretrained` wrote.

        Args:
            path: local folder with model.safetensors and config.json, or a Hugging Face
                repository's name.
            device: of the model.
            dtype: of the weights; the latent statistics stay fp32.

        Raises:
            UserError: missing files, or tensors that do not fit the config; nothing is loaded
                partly.
        """
        return pretrained_io.read(cls, path, device, dtype)


def _all_true(given: Tensor) -> Tensor:
    """[B] for given [B, ...]."""
    return torch.ones(len(given), dtype=torch.bool, device=given.device)
