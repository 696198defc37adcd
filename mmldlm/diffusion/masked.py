"""Masked (absorbing) diffusion of text: MDLM (Sahoo et al., arXiv 2406.07524)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SCHEDULES = ("loglinear", "cosine", "polynomial")


class MaskedDiffusion:
    """q(x_t | x_0) keeps a token with probability alpha_t and replaces it by [MASK] otherwise.

    The continuous-time NELBO of a denoiser under SUBS is E_t[w(t) * sum over masked positions of
    -log p(x_0 | x_t)] with w(t) = -alpha'_t / (1 - alpha_t), which is exactly 1 / t for the
    log-linear schedule, for every eps.

    Args:
        mask_token_id: Id of [MASK].
        schedule: Schedule: loglinear (alpha = 1 - (1 - eps) t), cosine (alpha = cos(pi t / 2)),
            polynomial (alpha = 1 - t^2).
        eps: Fraction of tokens that the log-linear schedule keeps at t = 1.

    Raises:
        ValueError: an unknown schedule.
    """

    def __init__(self, mask_token_id: int, schedule: str = "loglinear", eps: float = 1e-4):
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule {schedule!r}: expected one of {', '.join(SCHEDULES)}")
        self.mask_token_id, self.schedule, self.eps = mask_token_id, schedule, eps

    def alpha(self, t: Tensor) -> Tensor:
        """Probability that a token is not masked at t in [0, 1]; same shape, fp64."""
        t = t.double()
        if self.schedule == "loglinear":
            return 1 - (1 - self.eps) * t
        if self.schedule == "cosine":
            return torch.cos(0.5 * math.pi * t)
        return 1 - t**2

    def loss_weights(self, t: Tensor) -> Tensor:
        """NELBO weight -alpha'_t / (1 - alpha_t) at t > 0; same shape, fp64."""
        t = t.double()
        if self.schedule == "loglinear":
            return 1 / t
        if self.schedule == "cosine":
            # pi/2 sin(a) / (1 - cos(a)) = pi/2 / tan(a/2), which does not cancel near t = 0.
            return 0.5 * math.pi / torch.tan(0.25 * math.pi * t)
        return 2 / t

    def corrupt(
        self, tokens: Tensor, t: Tensor, uniform: Tensor, maskable: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Mask tokens independently with probability 1 - alpha_t.

        Args:
            tokens: [B, S] int64
            t: [B]
            uniform: [B, S] fp64 in [0, 1).
            maskable: [B, S] bool (real tokens).

        Returns:
            noised tokens [B, S] and masked [B, S] bool.
        """
        masked = (uniform >= self.alpha(t)[:, None]) & maskable
        return tokens.masked_fill(masked, self.mask_token_id), masked

    def timestep_of(self, masked_fraction: Tensor) -> Tensor:
        """The t at which a fraction in (0, 1] of the tokens is masked in expectation; same shape,
        fp64.
        """
        fraction = masked_fraction.double()
        if self.schedule == "loglinear":
            return (fraction / (1 - self.eps)).clamp_max(1.0)
        if self.schedule == "cosine":
            return torch.acos((1 - fraction).clamp(-1, 1)) / (0.5 * math.pi)
        return fraction.sqrt()

    @staticmethod
    def corrupt_count(
        tokens: Tensor, uniform_t: Tensor, uniform: Tensor, maskable: Tensor, mask_token_id: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mask exactly k = floor(u * L) + 1 of a sample's L tokens, chosen at random; k is then
        uniform on 1 .. L.

        Integrating 1 / t against the binomial probability of k masked tokens gives 1 / k. With
        weight L / k per masked token the expectation is therefore the same NELBO for min_timestep
        -> 0, under every schedule (LLaDA, arXiv 2502.09992, eq. 14; RADD, arXiv 2406.03736). The
        estimate no longer has the heavy tail of 1 / t at small t.

        Args:
            tokens: [B, S] int64
            uniform_t: [B] in [0, 1).
            uniform: [B, S] in [0, 1).
            maskable: [B, S] bool, at least one per row.

        Returns:
            noised [B, S], masked [B, S] bool, fraction of masked tokens k / L [B] fp64.
        """
        length = maskable.sum(1)
        count = ((uniform_t.double() * length).floor() + 1).clamp_max(length.double())
        rank = uniform.masked_fill(~maskable, 2.0).argsort(1).argsort(1)
        masked = rank < count[:, None]
        return tokens.masked_fill(masked, mask_token_id), masked, count / length

    def stay_masked(self, t: Tensor, s: Tensor) -> Tensor:
        """Probability that a token masked at t is still masked at s < t: (1 - alpha_s) / (1 -
        alpha_t).
        """
        return (1 - self.alpha(s)) / (1 - self.alpha(t))
