"""Data of the image_text task: stores of images, and what turns latents into pixels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mmldlm.data.images.augment import shift_latents
from mmldlm.data.images.codec import ImageCodec
from mmldlm.tasks.image_text.config import ImageTextConfig
from mmldlm.tasks.latent_data import open_latent_data
from mmldlm.tasks.translation.data import TranslationData, latent_scaling
from mmldlm.tasks.translation.freezing import decided_freeze


@dataclass(kw_only=True)
class ImageTextData(TranslationData):
    """Stores of images and captions, and the scaling of their latents."""

    config: ImageTextConfig

    @property
    def codec(self) -> ImageCodec:
        """What turns pixels into the latents of these stores, and back."""
        return ImageCodec.open(self.train.manifest, self.train.root)

    def describe(self) -> str:
        """Return one line for the screen."""
        codec = self.codec
        return (
            f"{len(self.train_lengths):,} training and {len(self.validation_lengths):,} validation images of "
            f"{codec.size} x {codec.size} x {codec.channels} from {self.source}, each as "
            f"{codec.num_latents} latents of {codec.latent_dim} ({codec.name}), and captions of "
            f"{int(self.train_lengths.sum()):,} tokens"
        )

    def shifted_latents(self, latents: np.ndarray) -> list[np.ndarray]:
        """Return latents [B, N, D] under every shift of data.shift_pixels; no shift: as they are."""
        if not (most := self.config.data.shift_pixels):
            return [latents]
        steps, count = range(-most, most + 1), len(latents)
        return [
            shift_latents(self.codec, latents, np.tile((down, right), (count, 1))) for down in steps for right in steps
        ]

    def files_to_keep(self) -> dict[str, Path]:
        """The tokenizer's files, and those that turn latents into pixels."""
        return super().files_to_keep() | self.codec.files()


def open_data(config: ImageTextConfig) -> ImageTextData:
    """Open both splits and fill in what they decide; see `open_latent_data`.

    Raises:
        UserError: no store, a damaged one, one of texts, or a config that contradicts the data.
    """
    data = open_latent_data(ImageTextData, config, partial(latent_scaling, config), store_kind="image")
    data.config.training.freeze = decided_freeze(data.config)
    return data
