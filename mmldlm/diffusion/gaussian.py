"""Continuous diffusion of latents: z_t = a(t) x + s(t) e, with conversions between all prediction targets."""

from __future__ import annotations

import math

import torch
from torch import Tensor

PATHS = ("cosine", "linear", "sigmoid", "rectified_flow")
PREDICTIONS = ("x0", "v", "epsilon", "flow")


class GaussianProcess:
    """Forward process, targets, loss weights and one deterministic or stochastic step back.

    The paths are continuous in t in [0, 1] (t = 0 data, t = 1 noise): variance preserving with a = cos(pi t / 2)
    (cosine), log-SNR of the linear-beta DDPM (arXiv 2006.11239) or linear in logit space (sigmoid), and the straight
    path a = 1 - t, s = t (rectified flow, arXiv 2209.03003). Discrete indices never enter.

    Args:
        path: one of PATHS. prediction: what the network outputs, one of PREDICTIONS.
        weighting: unit, min_snr (arXiv 2303.09556) or velocity, always in the space of the prediction.
        min_snr_gamma: gamma of min_snr.
    """

    def __init__(
        self, path: str = "cosine", prediction: str = "x0", weighting: str = "unit", min_snr_gamma: float = 5.0
    ):
        if path not in PATHS or prediction not in PREDICTIONS:
            raise ValueError(f"path {path!r} of {PATHS}, prediction {prediction!r} of {PREDICTIONS}")
        self.path, self.prediction = path, prediction
        self.weighting, self.min_snr_gamma = weighting, min_snr_gamma

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """a(t), s(t) in fp64, same shape as t in [0, 1]."""
        t = t.double()
        if self.path == "rectified_flow":
            return 1 - t, t
        if self.path == "cosine":
            return torch.cos(0.5 * math.pi * t), torch.sin(0.5 * math.pi * t)
        if self.path == "linear":
            # integral of beta from 0.1 to 20: the continuous limit of DDPM's 1000 linear betas (arXiv 2011.13456)
            log_alpha_squared = -(0.1 * t + 0.5 * (20.0 - 0.1) * t**2)
        else:
            # signal share falls from 0.9975 to 0.0025 along a logistic curve, rescaled to reach 1 and 0 exactly
            low, high = torch.sigmoid(torch.tensor(-6.0).double()), torch.sigmoid(torch.tensor(6.0).double())
            share = (torch.sigmoid(6.0 - 12.0 * t) - low) / (high - low)
            share = share.clamp(0, 1)
            return share.sqrt(), (1 - share).sqrt()
        return (0.5 * log_alpha_squared).exp(), (-torch.expm1(log_alpha_squared)).sqrt()

    @staticmethod
    def _like(value: Tensor, x: Tensor) -> Tensor:
        return value.reshape(value.shape + (1,) * (x.dim() - value.dim())).to(x.dtype)

    def add_noise(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """x0, noise [B, ..., D] and t [B] -> z_t, shape and dtype of x0."""
        alpha, sigma = self.alpha_sigma(t)
        return self._like(alpha, x0) * x0 + self._like(sigma, x0) * noise

    def target(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """What the network should output for (x0, noise, t)."""
        if self.prediction == "x0":
            return x0
        if self.prediction == "epsilon":
            return noise
        if self.prediction == "flow":
            return noise - x0
        alpha, sigma = self.alpha_sigma(t)
        return self._like(alpha, x0) * noise - self._like(sigma, x0) * x0

    def to_x0(self, prediction: Tensor, z: Tensor, t: Tensor) -> Tensor:
        """Network output at (z, t) -> x0 estimate. For epsilon the caller must keep t below 1 (division by a)."""
        if self.prediction == "x0":
            return prediction
        alpha, sigma = (self._like(value, z) for value in self.alpha_sigma(t))
        if self.prediction == "v":
            return alpha * z - sigma * prediction
        if self.prediction == "flow":
            return z - sigma * prediction
        return (z - sigma * prediction) / alpha

    def noise_of(self, x0: Tensor, z: Tensor, t: Tensor) -> Tensor:
        """The noise that leads from x0 to z at t > 0."""
        alpha, sigma = (self._like(value, z) for value in self.alpha_sigma(t))
        return (z - alpha * x0) / sigma

    def loss_weight(self, t: Tensor) -> Tensor:
        """Weight of the squared error in the prediction's own space; [B] fp64."""
        alpha, sigma = self.alpha_sigma(t)
        snr = (alpha / sigma.clamp_min(1e-8)) ** 2
        if self.weighting == "unit":
            return torch.ones_like(alpha)
        if self.weighting == "velocity":
            # x0-space weight of the v loss is SNR + 1 and of the flow loss 1 / s^2; other spaces follow from eps =
            # SNR * x
            x_weight = 1 / sigma.clamp_min(1e-3) ** 2 if self.path == "rectified_flow" else snr + 1
        else:
            x_weight = snr.clamp_max(self.min_snr_gamma)
        if self.prediction == "x0":
            return x_weight
        if self.prediction == "epsilon":
            return x_weight / snr.clamp_min(1e-8)
        if self.prediction == "v":
            return x_weight / (snr + 1)
        return x_weight * sigma**2

    def step(
        self, x0: Tensor, z: Tensor, t: Tensor, s: Tensor, eta: float = 0.0, noise: Tensor | None = None
    ) -> Tensor:
        """One DDIM step (arXiv 2010.02502, eq. 12 and 16) from t to s < t given an x0 estimate.

        Args:
            x0, z: [B, ..., D]; t, s: [B]; eta: 0 deterministic, 1 ancestral; noise: needed when eta > 0.
        """
        alpha_t, sigma_t = (self._like(value, z) for value in self.alpha_sigma(t))
        alpha_s, sigma_s = (self._like(value, z) for value in self.alpha_sigma(s))
        direction = (z - alpha_t * x0) / sigma_t
        if eta == 0:
            return alpha_s * x0 + sigma_s * direction
        # Ancestral standard deviation for a general (a, s): s_s^2 (1 - (a_t s_s / (a_s s_t))^2), finite at a_t = 0.
        ratio = alpha_t * sigma_s / (alpha_s * sigma_t)
        std = eta * sigma_s * (1 - ratio**2).clamp_min(0).sqrt()
        return alpha_s * x0 + (sigma_s**2 - std**2).clamp_min(0).sqrt() * direction + std * noise
