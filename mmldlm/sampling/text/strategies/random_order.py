"""Samplers whose order is drawn before the first pass: a pass computes only the positions that it
fills.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from mmldlm.sampling.text.strategies.base import TextStrategy
from mmldlm.sampling.text.strategies.schedule import filled_after


class RandomOrderStrategy(TextStrategy):
    """Fill each position at a step that its uniform number determines.

    Steps without a token of a text cost it no pass, unless all texts share the schedule. The EOS
    has its step, too: written there, it is visible to all later ones.
    """

    default_temperature: ClassVar[float] = 1.0
    deterministic_order: ClassVar[bool] = False

    def __init__(self, state, **settings):
        super().__init__(state, **settings)
        steps = self._steps(self.uniform[:, 0])
        self.pass_of = steps if self.shared_schedule else self._dense(steps)
        state.write_eos(self.pass_of < 0)

    @abstractmethod
    def _steps(self, uniform: Tensor) -> Tensor:
        """Return the step of each position from uniform [B, S]: [B, S] int64 from 0."""

    def _dense(self, steps: Tensor) -> Tensor:
        """Number the steps that fill tokens of a text from 0; the EOS gets the last of them up to
        its own, or -1.
        """
        taken = torch.zeros(
            len(steps), int(steps.max()) + 1, dtype=torch.int64, device=steps.device
        )
        taken.scatter_add_(1, steps, self.state.undecided.long())
        return (taken > 0).cumsum(1).gather(1, steps) - 1

    def _ranks(self, uniform: Tensor) -> Tensor:
        """Return the place of each masked position in the order of masks, the largest number
        first: [B, S] int64.

        A position with number u is masked while the masked share is above u, so large numbers are
        opened first.
        """
        masked = (self.state.tokens == self.state.mask_token_id) & self.state.real
        order = uniform.masked_fill(~masked, -1.0).argsort(dim=1, descending=True, stable=True)
        return order.argsort(dim=1)

    def positions(self) -> Tensor:
        return (self.state.undecided & (self.pass_of == self.number)).flatten().nonzero()[:, 0]

    def choose(self, positions: Tensor, logits: Tensor) -> Tensor:
        return torch.arange(len(positions), device=positions.device)

    def _write_eos(self, rows: Tensor) -> None:
        self.state.write_eos(self.pass_of == self.number)


class AncestralStrategy(RandomOrderStrategy):
    """Decide each position at a random step, as the posterior of the masking process prescribes
    (MDLM).

    A position masked at t stays masked at s with probability (1 - alpha_s) / (1 - alpha_t).
    """

    defaults: ClassVar = {"num_steps": 16}

    def _steps(self, uniform: Tensor) -> Tensor:
        steps = self.options["num_steps"]
        grid = 1 - torch.arange(steps + 1, dtype=torch.float64, device=uniform.device) / steps
        # Step k unmasks what is masked at its t and not at its s; at s = 0 nothing is masked.
        stay = self.diffusion.stay_masked(torch.ones_like(grid), grid)
        return steps - torch.searchsorted(stay[1:].flip(0), uniform.contiguous(), right=True)


class FirstHittingStrategy(RandomOrderStrategy):
    """Fill one token at a time in random order (first-hitting sampler, arXiv 2409.02908).

    The limit of ancestral sampling for many steps: the times at which positions open are
    independent draws of the schedule's law, so their order is uniform, and the time that the model
    sees is that of the masked share.
    """

    def _steps(self, uniform: Tensor) -> Tensor:
        return self._ranks(uniform)


class ScheduledStrategy(RandomOrderStrategy):
    """Fill given numbers of tokens in random order.

    The negative log-likelihood of these texts is at most sum_i n_i c(r_i), with c(r) the nats of a
    token given r others (`mmldlm evaluate` measures c, from which the best schedule follows). The
    numbers count the EOS; a pass that would fill it alone is left out.
    """

    defaults: ClassVar = {"num_steps": 8, "schedule": None}

    def _steps(self, uniform: Tensor) -> Tensor:
        state = self.state
        masked = ((state.tokens == state.mask_token_id) & state.real).sum(1)
        schedule = self.options["schedule"] or [1] * self.options["num_steps"]
        filled = filled_after(schedule, masked, state.lengths)
        ranks = self._ranks(uniform)
        return (ranks[..., None] >= filled[:, None]).sum(-1).clamp_max(filled.shape[1] - 1)
