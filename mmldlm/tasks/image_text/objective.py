"""The objective of images."""

from __future__ import annotations

import math

from torch import Tensor

from mmldlm.models.base import ModelOutput
from mmldlm.tasks.translation.noiser import TranslationBatch
from mmldlm.tasks.translation.objective import LatentTerm, TranslationObjective


class ImageObjective(TranslationObjective):
    """The objective of the translation task.

    With images of several sizes (model.latent_grids) the error of an image is the mean over its
    own latents, and sums and count of latents are of images: a large image weighs as much as a
    small one.
    """

    def _num_latents(self, batch: TranslationBatch) -> int:
        """What the errors of an image are divided by; 1 where all have one size, and the count is
        of latents.
        """
        has_sizes = self.config.model.latent_grids is not None
        return math.prod(batch.latent_clean.shape[1:-1]) if has_sizes else 1

    def _latent_term(self, out: ModelOutput, batch: TranslationBatch) -> LatentTerm:
        term, count = super()._latent_term(out, batch), self._num_latents(batch)
        return term if count == 1 else term._replace(total=term.total / count)

    def _latent_metrics(
        self, out: ModelOutput, batch: TranslationBatch, term: LatentTerm, zero: Tensor
    ) -> dict[str, Tensor]:
        sums = super()._latent_metrics(out, batch, term, zero)
        if (count := self._num_latents(batch)) > 1:
            sums = {name: total / count for name, total in sums.items()}
        return sums
