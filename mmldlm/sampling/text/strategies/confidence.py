"""A given number of passes, the surest positions first (MaskGIT, arXiv 2202.04200)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from mmldlm.sampling.text.draw import entropy, top_log_probability, top_margin
from mmldlm.sampling.text.strategies.ranked import RankedStrategy
from mmldlm.sampling.text.strategies.schedule import filled_after


class ConfidenceStrategy(RankedStrategy):
    """Decide, at each step, the positions with the largest top probability.

    How many, the noise schedule prescribes for num_steps (even for the log-linear one), or the
    option `schedule`. A pass decides at least one position, so a text of n tokens needs at most n
    passes. With spacing or distinct, what had to wait is filled in later passes, of which there
    may be more than num_steps.
    """

    defaults: ClassVar = {"num_steps": 16, "schedule": None, **RankedStrategy.defaults}

    def __init__(self, state, **settings):
        super().__init__(state, **settings)
        steps, schedule, num_open = (
            self.options["num_steps"],
            self.options["schedule"],
            self.num_open,
        )
        if schedule is not None:
            self.masks_left = num_open[:, None] - filled_after(schedule, num_open, num_open + 1)
            return
        row_steps = (
            torch.full_like(num_open, steps) if self.shared_schedule else num_open.clamp(1, steps)
        )
        k = torch.arange(1, steps + 1, device=row_steps.device, dtype=torch.float64)
        times = (1.0 - k / row_steps[:, None]).clamp_min(0.0)  # a text with fewer steps stays at 0
        fraction = self.diffusion.stay_masked(torch.ones(1, 1, device=row_steps.device), times)
        self.masks_left = torch.floor(num_open[:, None] * fraction + 1e-9).long()

    def positions(self) -> Tensor:
        undecided = self.state.undecided
        if self.shared_schedule:  # a step that fills nothing of a text needs none of its logits
            undecided = undecided & (self.count(undecided, undecided.sum(1)) > 0)[:, None]
        return undecided.flatten().nonzero()[:, 0]

    def score(self, logits: Tensor) -> Tensor:
        return top_log_probability(logits)

    def count(self, scores: Tensor, num_open: Tensor) -> Tensor:
        return num_open - self.masks_left[:, min(self.number, self.masks_left.shape[1] - 1)]


class MarginStrategy(ConfidenceStrategy):
    """As confidence, by the largest less the second largest probability (arXiv 2502.06768)."""

    def score(self, logits: Tensor) -> Tensor:
        return top_margin(logits)


class EntropyStrategy(ConfidenceStrategy):
    """As confidence, the smallest entropy first."""

    def score(self, logits: Tensor) -> Tensor:
        return -entropy(logits)
