"""The noiser of images: shifts them before they are noised."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mmldlm.data.batch_plan import GlobalBatch
from mmldlm.data.image_codec import ImageCodec, draw_shifts, shift_latents
from mmldlm.data.lengths import AnyLengths
from mmldlm.data.store import Rows
from mmldlm.tasks.translation.noiser import L2T, Noiser, PaddedSamples, TranslationBatch


class ImageNoiser(Noiser):
    """Collator of the image_text task.

    Args:
        codecs: Codecs by their number of latents, needed with data.shift_pixels.
        config, words, options: Arguments of `Noiser`.

    Attributes:
        shift_pixels: Pixels by which images are shifted at most, each way; 0: not at all.
        shift_only_i2t: Whether only images of mode i2t are shifted.
        counts_images: Whether the count `latents` is of images instead of their latents
            (`ImageObjective`), and `all_latents` of those of all images, whatever is scored, for
            the FLOPs of a step.
    """

    def __init__(
        self,
        config: Any,
        *words: Any,
        codecs: dict[int, ImageCodec] | None = None,
        in_training: bool = True,
        **options: Any,
    ):
        options["in_training"] = in_training
        super().__init__(config, *words, **options)
        self.codecs = codecs or {}
        self.shift_pixels = config.data.shift_pixels if in_training else 0
        self.shift_only_i2t = config.data.shift_only_i2t
        self.counts_images = config.model.latent_grids is not None

    def collate(
        self, batch: GlobalBatch, slots: np.ndarray, samples: Any, lengths: AnyLengths
    ) -> TranslationBatch:
        noised = super().collate(batch, slots, samples, lengths)
        if self.counts_images:
            of_an_image = math.prod(noised.latent_clean.shape[1:-1])
            noised.counts["latents"] //= of_an_image
            noised.counts["all_latents"] = len(batch.ids) * of_an_image
        return noised

    def _pad(
        self, batch: GlobalBatch, rows: Rows, ids: np.ndarray, slots: np.ndarray
    ) -> PaddedSamples:
        if self.shift_pixels:
            shifts = draw_shifts(self.seed, batch.epoch, ids, slots, self.shift_pixels)
            if self.shift_only_i2t:
                shifts[self.modes(batch, slots) != L2T] = 0
            codec = self.codecs[math.prod(rows.latents.shape[1:-1])]
            rows = rows._replace(latents=shift_latents(codec, rows.latents, shifts))
        return super()._pad(batch, rows, ids, slots)
