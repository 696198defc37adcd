"""The noiser of the corrector task: texts with a hypothesis are wholly masked, and read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmldlm.data.batch_plan import GlobalBatch
from mmldlm.data.lengths import AnyLengths
from mmldlm.tasks.corrector.config import CorrectorConfig
from mmldlm.tasks.corrector.hypotheses import SplitHypotheses
from mmldlm.tasks.corrector.model import Hypotheses
from mmldlm.tasks.translation.noiser import L2T, Noiser, PaddedSamples, TranslationBatch
from mmldlm.utils.counter_rng import counter_generator

_HYPOTHESIS_STREAM = 7
"""Last counter word; those of other collators are in tasks/collation.py."""


@dataclass(kw_only=True)
class CorrectorBatch(TranslationBatch):
    """One micro-batch, noised, with earlier texts for its latents.

    Attributes:
        hypotheses: Earlier texts for the latents; None: the model reads none.
    """

    hypotheses: Hypotheses | None = None


class CorrectorNoiser(Noiser):
    """Collator of the corrector task.

    Args:
        config: The run's config.
        words: Further arguments of Noiser.
        hypotheses: Those of the split whose samples are noised. None: there are none, as in the
            passes of an evaluation that know of no corrections.
        reads_hypotheses: Whether the model reads them. Else texts are only masked as if it did.
        options: Further arguments of Noiser.
    """

    batch_class = CorrectorBatch

    def __init__(
        self,
        config: CorrectorConfig,
        *words: Any,
        hypotheses: SplitHypotheses | None = None,
        reads_hypotheses: bool = True,
        in_training: bool = True,
        **options: Any,
    ):
        options["in_training"] = in_training
        super().__init__(config, *words, **options)
        self.hypotheses, self.reads_hypotheses = hypotheses, reads_hypotheses
        self.hypothesis_share = config.training.hypothesis_share if in_training else 1.0

    def collate(
        self, batch: GlobalBatch, slots: np.ndarray, samples: Any, lengths: AnyLengths
    ) -> CorrectorBatch:
        noised = super().collate(batch, slots, samples, lengths)
        assert isinstance(noised, CorrectorBatch)
        if not self.reads_hypotheses:
            noised.hypotheses = None
        return noised

    def _more_tensors(
        self,
        batch: GlobalBatch,
        ids: np.ndarray,
        slots: np.ndarray,
        modes: np.ndarray,
        real: np.ndarray,
        padded: PaddedSamples,
    ) -> tuple[dict[str, Any], dict[int, str]]:
        if self.hypotheses is None:
            return {}, {}
        has_latent = (
            (modes == L2T) & (padded.dropout_uniform >= self.condition_dropout).numpy() & real
        )
        draws = [
            counter_generator(self.seed, batch.epoch, sample, slot, _HYPOTHESIS_STREAM).random()
            for sample, slot in zip(ids.tolist(), slots.tolist(), strict=True)
        ]
        arrays, reasons = self.hypotheses.arrays(
            ids,
            has_latent & (np.array(draws) < self.hypothesis_share),
            (len(ids), padded.tokens.shape[1]),
            self.pad_token_id,
            self.eos_token_id,
            self.reader.vocab_size,
            self._scaled,
        )
        return {"hypotheses": Hypotheses(*map(torch.from_numpy, arrays))}, reasons

    def _mask(
        self, padded: PaddedSamples, strata: Tensor, more: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The result of `mask_texts`, with the texts that have a hypothesis wholly masked: their
        timestep and weight are 1.
        """
        masks = super()._mask(padded, strata, more)
        if "hypotheses" not in more:
            return masks
        is_given = more["hypotheses"].given
        _, masked, timesteps, weights = masks
        masked = masked | is_given[:, None] & padded.attention
        noised = torch.where(masked, self.text_process.mask_token_id, padded.tokens)
        return (
            noised,
            masked,
            timesteps.masked_fill(is_given, 1.0),
            weights.masked_fill(is_given, 1.0),
        )
