"""The steps of latents from noise to data, whichever the solver."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmldlm.diffusion.process import LatentProcess
from mmldlm.errors import UserError

SOLVERS = ("ddim", "dpm++2m", "heun")
ETAS = ("bridge",)  # named ones; which a process has: `named_etas`


class LatentSolver:
    """Denoise one batch step by step.

    Args:
        process: noise process of training.
        steps: number of steps.
        method: one of `process.solvers`: ddim, dpm++2m (second order, one pass a step) or heun
            (second order, two).
        eta: noise of DDIM: 0 none, 1 ancestral, or one of `process.named_etas`.
        project: applied to every x0 estimate but the last.

    Raises:
        UserError: a method or eta that the process does not have, or noise for a method that takes
            none.
    """

    def __init__(
        self,
        process: LatentProcess,
        steps: int,
        method: str = "ddim",
        eta: float | str = 0.0,
        project: Callable[[Tensor], Tensor] | None = None,
    ):
        if method not in process.solvers:
            expected = (
                f"method {' or '.join(process.solvers)}, the solvers of this model's noise"
                " schedule"
            )
            raise UserError(
                expected, method, "choose one of them (heun is that of rectified_flow)"
            )
        if eta != 0 and method != "ddim":
            raise UserError(
                f"eta 0 with method {method}, which takes no noise",
                f"eta {eta}",
                "choose method ddim",
            )
        if isinstance(eta, str) and eta not in process.named_etas:
            expected = "a number from 0 to 1 for the eta of this model's noise schedule"
            raise UserError(
                expected, f"eta {eta}", "choose a number (bridge is that of schedule=decoupled)"
            )
        self.process, self.steps, self.method, self.project = process, steps, method, project
        self.eta = process.named_etas[eta] if isinstance(eta, str) else eta
        self.grid: list[float] = process.sampling_grid(steps).tolist()
        self._previous: tuple[Tensor, Tensor] | None = None

    def step(
        self,
        k: int,
        z: Tensor,
        predict: Callable[[Tensor, float], Tensor],
        noise: Tensor | None = None,
    ) -> Tensor:
        """Take step k; the last returns its x0 estimate as it is.

        Args:
            k: 0 .. steps - 1, in order.
            z: state. [B, ..., D]
            predict: (z, t) -> network output.
            noise: like z, needed where eta is not 0.
        """
        t, s = self.grid[k : k + 2]
        if k < self.steps - 1 and self.method == "heun":
            return self.process.heun_step(predict, z, t, s, project=self.project)
        here, there = _times(t, z), _times(s, z)
        prediction = predict(z, t)
        if k == self.steps - 1:
            return self.process.to_x0(prediction, z, here)
        if self.method == "ddim":
            return self.process.step(
                prediction, z, here, there, eta=self.eta, noise=noise, project=self.project
            )
        x0 = self.process.to_x0(prediction, z, here)
        x0 = x0 if self.project is None else self.project(x0)
        previous, self._previous = self._previous, (x0, here)
        return self.process.multistep(x0, z, here, there, previous)


def _times(t: float, z: Tensor) -> Tensor:
    return torch.full((len(z),), t, dtype=torch.float64, device=z.device)
