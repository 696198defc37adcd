"""A given number of steps, the surest positions first (MaskGIT, arXiv 2202.04200)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from mmldlm.sampling.text.draw import top_log_probability
from mmldlm.sampling.text.strategies.ranked import RankedStrategy


class ConfidenceStrategy(RankedStrategy):
    """Decide, at each step, the positions with the largest top probability, as many as the noise schedule prescribes.

    A pass decides at least one position, so a text of n tokens needs at most n passes.
    """

    defaults: ClassVar = {"num_steps": 16}

    def __init__(self, state, **settings):
        super().__init__(state, **settings)
        steps = self.options["num_steps"]
        row_steps = torch.full_like(self.num_open, steps)
        if not self.shared_schedule:
            row_steps = self.num_open.clamp(1, steps)
        k = torch.arange(steps + 1, device=row_steps.device, dtype=torch.float64)
        grid = (1.0 - k / row_steps[:, None]).clamp_min(0.0)  # a text with fewer steps stays at 0
        fraction = self.diffusion.stay_masked(torch.ones(1, 1, device=row_steps.device), grid)
        self.masks_left = torch.floor(self.num_open[:, None] * fraction + 1e-9).long()

    def positions(self) -> Tensor:
        undecided = self.state.undecided
        if self.shared_schedule:  # a step that fills nothing of a text needs none of its logits
            undecided = undecided & (self.count(undecided, undecided.sum(1)) > 0)[:, None]
        return undecided.flatten().nonzero()[:, 0]

    def score(self, logits: Tensor) -> Tensor:
        return top_log_probability(logits)

    def count(self, scores: Tensor, num_open: Tensor) -> Tensor:
        step = min(self.number + 1, self.options["num_steps"])
        return num_open - self.masks_left[:, step]
