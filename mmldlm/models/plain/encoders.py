"""Inputs of the plain transformer: latents become chunk tokens or one pooled vector, with learned
nulls.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmldlm.models.mmdit.null_condition import apply_null_condition


class LatentTokens(nn.Module):
    """N latents of D -> N * K chunk tokens, as models/mmdit/encoders.py makes them."""

    def __init__(self, latent_dim: int, chunks: int, num_latents: int, hidden_size: int):
        super().__init__()
        self.chunks, self.hidden_size = chunks, hidden_size
        self.to_tokens = nn.Linear(latent_dim, chunks * hidden_size)
        self.chunk_position = nn.Parameter(torch.randn(chunks, hidden_size) * 0.02)
        self.latent_position = nn.Parameter(torch.randn(num_latents, 1, hidden_size) * 0.02)
        self.null_tokens = nn.Parameter(torch.randn(chunks, hidden_size) * 0.02)

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

    def __init__(self, latent_dim: int, cond_dim: int):
        super().__init__()
        self.to_pooled = nn.Sequential(
            nn.Linear(latent_dim, cond_dim), nn.SiLU(), nn.Linear(cond_dim, cond_dim)
        )
        self.null_pooled = nn.Parameter(torch.zeros(cond_dim))

    def forward(self, latents: Tensor, is_null: Tensor | None) -> Tensor:
        """[B, N, D], [B] bool -> [B, C]."""
        pooled = self.to_pooled(latents.to(self.null_pooled.dtype)).mean(dim=1)
        return (
            pooled if is_null is None else apply_null_condition(pooled, self.null_pooled, is_null)
        )
