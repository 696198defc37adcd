"""Data of the translation task: stores, the scaling of their latents, and training.freeze."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from mmldlm.data.mixture import MixedStore
from mmldlm.data.store import Store
from mmldlm.tasks.latent_data import LatentData, open_latent_data, standard_scaling
from mmldlm.tasks.translation.config import TranslationConfig
from mmldlm.tasks.translation.parameter_plan import decided_freeze


@dataclass(kw_only=True)
class TranslationData(LatentData):
    """Stores and the scaling of their latents."""

    config: TranslationConfig

    def variants(self, latents: np.ndarray) -> Iterator[np.ndarray]:
        """Yield what augmentation may make of stored latents [B, ...], each like the argument."""
        yield latents


def open_data(config: TranslationConfig) -> TranslationData:
    """Open both splits and fill in what they decide: latent_dim, vocab_size, token ids,
    training.freeze=auto.

    Raises:
        UserError: no store, damaged store, unusable latents, or a config that contradicts the
            data.
    """
    data = open_latent_data(TranslationData, config, partial(latent_scaling, config))
    data.config.training.freeze = decided_freeze(data.config)
    return data


def latent_scaling(
    config: TranslationConfig, store: Store | MixedStore
) -> tuple[np.ndarray, np.ndarray]:
    """Return what is subtracted from latents and what they are divided by, both [D] fp32."""
    dim = store.latent_dim
    if config.latent_diffusion.scaling == "none":
        return np.zeros(dim, np.float32), np.ones(dim, np.float32)
    if config.latent_diffusion.scaling == "sqrt_d":
        return np.zeros(dim, np.float32), np.full(dim, dim**-0.5, np.float32)
    return standard_scaling(store)
