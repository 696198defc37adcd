"""Micro-batches of the autoregressive task: every token is scored."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mmldlm.data.batch import Batch
from mmldlm.data.batch_plan import GlobalBatch
from mmldlm.tasks.baselines.common.data import BaselineData
from mmldlm.tasks.baselines.common.text_collator import PaddedTexts, TextCollator
from mmldlm.tasks.translation.candidates import CandidateSampler

_CANDIDATE_STREAM = 3  # apart from those of the text collator


class ArCollator(TextCollator):
    """Adds the clean text_tokens [B, S] int64 and, of the M tokens of real samples (EOS among
    them), text_positions [M] int64 in B * S, text_targets [M] int64 and text_weights [M] fp32, all
    1; with candidates text_candidates [C] and text_columns [M] int64.

    Args:
        data: of the run. condition_dropout, seed: see TextCollator.
        candidates: of loss.text_candidates; None: the text head scores the whole vocabulary.
    """

    def __init__(
        self, data: BaselineData, condition_dropout: float | None, seed: int | None = None,
        candidates: CandidateSampler | None = None,
    ):  # fmt: skip
        super().__init__(data, condition_dropout, seed)
        self.candidates = candidates

    def noise(self, texts: PaddedTexts) -> dict[str, Tensor]:
        positions = (texts.attention & texts.real[:, None]).flatten().nonzero()[:, 0]
        return {
            "text_tokens": texts.tokens,
            "text_positions": positions,
            "text_targets": texts.tokens.flatten()[positions],
            "text_weights": torch.ones(len(positions)),
        }

    def collate(
        self, batch: GlobalBatch, slots: np.ndarray, samples, lengths: np.ndarray
    ) -> Batch:
        """Build a micro-batch; see Collator."""
        found = super().collate(batch, slots, samples, lengths)
        if self.candidates is not None:  # one sample of them for the global batch
            key, counter = [self.seed, batch.epoch], [0, batch.index, 0, _CANDIDATE_STREAM]
            generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
            found.tensors |= self.candidates.tensors(found.tensors["text_targets"], generator)
        return found
