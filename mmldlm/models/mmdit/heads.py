"""Outputs of the MMDiT: token distributions and latents."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmldlm.models.layers import Modulation, modulate
from mmldlm.models.linear_cross_entropy import (
    Candidates,
    linear_cross_entropy,
    linear_logits,
)


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
