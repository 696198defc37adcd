"""How long a text shall be, from the model's own p(length | latent): sampling never sees the true length."""

from __future__ import annotations

import torch
from torch import Tensor

RULES = ("median", "mode", "sample")


def choose_lengths(logits: Tensor, rule: str = "median", uniform: Tensor | None = None) -> Tensor:
    """Lengths from the length head's logits.

    The median minimises the expected absolute error and is the default where a latent is given; without a latent
    the distribution is broad and only drawing from it gives texts of different lengths.

    Args:
        logits: [B, L] for lengths 1 .. L, EOS counted. rule: one of RULES. uniform: [B] in [0, 1), needed by sample.

    Returns:
        [B] int64 in 1 .. L.
    """
    if rule not in RULES:
        raise ValueError(f"length rule {rule!r}: expected one of {', '.join(RULES)}")
    if rule == "mode":
        return logits.argmax(-1) + 1
    cumulative = logits.double().softmax(-1).cumsum(-1)
    point = torch.full_like(cumulative[:, 0], 0.5) if rule == "median" else uniform.to(cumulative)
    below = (cumulative <= (point * cumulative[:, -1])[:, None]).sum(-1)
    return below.clamp_max(logits.shape[-1] - 1) + 1
