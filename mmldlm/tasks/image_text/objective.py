"""The objective of images."""

from __future__ import annotations

import math

from torch import Tensor

from mmldlm.tasks.translation.objective import LatentTerm, TranslationObjective


class ImageObjective(TranslationObjective):
    """That of the translation task.

    With images of several sizes (model.latent_grids) the error of an image is the mean over its
    own latents, and sums and count of latents are of images: a large image weighs as much as a
    small one.
    """

    def _num_latents(self, tensors: dict[str, Tensor]) -> int:
        """What the errors of an image are divided by; 1 where all have one size, and the count is
        of latents.
        """
        has_sizes = self.config.model.latent_grids is not None
        return math.prod(tensors["latents"].shape[1:-1]) if has_sizes else 1

    def _latent_term(self, out: dict[str, Tensor], tensors: dict[str, Tensor]) -> LatentTerm:
        term, count = super()._latent_term(out, tensors), self._num_latents(tensors)
        return term if count == 1 else term._replace(total=term.total / count)

    def _latent_metrics(
        self, out: dict[str, Tensor], tensors: dict[str, Tensor], term: LatentTerm, zero: Tensor
    ) -> dict[str, Tensor]:
        found, count = (
            super()._latent_metrics(out, tensors, term, zero),
            self._num_latents(tensors),
        )
        if count > 1:
            found = {name: total / count for name, total in found.items()}
        return found
