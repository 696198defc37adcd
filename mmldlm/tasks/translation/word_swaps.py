"""Words that training writes into drafts for the quality head to find."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mmldlm.tasks.batch_draws import counter_generator

SWAPPED_SHARE = 0.1
_SWAP_STREAM = 6  # last counter word; other draws of a sample have smaller ones


class WordSwaps:
    """Draws of words by their frequency, functions of (seed, epoch, sample, slot).

    Args:
        counts: occurrences of each token; 0 for those that are no words. [V]
    """

    def __init__(self, counts: np.ndarray):
        self.cumulative = np.cumsum(counts) / counts.sum()

    def draw(
        self, seed: int, epoch: int, ids: np.ndarray, slots: np.ndarray, attention: Tensor
    ) -> Tensor:
        """Return the word to write at each position, -1 for none: [B, S] int64.

        Args:
            ids, slots: of the samples. [B]
            attention: real tokens, whose last one is the EOS. [B, S]
        """
        swaps = np.full(attention.shape, -1, dtype=np.int64)
        lengths = attention.sum(1).tolist()
        for row, (sample, slot, length) in enumerate(
            zip(ids.tolist(), slots.tolist(), lengths, strict=True)
        ):
            whether, which = counter_generator(seed, epoch, sample, slot, _SWAP_STREAM).random(
                (2, length - 1)
            )
            words = np.searchsorted(self.cumulative, which, side="right").clip(
                max=len(self.cumulative) - 1
            )
            swaps[row, : length - 1] = np.where(whether < SWAPPED_SHARE, words, -1)
        return torch.from_numpy(swaps)
