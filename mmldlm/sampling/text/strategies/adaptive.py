"""Samplers that fill all positions of which the model is sure enough: as many passes as a text
needs.

With c_1 >= c_2 >= ... the largest probabilities of the undecided positions, n of them are filled,
at least one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmldlm.sampling.text.draw import entropy, top_log_probability
from mmldlm.sampling.text.strategies.base import check_range
from mmldlm.sampling.text.strategies.ranked import RankedStrategy


class ThresholdStrategy(RankedStrategy):
    """Fill the positions with c >= threshold (Fast-dLLM, arXiv 2505.22618); above 1: one at a
    time.
    """

    defaults: ClassVar = {"threshold": 0.9, **RankedStrategy.defaults}

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        super().check(options)
        check_range(options, "threshold", 0)

    def score(self, logits: Tensor) -> Tensor:
        return top_log_probability(logits)

    def count(self, scores: Tensor, num_open: Tensor) -> Tensor:
        limit = self.options["threshold"]
        return (scores >= (math.log(limit) if limit > 0 else -math.inf)).sum(1)


class FactorStrategy(RankedStrategy):
    """Fill the largest n with (n + 1)(1 - c_n) < factor (Fast-dLLM, arXiv 2505.22618).

    For factor <= 1 the most probable tokens of these positions are those of their joint
    distribution.
    """

    defaults: ClassVar = {"factor": 0.75, **RankedStrategy.defaults}

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        super().check(options)
        check_range(options, "factor", 0)

    def score(self, logits: Tensor) -> Tensor:
        return top_log_probability(logits)

    def count(self, scores: Tensor, num_open: Tensor) -> Tensor:
        doubt = -torch.expm1(scores.double())
        number = torch.arange(1, scores.shape[1] + 1, device=scores.device)
        return ((number + 1) * doubt < self.options["factor"]).sum(1)


class FrechetStrategy(RankedStrategy):
    """Fill the largest n whose joint probability has a lower bound of more than delta above any
    other text's.

    The bound is Frechet's: sum of the n largest c - (n - 1) - (1 - c_n) > delta. It never fills
    fewer than `factor` with factor = 1 - delta, and as many where all c are equal.
    """

    defaults: ClassVar = {"delta": 0.25, **RankedStrategy.defaults}

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        super().check(options)
        check_range(options, "delta", -math.inf, 1)

    def score(self, logits: Tensor) -> Tensor:
        return top_log_probability(logits)

    def count(self, scores: Tensor, num_open: Tensor) -> Tensor:
        doubt = -torch.expm1(scores.double())
        return (1 - doubt.cumsum(1) - doubt > self.options["delta"]).sum(1)


class EntropyBoundedStrategy(RankedStrategy):
    """Fill the largest set, surest first, whose entropies sum to at most gamma without the largest
    (arXiv 2505.24857).

    This sum bounds the nats by which the tokens depend on each other, which filling them at once
    ignores. gamma in nats; 0: one at a time but for certain tokens.
    """

    defaults: ClassVar = {"gamma": 0.1, **RankedStrategy.defaults}

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        super().check(options)
        check_range(options, "gamma", 0)

    def score(self, logits: Tensor) -> Tensor:
        return -entropy(logits)

    def count(self, scores: Tensor, num_open: Tensor) -> Tensor:
        nats = -scores.double()
        return (nats.cumsum(1) - nats <= self.options["gamma"]).sum(1)
