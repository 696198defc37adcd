"""Ancestral sampling: the exact posterior of masked diffusion."""

from __future__ import annotations

import torch
from torch import Tensor

from mmldlm.sampling.text.strategies.base import TextStrategy


class AncestralStrategy(TextStrategy):
    """Decide each position at a random step, as the posterior of the masking process prescribes.

    A position masked at t stays masked at s with probability (1 - alpha_s) / (1 - alpha_t). One uniform per position
    determines its step in advance, so a pass computes only the positions that it decides.
    """

    default_temperature = 1.0

    def __init__(self, state, **options):
        super().__init__(state, **options)
        grid = self._grid(torch.full((1,), self.steps, device=state.lengths.device))
        # Step k unmasks what is masked at its t and not at its s; at s = 0 nothing is masked.
        stay = self.diffusion.stay_masked(torch.ones_like(grid), grid)[0]
        self.unmask_step = (self.uniform[:, 0, :, None] < stay[1:]).sum(-1)

    def positions(self, k: int) -> Tensor:
        return (self.state.undecided & (self.unmask_step == k)).flatten().nonzero()[:, 0]

    def update(self, k: int, positions: Tensor, logits: Tensor | None) -> None:
        self.state.write_eos(self.unmask_step == k)
        if len(positions):
            self._penalize(positions, logits)
            self._draw(positions, logits)
