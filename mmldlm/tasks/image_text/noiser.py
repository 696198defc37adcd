"""The noiser of images: shifts them before they are noised."""

from __future__ import annotations

import numpy as np

from mmldlm.data.batching.batch_plan import GlobalBatch
from mmldlm.data.images.augment import draw_shifts, shift_latents
from mmldlm.data.images.codec import ImageCodec
from mmldlm.data.store.store import Rows
from mmldlm.tasks.translation.noiser import Noiser, PaddedSamples


class ImageNoiser(Noiser):
    """Collator of the image_text task.

    Attributes:
        codec: of the latents.
        shift_pixels: images are shifted by up to this many pixels each way; 0: as they are.
    """

    codec: ImageCodec
    shift_pixels = 0

    def _pad(self, batch: GlobalBatch, rows: Rows, ids: np.ndarray, slots: np.ndarray) -> PaddedSamples:
        if self.shift_pixels:
            shifts = draw_shifts(self.seed, batch.epoch, ids, slots, self.shift_pixels)
            rows = rows._replace(latents=shift_latents(self.codec, rows.latents, shifts))
        return super()._pad(batch, rows, ids, slots)
