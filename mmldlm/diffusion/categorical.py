"""Draws of tokens from logits by inverting the CDF."""

from __future__ import annotations

import torch
from torch import Tensor

# fp64 probabilities in memory at once: 64 MB.
_MAX_ELEMENTS = 8 << 20


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token per row in fp64; fp32 truncates the tail (arXiv 2409.02908).

    Args:
        logits: [M, V], -inf for tokens that must not be drawn.
        uniform: [M] in [0, 1).

    Returns:
        [M] int64.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    step = max(_MAX_ELEMENTS // logits.shape[-1], 1)
    for start in range(0, len(logits), step):
        rows = slice(start, start + step)
        cumulative = logits[rows].double().softmax(-1).cumsum(-1)
        total = cumulative[:, -1]
        # A point rounded up to the total would select an index after the last token with any
        # probability.
        point = torch.minimum(
            uniform[rows].double() * total, torch.nextafter(total, torch.zeros_like(total))
        )
        tokens[rows] = torch.searchsorted(cumulative, point[:, None], right=True)[:, 0]
    return tokens
