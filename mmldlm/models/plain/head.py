"""Output of the plain transformer: token distributions of the rows that are read."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmldlm.models.layers import Modulation, compute_dtype, modulate
from mmldlm.models.linear_cross_entropy import (
    Candidates,
    linear_cross_entropy,
    linear_logits,
    rows_of_a_chunk,
)
from mmldlm.models.plain.block import NORM_EPS, RMSNorm, of_rows
from mmldlm.models.plain.config import PlainConfig

LogitsFunction = Callable[[Tensor, slice], Tensor]
"""(fp32 logits [m, V] with -inf for [MASK], which of the M rows they are) -> [m, ...]."""


class PlainTextHead(nn.Module):
    """A norm (adaLN or weighted), then a linear layer over the vocabulary."""

    def __init__(self, config: PlainConfig):
        super().__init__()
        width = config.hidden_size
        self.mask_token_id = config.mask_token_id
        self.modulation = (
            Modulation(config.cond_width, width, ("shift", "scale"))
            if config.is_modulated
            else None
        )
        self.norm = None if config.is_modulated else RMSNorm(width)
        self.weight = nn.Parameter(torch.randn(config.vocab_size, width) * 0.02)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(
        self,
        rows: Tensor,
        sample: Tensor,
        condition: Tensor | None,
        targets: Tensor | None = None,
        weights: Tensor | None = None,
        candidates: Candidates | None = None,
        function: LogitsFunction | None = None,
    ) -> dict[str, Tensor]:
        """Score rows [M, H] of samples [M]; `PlainTransformer.forward` documents the rest."""
        if self.modulation is None:
            rows = self.norm(rows)
        else:
            shift, scale = of_rows(self.modulation(condition), sample, 2)
            rows = F.layer_norm(rows, (rows.shape[-1],), eps=NORM_EPS).to(rows.dtype)
            rows = modulate(rows, shift.to(rows.dtype), scale.to(rows.dtype))
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
        if function is not None:
            return {"text_function": self._by_chunks(rows, function)}
        return {"text_logits": self._logits(rows)}

    def _logits(self, rows: Tensor) -> Tensor:
        logits = linear_logits(rows, self.weight, self.bias)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logits[:, self.mask_token_id].fill_(
            float("-inf")
        )  # an assignment would make the host wait for a GPU
        return logits

    def _by_chunks(self, rows: Tensor, function: LogitsFunction) -> Tensor:
        """function of all logits, of which only a chunk's exist at once; the backward pass
        computes them again.
        """

        def of_chunk(chunk: Tensor, which: slice) -> Tensor:
            return function(self._logits(chunk), which)

        size = rows_of_a_chunk(len(self.bias), rows.device.type, compute_dtype(rows).itemsize)
        parts = []
        for first in range(0, max(len(rows), 1), size):
            which = slice(first, min(first + size, len(rows)))
            parts.append(
                checkpoint(
                    of_chunk, rows[which], which, use_reentrant=False, preserve_rng_state=False
                )
            )
        return torch.cat(parts)
