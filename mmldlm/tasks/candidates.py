"""The tokens that the text head scores under loss.text_candidates: the most frequent ones, others
drawn per global batch, and a micro-batch's own targets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmldlm.models.linear_cross_entropy import Candidates
from mmldlm.tasks.initialization import token_counts
from mmldlm.tasks.latent_data import LatentData

NUM_SAMPLED_CANDIDATES = 1024


class CandidateSizes(NamedTuple):
    """Numbers of frequent tokens, of sampled ones, and of the tokens from which those are
    drawn.
    """

    frequent: int
    sampled: int
    population: int


def candidate_sizes(config: Any) -> CandidateSizes:
    """Sizes for a config whose loss.text_candidates and model.vocab_size are set; [MASK] is never
    a candidate.
    """
    frequent = min(config.loss.text_candidates, config.model.vocab_size - 1)
    population = config.model.vocab_size - 1 - frequent
    return CandidateSizes(frequent, min(NUM_SAMPLED_CANDIDATES, population), population)


def candidates_of(config: Any, tokens: Tensor | None, columns: Tensor | None) -> Candidates | None:
    """The text head's argument for what CandidateSampler drew; None: the whole vocabulary."""
    if tokens is None or columns is None:
        return None
    return Candidates(tokens, columns, *candidate_sizes(config))


class CandidateSampler:
    """Draws the candidates of a batch.

    Args:
        data: Data of the run; the training split is counted.
    """

    def __init__(self, data: LatentData):
        config = data.config
        self.sizes = candidate_sizes(config)
        vocab_size = config.model.vocab_size
        ids = np.argsort(-token_counts(data), kind="stable")
        ids = ids[ids != config.model.mask_token_id]
        self.frequent = np.sort(ids[: self.sizes.frequent])
        self.others = np.sort(ids[self.sizes.frequent :])
        self._frequent_column = np.full(vocab_size, -1)
        self._frequent_column[self.frequent] = np.arange(len(self.frequent))

    def tensors(self, targets: Tensor, generator: np.random.Generator) -> dict[str, Tensor]:
        """Candidates of a micro-batch.

        Args:
            targets: Target tokens. [M] int64
            generator: Generator of the global batch: all its micro-batches have the same sample.

        Returns:
            text_candidates [C] and text_columns [M], int64 (`Candidates`).
        """
        sampled = generator.choice(self.others, self.sizes.sampled, replace=False, shuffle=False)
        ids = targets.numpy()
        columns = self._frequent_column[ids]
        rare_tokens, rare_index = np.unique(ids[columns < 0], return_inverse=True)
        columns[columns < 0] = self.sizes.frequent + self.sizes.sampled + rare_index
        tokens = np.concatenate([self.frequent, sampled, rare_tokens])
        return {
            "text_candidates": torch.from_numpy(tokens),
            "text_columns": torch.from_numpy(columns),
        }
