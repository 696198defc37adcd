"""Tokens that the text head scores in training under loss.text_candidates: frequent ones and a
sample of the others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmldlm.data.run_data import RunData
from mmldlm.models.linear_cross_entropy import Candidates
from mmldlm.tasks.translation.config import TranslationConfig
from mmldlm.tasks.translation.frequencies import token_counts

NUM_SAMPLED = 1024


class CandidateSizes(NamedTuple):
    """Numbers of frequent tokens, of sampled ones, and of the tokens from which those are
    drawn.
    """

    frequent: int
    sampled: int
    population: int


def candidate_sizes(config: TranslationConfig) -> CandidateSizes:
    """Sizes for a config with loss.text_candidates and model.vocab_size set; [MASK] is never a
    candidate.
    """
    frequent = min(config.loss.text_candidates, config.model.vocab_size - 1)
    population = config.model.vocab_size - 1 - frequent
    return CandidateSizes(frequent, min(NUM_SAMPLED, population), population)


def candidates_of(config: TranslationConfig, tensors: dict[str, Tensor]) -> Candidates:
    """The text head's argument for a batch that CandidateSampler completed."""
    return Candidates(
        tensors["text_candidates"], tensors["text_columns"], *candidate_sizes(config)
    )


class CandidateSampler:
    """Draws the candidates of a batch.

    Args:
        data: of the run; the training split is counted.
    """

    def __init__(self, data: RunData):
        config = data.config
        self.sizes = candidate_sizes(config)
        vocab_size = config.model.vocab_size
        ids = np.argsort(-token_counts(data), kind="stable")
        ids = ids[ids != config.model.mask_token_id]
        self.frequent, self.others = (
            np.sort(ids[: self.sizes.frequent]),
            np.sort(ids[self.sizes.frequent :]),
        )
        self._frequent_column = np.full(vocab_size, -1)
        self._frequent_column[self.frequent] = np.arange(len(self.frequent))

    def tensors(self, targets: Tensor, generator: np.random.Generator) -> dict[str, Tensor]:
        """Candidates of a micro-batch.

        Args:
            targets: int64 [M].
            generator: of the global batch: all its micro-batches have the same sample.

        Returns:
            text_candidates [C] and text_columns [M], int64 (`Candidates`).
        """
        sampled = generator.choice(self.others, self.sizes.sampled, replace=False, shuffle=False)
        ids = targets.numpy()
        columns = self._frequent_column[ids]
        own, place = np.unique(ids[columns < 0], return_inverse=True)
        columns[columns < 0] = self.sizes.frequent + self.sizes.sampled + place
        tokens = np.concatenate([self.frequent, sampled, own])
        return {
            "text_candidates": torch.from_numpy(tokens),
            "text_columns": torch.from_numpy(columns),
        }
