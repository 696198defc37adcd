"""Samplers whose order is drawn before the first pass: a pass computes only the positions that it fills."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from mmldlm.sampling.text.strategies.base import TextStrategy


class RandomOrderStrategy(TextStrategy):
    """Fill each position at a step that its uniform number determines.

    Steps without a token of a text cost it no pass, unless all texts share the schedule. The EOS has its step, too:
    written there, it is visible to all later ones.
    """

    default_temperature: ClassVar[float] = 1.0
    deterministic_order: ClassVar[bool] = False

    def __init__(self, state, **settings):
        super().__init__(state, **settings)
        steps = self._steps(self.uniform[:, 0])
        if not self.shared_schedule:
            steps = self._dense(steps)
        self.pass_of = steps
        state.write_eos(steps < 0)

    @abstractmethod
    def _steps(self, uniform: Tensor) -> Tensor:
        """Return the step of each position from uniform [B, S]: [B, S] int64 from 0."""

    def _dense(self, steps: Tensor) -> Tensor:
        """Number the steps that fill tokens of a text from 0; the EOS gets the last of them up to its own, or -1."""
        taken = torch.zeros(len(steps), int(steps.max()) + 1, dtype=torch.int64, device=steps.device)
        taken.scatter_add_(1, steps, self.state.undecided.long())
        return (taken > 0).cumsum(1).gather(1, steps) - 1

    def positions(self) -> Tensor:
        return (self.state.undecided & (self.pass_of == self.number)).flatten().nonzero()[:, 0]

    def choose(self, positions: Tensor, logits: Tensor) -> Tensor:
        return torch.arange(len(positions), device=positions.device)

    def _write_eos(self, rows: Tensor) -> None:
        self.state.write_eos(self.pass_of == self.number)


class AncestralStrategy(RandomOrderStrategy):
    """Decide each position at a random step, as the posterior of the masking process prescribes (MDLM).

    A position masked at t stays masked at s with probability (1 - alpha_s) / (1 - alpha_t).
    """

    defaults: ClassVar = {"num_steps": 16}

    def _steps(self, uniform: Tensor) -> Tensor:
        grid = (
            1
            - torch.arange(self.options["num_steps"] + 1, dtype=torch.float64, device=uniform.device)
            / (self.options["num_steps"])
        )
        # Step k unmasks what is masked at its t and not at its s; at s = 0 nothing is masked.
        stay = self.diffusion.stay_masked(torch.ones_like(grid), grid)
        return (uniform[..., None] < stay[1:]).sum(-1)
