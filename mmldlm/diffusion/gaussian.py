"""Gaussian diffusion of latents: z_t = alpha(t) x0 + sigma(t) noise, with conversions between
prediction targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mmldlm.utils.validation import not_none

Eta = float | Callable[[Tensor, Tensor], Tensor]
"""Noise of a DDIM step: 0 none, 1 ancestral, or a function of (t, s) in fp64."""


def _cosine(t: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cos(0.5 * math.pi * t), torch.sin(0.5 * math.pi * t)


def _linear(t: Tensor) -> tuple[Tensor, Tensor]:
    """Integral of beta from 0.1 to 20: the continuous limit of DDPM's 1000 linear betas (arXiv
    2011.13456).
    """
    log_alpha_squared = -(0.1 * t + 0.5 * (20.0 - 0.1) * t**2)
    return (0.5 * log_alpha_squared).exp(), (-torch.expm1(log_alpha_squared)).sqrt()


def _sigmoid(t: Tensor) -> tuple[Tensor, Tensor]:
    """alpha^2 falls from 0.9975 to 0.0025 along a logistic curve, rescaled to reach 1 and 0
    exactly.
    """
    low = torch.sigmoid(torch.tensor(-6.0).double())
    high = torch.sigmoid(torch.tensor(6.0).double())
    alpha_squared = ((torch.sigmoid(6.0 - 12.0 * t) - low) / (high - low)).clamp(0, 1)
    return alpha_squared.sqrt(), (1 - alpha_squared).sqrt()


def _rectified_flow(t: Tensor) -> tuple[Tensor, Tensor]:
    return 1 - t, t


class Prediction(NamedTuple):
    """One prediction target.

    Attributes:
        target: (alpha, sigma, x0, noise) -> target of the network.
        to_x0: (alpha, sigma, prediction, z) -> x0 estimate.
        weight: (x0-space weight, SNR, sigma) -> the weight in this target's space.
        max_timestep: Largest t at which `to_x0` is computed; above it, t is replaced by it.
        sampling_start: Timestep at which sampling starts.
    """

    target: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    to_x0: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    weight: Callable[[Tensor, Tensor, Tensor], Tensor]
    max_timestep: float = 1.0
    sampling_start: float = 1.0


# Schedule -> function of t (fp64) that returns alpha and sigma.
SCHEDULES = {
    "cosine": _cosine,
    "linear": _linear,
    "sigmoid": _sigmoid,
    "rectified_flow": _rectified_flow,
}
PREDICTIONS = {
    "x0": Prediction(
        target=lambda alpha, sigma, x0, noise: x0,
        to_x0=lambda alpha, sigma, prediction, z: prediction,
        weight=lambda weight, snr, sigma: weight,
    ),
    "v": Prediction(
        target=lambda alpha, sigma, x0, noise: alpha * noise - sigma * x0,
        to_x0=lambda alpha, sigma, prediction, z: alpha * z - sigma * prediction,
        weight=lambda weight, snr, sigma: weight / (snr + 1),
    ),
    # The x0 estimate divides by alpha(t), which is 0 at t = 1 under most schedules.
    "epsilon": Prediction(
        target=lambda alpha, sigma, x0, noise: noise,
        to_x0=lambda alpha, sigma, prediction, z: (z - sigma * prediction) / alpha,
        weight=lambda weight, snr, sigma: weight / snr.clamp_min(1e-8),
        max_timestep=0.999,
        sampling_start=0.99,
    ),
    "flow": Prediction(
        target=lambda alpha, sigma, x0, noise: noise - x0,
        to_x0=lambda alpha, sigma, prediction, z: z - sigma * prediction,
        weight=lambda weight, snr, sigma: weight * sigma**2,
    ),
}


class GaussianProcess:
    """Continuous diffusion of latents x0 [B, ..., D]: forward noising, targets, loss weights and
    one step back. A subclass is another path (`DecoupledProcess`).

    Schedules are continuous in t in [0, 1] (t = 0 data, t = 1 noise). Variance preserving: alpha =
    cos(pi t / 2) (cosine), the linear-beta DDPM (linear, arXiv 2006.11239) and linear in logit
    space (sigmoid). The straight path alpha = 1 - t, sigma = t is rectified flow (arXiv
    2209.03003). There are no discrete timestep indices.

    Args:
        schedule: Schedule, one of `schedules`.
        prediction: Output of the network, one of `predictions` that holds under the schedule.
        weighting: Weighting: unit, min_snr (arXiv 2303.09556) or velocity; always in the space of
            the prediction.
        min_snr_gamma: Gamma of min_snr.
        velocity_floor: Least sigma that velocity divides by on the straight path.

    `LatentDiffusionConfig` says which of these go together.

    Attributes:
        num_predictions: P, the number of vectors that the network predicts per latent. Predictions
            and targets are [B, ..., P * D].
        sampling_start: Timestep at which sampling starts: 1, or below it where `to_x0` is not
            defined at 1.
        solvers: Names of the solvers that `step` (ddim), `multistep` (dpm++2m) and `heun_step`
            (heun) offer.
        named_etas: Functions (t, s) -> eta of `step` that belong to this process, by name.
        diagnostics: Names of the metrics that `diagnose` returns, as in the logs.
    """

    schedules: ClassVar[Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]]] = SCHEDULES
    predictions: ClassVar[Mapping[str, Prediction]] = PREDICTIONS
    named_etas: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {}
    diagnostics: tuple[str, ...] = ()

    def __init__(
        self,
        schedule: str = "cosine",
        prediction: str = "x0",
        weighting: str = "unit",
        min_snr_gamma: float = 5.0,
        velocity_floor: float = 1e-3,
    ):
        self.schedule, self.prediction, self.weighting = schedule, prediction, weighting
        self.min_snr_gamma, self.velocity_floor = min_snr_gamma, velocity_floor
        self.num_predictions = 1
        self.sampling_start = self.predictions[prediction].sampling_start
        self.solvers = ("ddim", "dpm++2m", *(("heun",) if schedule == "rectified_flow" else ()))

    @property
    def _rule(self) -> Prediction:
        # Looked up instead of stored, because batches carry their process from data workers, which
        # pickle it.
        return self.predictions[self.prediction]

    def alpha_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """alpha(t) and sigma(t) in fp64, same shape as t in [0, 1]."""
        return self.schedules[self.schedule](t.double())

    def _alpha_sigma_like(self, t: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """alpha(t) and sigma(t) of t [B] in the dtype of x [B, ...], with trailing dimensions to
        broadcast.
        """
        alpha, sigma = self.alpha_sigma(t)
        return self._like(alpha, x), self._like(sigma, x)

    @staticmethod
    def _like(values: Tensor, x: Tensor) -> Tensor:
        """[B] in the dtype of x [B, ...], with trailing dimensions to broadcast."""
        return values.reshape(values.shape + (1,) * (x.dim() - values.dim())).to(x.dtype)

    def sampling_grid(self, steps: int) -> Tensor:
        """Evenly spaced timesteps from `sampling_start` to 0. [steps + 1] fp64"""
        return torch.linspace(self.sampling_start, 0.0, steps + 1, dtype=torch.float64)

    def add_noise(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """x0, noise [B, ..., D] and t [B] -> z_t, shape and dtype of x0."""
        alpha, sigma = self._alpha_sigma_like(t, x0)
        return alpha * x0 + sigma * noise

    def targets(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Targets of the network for (x0, noise, t). [B, ..., P * D]"""
        return self._rule.target(*self._alpha_sigma_like(t, x0), x0, noise)

    def to_x0(self, predictions: Tensor, z: Tensor, t: Tensor) -> Tensor:
        """Estimate of x0 from the network's output at (z, t).

        For epsilon, t above 0.999 counts as 0.999.
        """
        if self.prediction == "x0":
            return predictions
        alpha, sigma = self._alpha_sigma_like(t.clamp_max(self._rule.max_timestep), z)
        return self._rule.to_x0(alpha, sigma, predictions, z)

    def diagnose(self, predictions: Tensor, x0: Tensor) -> tuple[Tensor, ...]:
        """The metrics of each latent that only this process has, for the logs: none. [B, ...]

        Args:
            predictions: Output of the network at some (z, t). [B, ..., P * D]
            x0: Estimate that `to_x0` derives from them. [B, ..., D]
        """
        return ()

    def loss_weights(self, t: Tensor) -> Tensor:
        """Weight of the squared error in the prediction's own space. [B]; fp64"""
        alpha, sigma = self.alpha_sigma(t)
        if self.weighting == "unit":
            return torch.ones_like(alpha)
        snr = (alpha / sigma.clamp_min(1e-8)) ** 2
        if self.weighting == "min_snr":
            x0_weight = snr.clamp_max(self.min_snr_gamma)
        elif self.schedule == "rectified_flow":
            # The flow loss weighs the squared x0 error by 1 / sigma^2.
            x0_weight = 1 / sigma.clamp_min(self.velocity_floor) ** 2
        else:
            # The v loss weights x0 by SNR + 1.
            x0_weight = snr + 1
        return self._rule.weight(x0_weight, snr, sigma)

    def step(
        self,
        predictions: Tensor,
        z: Tensor,
        t: Tensor,
        s: Tensor,
        *,
        eta: Eta = 0.0,
        noise: Tensor | None = None,
        project: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """One DDIM step (arXiv 2010.02502, eq. 12 and 16) from t to s < t; under rectified flow,
        an Euler step.

        Args:
            predictions: Network output at (z, t). [B, ..., P * D]
            z: State at t. [B, ..., D]
            t: Current timestep. [B]
            s: Next timestep. [B]
            eta: 0 deterministic, 1 ancestral, or a function of (t, s), one of `named_etas`.
            noise: Standard normal noise like z, needed when eta > 0.
            project: Function that is applied to the x0 estimate before the step.
        """
        x0 = self.to_x0(predictions, z, t)
        x0 = x0 if project is None else project(x0)
        alpha_t, sigma_t = self._alpha_sigma_like(t, z)
        alpha_s, sigma_s = self._alpha_sigma_like(s, z)
        direction = (z - alpha_t * x0) / sigma_t
        if eta == 0:
            return alpha_s * x0 + sigma_s * direction
        share = self._like(eta(t.double(), s.double()), z) if callable(eta) else eta
        # Ancestral standard deviation: sigma_s^2 (1 - (alpha_t sigma_s / (alpha_s sigma_t))^2),
        # finite at alpha_t = 0.
        ratio = alpha_t * sigma_s / (alpha_s * sigma_t)
        std = share * sigma_s * (1 - ratio**2).clamp_min(0).sqrt()
        mean = alpha_s * x0 + (sigma_s**2 - std**2).clamp_min(0).sqrt() * direction
        return mean + std * not_none(noise)

    def multistep(
        self,
        x0: Tensor,
        z: Tensor,
        t: Tensor,
        s: Tensor,
        previous: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """One step of DPM-Solver++(2M) from t to s < t (arXiv 2211.01095): second order, one
        network evaluation.

        z' = (sigma' / sigma) z + (alpha' - alpha sigma' / sigma) x, where x extrapolates the x0
        estimates of this step and the one before, linearly in lambda = log(alpha / sigma), to the
        middle of the step. Without a step before, or after one from pure noise (lambda = -inf), x
        is x0 and the step that of DDIM.

        Args:
            x0: Estimate at (z, t). [B, ..., D]
            z: State at t. [B, ..., D]
            t: Current timestep. [B]
            s: Next timestep, above 0. [B]
            previous: x0 estimate and timestep of the step before.
        """
        alpha_t, sigma_t = self._alpha_sigma_like(t, z)
        alpha_s, sigma_s = self._alpha_sigma_like(s, z)
        if previous is not None:
            before, r = previous
            half = (
                0.5 * (self._log_snr(s) - self._log_snr(t)) / (self._log_snr(t) - self._log_snr(r))
            )
            x0 = x0 + self._like(half, z) * (x0 - before)
        ratio = sigma_s / sigma_t
        return ratio * z + (alpha_s - alpha_t * ratio) * x0

    def _log_snr(self, t: Tensor) -> Tensor:
        """lambda(t) = log(alpha / sigma), fp64; -inf where alpha is a rounded zero."""
        alpha, sigma = self.alpha_sigma(t)
        return torch.where(alpha > 1e-8, alpha, 0.0).log() - sigma.log()

    def heun_step(
        self,
        predict: Callable[[Tensor, float], Tensor],
        z: Tensor,
        t: float,
        s: float,
        *,
        project: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """One Heun step of rectified flow from t to s < t, 0 < s: second order, with two network
        evaluations.

        Args:
            predict: (z, t) -> network output.
            z: State at t. [B, ..., D]
            t: Current timestep.
            s: Next timestep.
            project: Function that is applied to each x0 estimate.
        """
        assert "heun" in self.solvers, (
            f"heun_step needs schedule rectified_flow, not {self.schedule}"
        )

        def velocity(z: Tensor, t: float) -> Tensor:
            times = torch.full((len(z),), t, dtype=torch.float64, device=z.device)
            x0 = self.to_x0(predict(z, t), z, times)
            return (z - (x0 if project is None else project(x0))) / t

        first = velocity(z, t)
        return z + (s - t) * 0.5 * (first + velocity(z + (s - t) * first, s))
