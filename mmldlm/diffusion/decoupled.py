"""Decoupled diffusion: z_t = (1 - t) x0 + sqrt(t) noise, "image to zero and zero to noise" (DDM,
arXiv 2306.13720).

RadioDiff's process with C = -x0 (z_t = x0 + t C + sqrt(t) noise). As a path with alpha = 1 - t and
sigma = sqrt(t) it needs no sampler of its own: its reverse step is DDIM with the noise of
`bridge_eta`. This file holds what is specific to the process: its grid, its loss weights, and the
prediction of x0 and the noise at once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmldlm.diffusion.gaussian import PREDICTIONS, GaussianProcess, Prediction

DDM_WEIGHTINGS = ("ddm", "ddm_inverse")
# DDM's x0 estimate z - t C - sqrt(t) noise with C = -x0: it trusts z where t is small.
X0_EPSILON = Prediction(
    target=lambda alpha, sigma, x0, noise: torch.cat([x0, noise], -1),
    to_x0=lambda alpha, sigma, prediction, z: (
        z - sigma * prediction.chunk(2, -1)[1] + sigma**2 * prediction.chunk(2, -1)[0]
    ),
    weight=lambda weight, snr, sigma: torch.stack([weight, weight / snr.clamp_min(1e-8)], -1),
)


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
        t: Timesteps in [0, 1].
        kind: Name of the weights: ddm (2 e^(1 - t), e^sqrt(t); RadioDiff) or ddm_inverse (1 / t, 1
            / (1 - t); DDM).
        cap: Largest weight of ddm_inverse, whose weights are infinite at the ends.
    """
    if kind == "ddm":
        return torch.stack([2 * torch.exp(1 - t), torch.exp(t.sqrt())], -1)
    # This is min(1 / x, cap) without the infinity.
    return 1 / torch.stack([t, 1 - t], -1).clamp_min(1 / cap)


class DecoupledProcess(GaussianProcess):
    """A `GaussianProcess` on this path.

    Weighting velocity is not supported: dz/dt = -x0 + noise / (2 sqrt(t)) is infinite at t = 0.

    Args:
        prediction: Output of the network: x0, epsilon, or x0_epsilon: both, side by side.
        weighting: Weighting: unit, min_snr, ddm or ddm_inverse (`loss_weights`).
        min_snr_gamma: Gamma of min_snr.
        ddm_weight_cap: Largest weight of ddm_inverse.

    """

    schedules = {"decoupled": alpha_sigma}
    predictions = {name: PREDICTIONS[name] for name in ("x0", "epsilon")} | {
        "x0_epsilon": X0_EPSILON
    }
    named_etas = {"bridge": bridge_eta}

    def __init__(
        self,
        prediction: str = "x0",
        weighting: str = "unit",
        min_snr_gamma: float = 5.0,
        ddm_weight_cap: float = 100.0,
    ):
        super().__init__("decoupled", prediction, weighting, min_snr_gamma)
        self.ddm_weight_cap = ddm_weight_cap
        if prediction == "x0_epsilon":
            self.num_predictions, self.diagnostics = 2, ("latent_gap",)

    def sampling_grid(self, steps: int) -> Tensor:
        """Timesteps that are even in the cosine path's time, whose steps of the SNR are even near
        both ends. [steps + 1] fp64
        """
        return timestep_of_cosine(super().sampling_grid(steps))

    def loss_weights(self, t: Tensor) -> Tensor:
        """Weights of the squared errors in the space of the targets. [B], of x0_epsilon [B, 2];
        fp64
        """
        if self.weighting in DDM_WEIGHTINGS:
            pair = loss_weights(t.double(), self.weighting, self.ddm_weight_cap)
            return {"x0": pair[..., 0], "epsilon": pair[..., 1], "x0_epsilon": pair}[
                self.prediction
            ]
        weights = super().loss_weights(t)
        if self.weighting == "unit" and self.num_predictions == 2:
            return weights[..., None].expand(*weights.shape, 2)
        return weights

    def diagnose(self, predictions: Tensor, x0: Tensor) -> tuple[Tensor, ...]:
        """Of x0_epsilon, latent_gap: the root mean square difference between the x0 that is
        predicted and the x0 estimate of both predictions. [B, ...]
        """
        if self.num_predictions == 1:
            return ()
        difference = predictions.float().chunk(2, -1)[0] - x0
        return (difference.square().mean(-1).sqrt(),)
