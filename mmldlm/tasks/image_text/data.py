"""Data of the image_text task: stores of images, and what turns latents into pixels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from mmldlm.data.image_codec import ImageCodec, shift_latents
from mmldlm.errors import UserError
from mmldlm.tasks.image_text.config import ImageTextConfig
from mmldlm.tasks.latent_data import open_latent_data
from mmldlm.tasks.translation.data import TranslationData, latent_scaling
from mmldlm.tasks.translation.parameter_plan import decided_freeze


@dataclass(kw_only=True)
class ImageTextData(TranslationData):
    """Stores of images and captions, and the scaling of their latents."""

    config: ImageTextConfig

    # Read once: the run must not need the store's files again.
    @cached_property
    def codec(self) -> ImageCodec:
        """What turns pixels into the latents of these stores, and back; of several sizes that of
        the largest.
        """
        return ImageCodec.open(self.train.manifest, self.train.root)

    @cached_property
    def codecs(self) -> dict[int, ImageCodec]:
        """Number of latents of an image -> codec of images of its size."""
        codec, grids = self.codec, self.config.model.latent_grids
        if grids is None:
            return {codec.num_latents: codec}
        return {math.prod(grid): codec.of_size(grid[0] * codec.patch) for grid in grids}

    def describe(self) -> str:
        """Return one line for the screen."""
        codec, codecs = self.codec, self.codecs
        sizes = " or ".join(f"{each.size} x {each.size}" for each in codecs.values())
        return (
            f"{len(self.train_lengths):,} training and {len(self.validation_lengths):,} validation"
            f" images of {sizes} x {codec.channels} from {self.source}, each as"
            f" {' or '.join(map(str, codecs))} {self.latents_in_words} ({codec.name}), and"
            f" captions of {int(self.train_lengths.sum()):,} tokens"
        )

    @property
    def latents_in_words(self) -> str:
        """What `describe` calls the latents of an image."""
        return f"latents of {self.codec.latent_dim}"

    def variants(self, latents: np.ndarray) -> Iterator[np.ndarray]:
        """Yield latents [B, N, D] under every shift of data.shift_pixels; no shift: as they
        are.
        """
        if not (most := self.config.data.shift_pixels):
            yield latents
            return
        codec = self.codecs[math.prod(latents.shape[1:-1])]
        for shift in itertools.product(range(-most, most + 1), repeat=2):
            yield shift_latents(codec, latents, np.tile(shift, (len(latents), 1)))

    def files_to_keep(self) -> dict[str, Path]:
        """The tokenizer's files, and those that turn latents into pixels."""
        return super().files_to_keep() | self.codec.files()


def open_data(config: ImageTextConfig) -> ImageTextData:
    """Open both splits and fill in what they decide; see `open_latent_data`.

    Raises:
        UserError: no store, a damaged one, one of texts, or a config that contradicts the data.
    """
    data = open_latent_data(
        ImageTextData, config, partial(latent_scaling, config), store_kind="image"
    )
    _check_values(config, data.codec)
    data.config.training.freeze = decided_freeze(data.config)
    return data


def _check_values(config: ImageTextConfig, codec: ImageCodec) -> None:
    """Reject what needs latents that are pixels.

    Raises:
        UserError: a bound of pixel values for other latents, or shifts of images that only an
            autoencoder reads, or of no image at all.
    """
    if config.latent_diffusion.clamp_x0 is not None and codec.latents in ("pca", "vae"):
        raise UserError(
            f"latent_diffusion.clamp_x0=null for latents {codec.name}, which have other ranges"
            " than pixels",
            f"latent_diffusion.clamp_x0={config.latent_diffusion.clamp_x0:g}",
            "add latent_diffusion.clamp_x0=null",
        )
    if config.data.shift_pixels and codec.latents == "vae":
        raise UserError(
            f"data.shift_pixels=0 for latents {codec.name}: a shifted image needs its autoencoder"
            " again",
            f"data.shift_pixels={config.data.shift_pixels}",
            "add data.shift_pixels=0 data.shift_only_i2t=false, or prepare the images as pixels",
        )
    if config.data.shift_only_i2t and (
        not config.data.shift_pixels or not config.training.mode_weights()["l2t"]
    ):
        raise UserError(
            "data.shift_pixels of at least 1 and the mode i2t, for data.shift_only_i2t",
            f"data.shift_pixels={config.data.shift_pixels},"
            f" training.loss_type={config.training.loss_type}",
            "add data.shift_pixels=1 and train i2t, or add data.shift_only_i2t=false",
        )
