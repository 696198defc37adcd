"""What the MMDiT reads of an earlier text for the same latent: its tokens, its embedding, and how far off that is."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Hypotheses(NamedTuple):
    """Earlier texts for the latents of a batch.

    Attributes:
        tokens: int64 [B, S], EOS written; the pad token where a text has ended. Read where the batch has text.
        latents: the encoder's embeddings of these texts, in model space. [B, N, D] or [B, D]
        given: bool, samples that have one; of others the rest is not read. [B]
    """

    tokens: Tensor
    latents: Tensor
    given: Tensor


class HypothesisEncoder(nn.Module):
    """Adds a hypothesis to the rows of text and latent, which stay as many as without.

    As in vec2text (arXiv 2310.06816), three latents are read: that of the text to write z, that of the hypothesis ẑ,
    and z - ẑ. Every output starts at 0, so that a trained model without hypotheses goes on from where it was.

    Args:
        is_blind: read z in place of ẑ: the ablation, which sees the words of a hypothesis and not how good they are.
    """

    def __init__(self, latent_dim: int, tokens_per_latent: int, hidden_size: int, cond_dim: int, is_blind: bool):
        super().__init__()
        self.is_blind, inner = is_blind, tokens_per_latent * hidden_size
        self.to_text = nn.Linear(hidden_size, hidden_size)
        self.to_hidden = nn.Linear(3 * latent_dim, inner)
        self.to_tokens = nn.Linear(inner, inner)
        self.to_pooled = nn.Linear(inner, cond_dim)

    def reset_parameters(self) -> None:
        """Start without an effect."""
        for layer in (self.to_text, self.to_tokens, self.to_pooled):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def text(self, rows: Tensor, is_real: Tensor) -> Tensor:
        """Token embeddings of the hypothesis [R, H], bool [R] -> what is added to the text rows [R, H]."""
        return torch.where(is_real[:, None], self.to_text(rows), 0.0)

    def latent(self, points: Tensor, hypotheses: Hypotheses) -> tuple[Tensor, Tensor]:
        """Latents of the texts to write [B, N, D] -> what is added to their tokens [B, N * K, H] and pooled [B, C]."""
        own = points if self.is_blind else hypotheses.latents.reshape(points.shape).to(points.dtype)
        hidden = nn.functional.gelu(self.to_hidden(torch.cat([points, own, points - own], -1)))
        tokens, pooled = self.to_tokens(hidden), self.to_pooled(hidden).mean(1)
        width = self.to_text.in_features
        tokens = torch.where(hypotheses.given[:, None, None], tokens.view(len(points), -1, width), 0.0)
        return tokens, torch.where(hypotheses.given[:, None], pooled, 0.0)
