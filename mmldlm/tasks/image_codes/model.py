"""The MMDiT on ids of codes: their embedding in place of the latent projection, and a head over
codes.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from mmldlm.errors import UserError
from mmldlm.models.latent_transformer import EncodedLatent
from mmldlm.models.layers import (
    Modulation,
    apply_null_condition,
    embedding,
    has_no_hooks,
    modulate,
)
from mmldlm.models.linear_cross_entropy import linear_cross_entropy
from mmldlm.models.mmdit import MultimodalMMDiT, grid_positions
from mmldlm.tasks.image_codes.config import ImageCodesModelConfig


class CodeTargets(NamedTuple):
    """The ids that the model is asked for: `latent_query` of its forward pass.

    Attributes:
        positions: int64 indices into B * N of the codes to score. [M]
        ids: int64 right codes at these positions; None: their logits are returned. [M]
        weights: fp32 weight of each in code_loss_sum; with ids. [M]
    """

    positions: Tensor
    ids: Tensor | None = None
    weights: Tensor | None = None


class CodeEncoder(nn.Module):
    """N ids of Q codes and [MASK] -> N * K chunk tokens and one pooled vector; learned nulls as in
    LatentEncoder.

    Args:
        num_codes: Q; id Q is [MASK].
        tokens_per_latent, num_latents, hidden_size, cond_dim, grid: of LatentEncoder.
    """

    def __init__(
        self,
        num_codes: int,
        tokens_per_latent: int,
        num_latents: int,
        hidden_size: int,
        cond_dim: int,
        grid: list[int] | None = None,
    ):
        super().__init__()
        self.tokens_per_latent, self.hidden_size = tokens_per_latent, hidden_size
        width = tokens_per_latent * hidden_size
        self.code_embedding = nn.Embedding(num_codes + 1, width)
        self.to_pooled = nn.Sequential(
            nn.Linear(width, cond_dim), nn.SiLU(), nn.Linear(cond_dim, cond_dim)
        )
        self.chunk_position = nn.Parameter(torch.randn(tokens_per_latent, hidden_size) * 0.02)
        self.latent_position = nn.Parameter(torch.randn(num_latents, 1, hidden_size) * 0.02)
        self.null_tokens = nn.Parameter(torch.randn(tokens_per_latent, hidden_size) * 0.02)
        self.null_pooled = nn.Parameter(torch.zeros(cond_dim))
        if grid is not None:
            self.latent_position.data.copy_(grid_positions(*grid, hidden_size)[:, None])

    def reset_embedding(self) -> None:
        """Start from unit variance, as projected pixels do: beside positions of amplitude 1 less
        would not be read.
        """
        nn.init.normal_(self.code_embedding.weight)

    @torch.no_grad()
    def start_from(self, codes: Tensor) -> None:
        """Start the embeddings of codes [Q, D] from a random projection of them: similar codes
        begin alike.
        """
        centered = codes - codes.mean(0)
        centered = centered / centered.square().mean().sqrt().clamp_min(1e-6)
        projection = (
            torch.randn(codes.shape[1], self.code_embedding.weight.shape[1])
            / codes.shape[1] ** 0.5
        )
        self.code_embedding.weight[: len(codes)].copy_(centered @ projection)

    def forward(self, ids: Tensor, is_null: Tensor | None) -> tuple[Tensor, Tensor]:
        """[B, N, 1] int64, [B] bool -> tokens [B, N * K, H], pooled [B, C] of the mean
        embedding.
        """
        batch, count, _ = ids.shape
        table, flat = self.code_embedding, ids.flatten()
        rows = embedding(table.weight, flat) if has_no_hooks(table, nn.Embedding) else table(flat)
        pooled = self.to_pooled(rows.view(batch, count, -1).mean(1))
        tokens = rows.view(batch, count, self.tokens_per_latent, self.hidden_size)
        if is_null is not None:
            tokens = apply_null_condition(tokens, self.null_tokens, is_null)
            pooled = apply_null_condition(pooled, self.null_pooled, is_null)
        tokens = tokens + self.chunk_position + self.latent_position[:count]
        return tokens.flatten(1, 2), pooled


class CodeHead(nn.Module):
    """adaLN, then the K chunk outputs of each code, concatenated, to logits over Q codes, run
    where they are used.
    """

    def __init__(self, hidden_size: int, cond_dim: int, tokens_per_latent: int, num_codes: int):
        super().__init__()
        self.tokens_per_latent = tokens_per_latent
        self.norm = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.modulation = Modulation(cond_dim, hidden_size, ("shift", "scale"))
        self.weight = nn.Parameter(torch.randn(num_codes, tokens_per_latent * hidden_size) * 0.02)
        self.bias = nn.Parameter(torch.zeros(num_codes))

    def forward(
        self, x: Tensor, condition: Tensor, wanted: CodeTargets | None
    ) -> dict[str, Tensor]:
        """Score codes of x [B, N * K, H].

        Returns:
            with ids code_loss_sum (fp32 scalar), code_nll and code_correct [M]; else code_logits
            fp32 [M, Q]; nothing where none is wanted.
        """
        if wanted is None:
            return {}
        width = self.tokens_per_latent * x.shape[-1]
        x = x.reshape(len(x), -1, self.tokens_per_latent, x.shape[-1])
        count = x.shape[1]
        rows = x.flatten(0, 1).index_select(0, wanted.positions)
        own = self.modulation(condition).index_select(0, wanted.positions // count)[:, None]
        shift, scale = own.chunk(2, dim=-1)
        rows = modulate(self.norm(rows), shift, scale).reshape(-1, width)
        if wanted.ids is not None:
            loss_sum, nll, correct = linear_cross_entropy(
                rows, self.weight, self.bias, wanted.ids, wanted.weights, excluded_token_id=None
            )
            return {"code_loss_sum": loss_sum, "code_nll": nll, "code_correct": correct}
        return {"code_logits": torch.addmm(self.bias, rows, self.weight.t()).float()}


class CodesMMDiT(MultimodalMMDiT):
    """MultimodalMMDiT whose latents are ids of codes: int64 [B, N, 1], num_codes for [MASK].

    Args:
        config: of a MultimodalMMDiT, and num_codes.

    Raises:
        UserError: num_codes is not set; or as MultimodalMMDiT.
    """

    config_class: ClassVar[type[ImageCodesModelConfig]] = ImageCodesModelConfig
    config: ImageCodesModelConfig

    def __init__(self, config: ImageCodesModelConfig):
        if config.num_codes is None:
            raise UserError(
                "a complete model config",
                "model.num_codes unset",
                "set it, or take it from a store",
            )
        super().__init__(config)

    @property
    def num_ids(self) -> int:
        return self.config.num_codes

    def make_latent_encoder(self) -> CodeEncoder:
        config = self.config
        return CodeEncoder(
            config.num_codes,
            config.tokens_per_latent,
            config.num_latents,
            config.hidden_size,
            config.cond_dim,
            config.latent_grid,
        )

    def make_latent_head(self) -> CodeHead:
        config = self.config
        return CodeHead(
            config.hidden_size, config.cond_dim, config.tokens_per_latent, config.num_codes
        )

    def initialize_latents(self) -> None:
        self.latent_encoder.reset_embedding()

    def scale_latents(self, raw: Tensor) -> Tensor:
        """Stored ids of codes as int64.

        Raises:
            UserError: an id that names no code; on a GPU it would end the process without a name.
        """
        num_codes = self.config.num_codes
        if raw.numel() and not 0 <= int(raw.min()) <= int(raw.max()) < num_codes:
            raise UserError(
                f"ids of codes from 0 to {num_codes - 1}",
                f"ids from {int(raw.min())} to {int(raw.max())}",
                "mmldlm verify-data STORE names the damaged rows; or give latents that this"
                " model's codec made",
            )
        return raw.long()

    def encode_latents(
        self,
        latents: Tensor | None,
        is_null: Tensor | None = None,
        batch: int | None = None,
        caches: bool = False,
        *,
        timesteps: Tensor | None = None,
        side_inputs: None = None,
    ) -> EncodedLatent:
        config = self.config
        if latents is None:
            shape = (batch, config.num_latents, config.latent_dim)
            latents = torch.zeros(shape, device=self.latent_mean.device, dtype=torch.int64)
            is_null = torch.ones(len(latents), dtype=torch.bool, device=latents.device)
        ids = latents[:, None] if latents.dim() == 2 else latents
        self.check_latents(ids)
        return EncodedLatent(*self.latent_encoder(ids, is_null))

    def latent_outputs(
        self, rows: Tensor, condition: Tensor, latents: Tensor | None, query: CodeTargets | None
    ) -> dict[str, Tensor]:
        return self.latent_head(rows, condition, query)
