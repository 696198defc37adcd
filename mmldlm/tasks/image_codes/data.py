"""Data of the image_codes task: stores of images as ids of codes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmldlm.data.mixture import MixedStore
from mmldlm.data.store import Store
from mmldlm.errors import UserError
from mmldlm.tasks.image_codes.config import ImageCodesConfig
from mmldlm.tasks.image_text.data import ImageTextData
from mmldlm.tasks.latent_data import open_latent_data
from mmldlm.tasks.translation.parameter_plan import decided_freeze
from mmldlm.utils.validation import not_none


@dataclass(kw_only=True)
class ImageCodesData(ImageTextData):
    """Stores of images as ids, and captions; ids are not scaled."""

    config: ImageCodesConfig

    @property
    def latents_in_words(self) -> str:
        return f"ids of {self.config.model.num_codes:,} codes"

    def shape(self) -> list[str]:
        """Return the number of codes and vocabulary size."""
        return [f"Q={self.config.model.num_codes}", *super().shape()[1:]]


def open_data(config: ImageCodesConfig) -> ImageCodesData:
    """Open both splits and fill in what they decide; see `open_latent_data`.

    Raises:
        UserError: no store, a damaged one, one of texts or of other latents, or a config that
            contradicts the data.
    """
    data = open_latent_data(ImageCodesData, config, _unscaled, store_kind="image")
    model, store = data.config.model, data.train
    if model.num_codes not in (None, store.num_codes):
        raise UserError(
            f"model.num_codes={store.num_codes}, the codes of {store.root}",
            f"model.num_codes={model.num_codes}",
            "leave model.num_codes unset",
        )
    # This reads the codebook: damage is found here, and the run needs the file no more.
    model.num_codes = len(not_none(data.codec.codebook))
    data.config.training.freeze = decided_freeze(data.config)
    return data


def _unscaled(store: Store | MixedStore) -> tuple[np.ndarray, np.ndarray]:
    """Return a mean of 0 and a deviation of 1, both [1].

    Raises:
        UserError: the latents are no ids.
    """
    if store.num_codes is None:
        raise UserError(
            "a store of codes for task=image_codes",
            f"latents of values in {store.root}",
            "prepare with --latents codes:kmeans:512, or train with task=image_text"
            " (--config-name image_text_quick)",
        )
    return np.zeros(1, np.float32), np.ones(1, np.float32)
