"""Samplers that fill the surest positions of a text."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmldlm.sampling.text.strategies.base import TextStrategy, check_range


class RankedStrategy(TextStrategy):
    """Rank the undecided positions of each text by a score and fill the first few.

    The order depends on state and logits alone. Equal scores are ranked by position. Option
    spacing: of the positions so chosen, one nearer than `spacing` x the masked share (rounded up)
    to a surer one waits for a later pass (in the manner of dilated unmasking, arXiv 2506.19037);
    1: none does. Option distinct: of those with the same most probable token all but the surest
    wait. A pass writes them independently, and then the word that is the surest comes twice.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"spacing": 1, "distinct": False}

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        super().check(options)
        check_range(options, "spacing", 1)

    def positions(self) -> Tensor:
        return self.state.undecided.flatten().nonzero()[:, 0]

    @abstractmethod
    def score(self, logits: Tensor) -> Tensor:
        """Return how sure the model is of a position: logits [M, V] -> [M]; NaN logits are an
        error.
        """

    @abstractmethod
    def count(self, scores: Tensor, num_open: Tensor) -> Tensor:
        """Return how many positions of each text to fill, before the bounds of 1 and all: [B]
        int64.

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
        count = torch.minimum(count, num_open)
        if self.options["spacing"] > 1 or self.options["distinct"]:
            tokens = torch.zeros_like(order)
            if self.options["distinct"]:
                tokens.view(-1)[positions] = logits.argmax(-1)
            chosen = self._apart(order, count, tokens)
        else:
            chosen = order.argsort(dim=1) < count[:, None]
        return chosen.flatten()[positions].nonzero()[:, 0]

    def _apart(self, order: Tensor, count: Tensor, tokens: Tensor) -> Tensor:
        """Return the first `count` [B] in order [B, S], less those that have to wait for a surer
        one: [B, S] bool.

        Args:
            tokens: the most probable ones, read with distinct. [B, S]
        """
        distance = (self.options["spacing"] * self.state.masked_share()).ceil()[:, None]
        place = torch.arange(order.shape[1], device=order.device)
        chosen, waits = (torch.zeros_like(order, dtype=torch.bool) for _ in range(2))
        for rank in range(int(count.max())):
            position = order[:, rank : rank + 1]
            takes = (rank < count)[:, None] & ~waits.gather(1, position)
            chosen |= takes & (place == position)
            waits |= takes & ((place - position).abs() < distance)
            if self.options["distinct"]:
                waits |= takes & (tokens == tokens.gather(1, position))
        return chosen
