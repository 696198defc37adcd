"""Samplers that fill the surest positions of a text."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from mmldlm.sampling.text.strategies.base import TextStrategy


class RankedStrategy(TextStrategy):
    """Rank the undecided positions of each text by a score and fill the first few.

    The order depends on state and logits alone. Equal scores are ranked by position.
    """

    def positions(self) -> Tensor:
        return self.state.undecided.flatten().nonzero()[:, 0]

    @abstractmethod
    def score(self, logits: Tensor) -> Tensor:
        """Return how sure the model is of a position: logits [M, V] -> [M]; NaN logits are an error."""

    @abstractmethod
    def count(self, scores: Tensor, num_open: Tensor) -> Tensor:
        """Return how many positions of each text to fill, before the bounds of 1 and all: [B] int64.

        Args:
            scores: of each text, the surest first, -inf after those that are undecided. [B, S]
            num_open: undecided positions of each text. [B]
        """

    def choose(self, positions: Tensor, logits: Tensor) -> Tensor:
        scores = torch.full(self.state.undecided.shape, float("-inf"), device=logits.device)
        scores.view(-1)[positions] = self.score(logits)
        order = scores.argsort(dim=1, descending=True, stable=True)
        num_open = self.state.undecided.sum(1)
        count = self.count(scores.gather(1, order), num_open)
        if not self.shared_schedule:
            count = count.clamp_min(1)
        rank = order.argsort(dim=1)
        return (rank < torch.minimum(count, num_open)[:, None]).flatten()[positions].nonzero()[:, 0]
