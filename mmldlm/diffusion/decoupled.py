"""Decoupled diffusion: z_t = (1 - t) x0 + sqrt(t) noise, "image to zero and zero to noise" (DDM,
arXiv 2306.13720).

RadioDiff's process with C = -x0 (z_t = x0 + t C + sqrt(t) noise). As a path with alpha = 1 - t and
sigma = sqrt(t) it needs no sampler of its own: its step back is DDIM with the noise of
`bridge_eta`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def alpha_sigma(t: Tensor) -> tuple[Tensor, Tensor]:
    """1 - t and sqrt(t), for t in [0, 1]; alpha^2 + sigma^2 is between 0.75 and 1."""
    return 1 - t, t.sqrt()


def timestep_of_cosine(u: Tensor) -> Tensor:
    """The timestep with the SNR that the cosine path alpha = cos(pi u / 2) has at u in [0, 1];
    same shape and dtype.

    (1 - t) / sqrt(t) = cot(pi u / 2) is quadratic in sqrt(t); this form of its root is exact at
    both ends.
    """
    cosine, sine = torch.cos(0.5 * math.pi * u), torch.sin(0.5 * math.pi * u)
    return (2 * sine / (cosine + (cosine**2 + 4 * sine**2).sqrt())) ** 2


def bridge_eta(t: Tensor, s: Tensor) -> Tensor:
    """The eta with which a DDIM step from t to s < t has the noise of DDM's own step; same shape,
    in (0, 1].

    Its variance s (t - s) / t is that of a Brownian bridge, against the ancestral s (1 - ((1 - t)
    / (1 - s))^2 s / t). Their quotient, (1 - s)^2 / (1 - t s), is written so that nothing cancels
    and no root of a rounded zero is taken.
    """
    return (1 - s) / (1 - t * s).sqrt()


def loss_weights(t: Tensor, kind: str, cap: float) -> Tensor:
    """Weights of the squared errors of x0 and of the noise. [..., 2] in t's dtype

    Args:
        t: timesteps in [0, 1].
        kind: ddm (2 e^(1 - t), e^sqrt(t); RadioDiff) or ddm_inverse (1 / t, 1 / (1 - t); DDM).
        cap: largest weight of ddm_inverse, whose weights are infinite at the ends.
    """
    if kind == "ddm":
        return torch.stack([2 * torch.exp(1 - t), torch.exp(t.sqrt())], -1)
    # min(1 / x, cap) without the infinity.
    return 1 / torch.stack([t, 1 - t], -1).clamp_min(1 / cap)
