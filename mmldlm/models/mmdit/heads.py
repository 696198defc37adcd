"""Outputs of the MMDiT: token distributions and latents."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmldlm.models.layers import Modulation, compute_dtype, modulate
from mmldlm.models.linear_cross_entropy import (
    Candidates,
    linear_cross_entropy,
    linear_logits,
    rows_of_a_chunk,
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
        excluded: tuple[int, ...] | None = None,
    ) -> dict[str, Tensor]:
        """Score rows [M, H] of samples [M]; `MultimodalMMDiT.forward` documents the other
        arguments and the result.

        With `excluded`, only the most probable tokens besides those are returned: text_best [M]
        int64.
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
        if excluded is not None:
            return {"text_best": self._best(rows, excluded)}
        logits = linear_logits(rows, self.weight, self.bias).float()
        logits[:, self.mask_token_id].fill_(
            float("-inf")
        )  # an assignment would make the host wait for a GPU
        return {"text_logits": logits}

    def _best(self, rows: Tensor, excluded: tuple[int, ...]) -> Tensor:
        """[M] int64; only a chunk's logits exist at once."""
        size = rows_of_a_chunk(len(self.bias), rows.device.type, compute_dtype(rows).itemsize)
        best = []
        for chunk in rows.split(size):
            logits = linear_logits(chunk, self.weight, self.bias)
            logits[:, list(excluded)] = float("-inf")
            best.append(logits.argmax(-1))
        return torch.cat(best)


class QualityHead(nn.Module):
    """Two layers that judge each token: the logit of the probability that it is right."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.to_hidden = nn.Linear(hidden_size, hidden_size)
        self.to_logit = nn.Linear(hidden_size, 1)
        for layer in (self.to_hidden, self.to_logit):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, rows: Tensor) -> Tensor:
        """[M, H] -> [M] fp32."""
        return self.to_logit(nn.functional.gelu(self.to_hidden(self.norm(rows))))[:, 0].float()


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
