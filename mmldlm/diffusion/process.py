"""Protocols of noise processes, as batch noisers, objectives and samplers use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor


class LatentProcess(Protocol):
    """Continuous diffusion of latents x0 [B, ..., D]; timesteps t [B] run from 0 (data) to 1
    (noise).

    Attributes:
        num_predictions: P, the number of vectors that the network predicts per latent. Predictions
            and targets are [B, ..., P * D].
        sampling_start: Timestep at which sampling starts: 1, or below it where `to_x0` is not
            defined at 1.
        named_etas: Functions (t, s) -> eta of `step` that belong to this process, by name.
        diagnostics: Names of the metrics that `diagnose` returns, as in the logs.
        solvers: Names of the solvers that `step` (ddim), `multistep` (dpm++2m) and `heun_step`
            (heun) offer.
    """

    num_predictions: int
    sampling_start: float
    named_etas: Mapping[str, Callable[[Tensor, Tensor], Tensor]]
    diagnostics: tuple[str, ...]
    solvers: tuple[str, ...]

    def sampling_grid(self, steps: int) -> Tensor:
        """Timesteps of a sampler, from `sampling_start` to 0. [steps + 1] fp64"""
        ...

    def add_noise(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """z_t, with the shape and dtype of x0."""
        ...

    def targets(self, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Regression targets of the network at (x0, noise, t)."""
        ...

    def to_x0(self, predictions: Tensor, z: Tensor, t: Tensor) -> Tensor:
        """Estimate of x0 from the network's output at (z, t); finite for every t in [0, 1]."""
        ...

    def diagnose(self, predictions: Tensor, x0: Tensor) -> tuple[Tensor, ...]:
        """Metrics of each latent that only this process has, for the logs. [B, ...]

        Args:
            predictions: Output of the network at some (z, t). [B, ..., P * D]
            x0: Estimate that `to_x0` derives from them. [B, ..., D]
        """
        ...

    def loss_weights(self, t: Tensor) -> Tensor:
        """Weights of the squared error in the space of the targets. [B], or [B, P] where P > 1;
        fp64
        """
        ...

    def step(
        self,
        predictions: Tensor,
        z: Tensor,
        t: Tensor,
        s: Tensor,
        *,
        eta: float | Callable[[Tensor, Tensor], Tensor] = 0.0,
        noise: Tensor | None = None,
        project: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """z_s from z_t, s < t.

        `eta` scales the fresh noise, `project` maps the x0 estimate before it is used.
        """
        ...

    def multistep(
        self,
        x0: Tensor,
        z: Tensor,
        t: Tensor,
        s: Tensor,
        previous: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """z_s from z_t, 0 < s < t, and the x0 estimates at t and at the timestep before (with that
        timestep).
        """
        ...


class Divergence(Protocol):
    """Divergence d of M rows, which a NELBO weights: a NamedTuple of tensors.

    Attributes:
        targets: Clean tokens. [M] int64
    """

    _fields: tuple[str, ...]
    targets: Tensor

    def _asdict(self) -> dict[str, Tensor]: ...

    def score(self, logits: Tensor, rows: slice, wants_grad: bool) -> tuple[Tensor, Tensor | None]:
        """Return d [R] and its gradient [R, V] with respect to the logits, in their dtype.

        Args:
            logits: Logits, fp32 or fp64, -inf for [MASK]. [R, V]
            rows: Indices of these rows among the M.
            wants_grad: Whether to compute the gradient.
        """
        ...


class DivergenceProcess(Protocol):
    """Discrete diffusion of tokens whose NELBO weighs a divergence over the vocabulary, by token
    and noised token.

    Attributes:
        mask_token_id: State of every token at t = 1.
    """

    mask_token_id: int

    def corrupt(
        self, tokens: Tensor, t: Tensor, uniform: Tensor, noisable: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Noised tokens [B, S] and positions whose weight is not zero [B, S] bool; t [B], uniform
        [B, S] fp64.
        """
        ...

    def elbo_weights(self, tokens: Tensor, noised: Tensor, t: Tensor) -> Tensor:
        """The NELBO's weights at t in (0, 1), fp64; the arguments broadcast."""
        ...

    def divergence(self, tokens: Tensor, noised: Tensor, t: Tensor) -> Divergence:
        """Divergence that the weights multiply, of M scored rows."""
        ...

    def is_open(self, tokens: Tensor) -> Tensor:
        """Which tokens a step back may change; same shape, bool."""
        ...

    def sampling_times(self, steps: int) -> Tensor:
        """Falling timesteps from 1 to 0 for `steps` steps. [steps + 1] fp64"""
        ...

    def possible_words(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Logits [..., V] of x_0, -inf for words that a token [...] at t cannot come from."""
        ...

    def reverse(
        self, tokens: Tensor, logits: Tensor, t: Tensor, s: Tensor, uniform: Tensor
    ) -> Tensor:
        """Tokens at s < t drawn from tokens at t and logits [B, S, V]; uniform [2, B, S] in [0,
        1).
        """
        ...
