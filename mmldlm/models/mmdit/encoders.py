"""Inputs of the MMDiT: text tokens and latents become rows, with learned nulls."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mmldlm.models.embedding import embedding
from mmldlm.models.layers import cache_tensor, has_no_hooks
from mmldlm.models.mmdit.null_condition import apply_null_condition


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
