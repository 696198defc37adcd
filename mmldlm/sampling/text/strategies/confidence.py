"""Confidence sampling: the most certain positions first (MaskGIT, arXiv 2202.04200)."""

from __future__ import annotations

import torch
from torch import Tensor

from mmldlm.sampling.text.draw import top_log_probability
from mmldlm.sampling.text.strategies.base import TextStrategy


class ConfidenceStrategy(TextStrategy):
    """Decide, at each step, the positions with the largest top probability, as many as the noise schedule prescribes.

    The choice of positions does not depend on the draws. A step decides at least one position, so a text of n tokens
    needs at most n steps.
    """

    default_temperature = 0.0

    def __init__(self, state, **options):
        super().__init__(state, **options)
        fraction = self.diffusion.stay_masked(torch.ones(1, 1, device=state.lengths.device), self._grid(self.row_steps))
        self.masks_left = torch.floor((state.lengths - 1)[:, None] * fraction + 1e-9).long()

    @staticmethod
    def num_passes(lengths: Tensor, steps: int) -> Tensor:
        return (lengths - 1).clamp(1, steps)

    def positions(self, k: int) -> Tensor:
        return (self.state.undecided & (self._num_to_unmask(k) > 0)[:, None]).flatten().nonzero()[:, 0]

    def update(self, k: int, positions: Tensor, logits: Tensor | None) -> None:
        num_to_unmask = self._num_to_unmask(k)
        self.state.write_eos((num_to_unmask > 0)[:, None])
        if len(positions):
            self._penalize(positions, logits)
            chosen = self._most_confident(num_to_unmask, positions, logits)
            self._draw(positions[chosen], logits[chosen])

    def _num_to_unmask(self, k: int) -> Tensor:
        return self.state.undecided.sum(1) - self.masks_left[:, k + 1]

    def _most_confident(self, num_to_unmask: Tensor, positions: Tensor, logits: Tensor) -> Tensor:
        """Return the indices into `positions` that this step decides."""
        score = torch.full(self.state.undecided.shape, float("-inf"), device=logits.device)
        score.view(-1)[positions] = top_log_probability(logits)
        rank = score.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        return (rank < num_to_unmask[:, None]).flatten()[positions].nonzero()[:, 0]
