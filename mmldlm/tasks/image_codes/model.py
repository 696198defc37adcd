"""The MMDiT on ids of codes: their embedding in place of the latent projection, and a head over
codes.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from mmldlm.errors import UserError
from mmldlm.models.base import EncodedLatent, LatentInputs
from mmldlm.models.layers import (
    NORM_EPS,
    Modulation,
    apply_null_condition,
    embed_ids,
    modulate,
    random_parameter,
)
from mmldlm.models.linear_cross_entropy import linear_cross_entropy
from mmldlm.models.mmdit import MultimodalMMDiT, grid_positions
from mmldlm.models.token_scores import TokenQuery, TokenScores
from mmldlm.tasks.image_codes.config import ImageCodesModelConfig


class CodeEncoder(nn.Module):
    """N ids of Q codes and [MASK] (id Q) -> N * K chunk tokens and one pooled vector, with nulls
    as in LatentEncoder.
    """

    def __init__(self, config: ImageCodesModelConfig):
        super().__init__()
        hidden_size, cond_dim = config.hidden_size, config.cond_dim
        tokens_per_latent, num_latents = config.tokens_per_latent, config.num_latents
        self.tokens_per_latent, self.hidden_size = tokens_per_latent, hidden_size
        width = tokens_per_latent * hidden_size
        self.code_embedding = nn.Embedding(config.num_codes + 1, width)
        self.to_pooled = nn.Sequential(
            nn.Linear(width, cond_dim), nn.SiLU(), nn.Linear(cond_dim, cond_dim)
        )
        self.chunk_position = random_parameter(tokens_per_latent, hidden_size)
        self.latent_position = random_parameter(num_latents, 1, hidden_size)
        self.null_tokens = random_parameter(tokens_per_latent, hidden_size)
        self.null_pooled = nn.Parameter(torch.zeros(cond_dim))
        if config.latent_grid is not None:
            positions = grid_positions(*config.latent_grid, hidden_size)
            self.latent_position.data.copy_(positions[:, None])

    def reset_embedding(self) -> None:
        """Start from unit variance, as projected pixels do: smaller embeddings would be drowned
        out by positions of amplitude 1.
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
        rows = embed_ids(self.code_embedding, ids.flatten())
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

    def __init__(self, config: ImageCodesModelConfig):
        super().__init__()
        self.tokens_per_latent = config.tokens_per_latent
        width = config.tokens_per_latent * config.hidden_size
        self.norm = nn.LayerNorm(config.hidden_size, elementwise_affine=False, eps=NORM_EPS)
        self.modulation = Modulation(config.cond_dim, config.hidden_size, ("shift", "scale"))
        self.weight = random_parameter(config.num_codes, width)
        self.bias = nn.Parameter(torch.zeros(config.num_codes))

    def forward(
        self, x: Tensor, condition: Tensor, query: TokenQuery | None
    ) -> TokenScores | None:
        """Answer a query of codes, whose positions are indices into B * N; None: nothing is asked.

        Args:
            x: Latent rows. [B, N * K, H]
            condition: SiLU'd conditioning vector. [B, C]
            query: Positions, and targets with weights or none.
        """
        if query is None:
            return None
        width = self.tokens_per_latent * x.shape[-1]
        x = x.reshape(len(x), -1, self.tokens_per_latent, x.shape[-1])
        count = x.shape[1]
        rows = x.flatten(0, 1).index_select(0, query.positions)
        modulation = self.modulation(condition).index_select(0, query.positions // count)[:, None]
        shift, scale = modulation.chunk(2, dim=-1)
        rows = modulate(self.norm(rows), shift, scale).reshape(-1, width)
        if query.targets is None:
            return TokenScores(logits=torch.addmm(self.bias, rows, self.weight.t()).float())
        loss_sum, nll, correct = linear_cross_entropy(
            rows, self.weight, self.bias, query.targets, query.weights, excluded_token_id=None
        )
        return TokenScores(loss_sum=loss_sum, nll=nll, correct=correct)


class CodesMMDiT(MultimodalMMDiT):
    """MultimodalMMDiT whose latents are ids of codes: int64 [B, N, 1], num_codes for [MASK]."""

    config_class: ClassVar[type[ImageCodesModelConfig]] = ImageCodesModelConfig
    needed_keys = (*MultimodalMMDiT.needed_keys, "num_codes")
    config: ImageCodesModelConfig

    @property
    def num_ids(self) -> int:
        return self.config.num_codes

    def make_latent_encoder(self) -> CodeEncoder:
        return CodeEncoder(self.config)

    def make_latent_head(self) -> CodeHead:
        return CodeHead(self.config)

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

    def encode_points(self, latents: LatentInputs, side_inputs: None) -> EncodedLatent:
        return EncodedLatent(*self.latent_encoder(latents.values.long(), latents.is_null))

    def latent_outputs(
        self,
        rows: Tensor,
        condition: Tensor,
        latents: LatentInputs | None,
        query: TokenQuery | None,
    ) -> TokenScores | None:
        """Return the scores of `query`: positions are indices into B * N."""
        return self.latent_head(rows, condition, query)
