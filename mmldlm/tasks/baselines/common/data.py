"""Data of the tasks on the plain transformer: stores, opened as the translation task opens them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmldlm.data.batching.store_data import StoreData, lengths_in_use, open_splits
from mmldlm.tasks.baselines.common.config import BaselineConfig
from mmldlm.tasks.translation.data import data_notes, fill_from_store, standard_scaling


@dataclass(kw_only=True)
class BaselineData(StoreData):
    """Stores and the scaling of their latents: mean and standard deviation [D] of the training split, fp32."""

    config: BaselineConfig
    latent_mean: np.ndarray
    latent_std: np.ndarray

    def shape(self) -> list[str]:
        """Return latent dimension and vocabulary size."""
        return [f"D={self.config.model.latent_dim}", f"V={self.config.model.vocab_size}"]


def open_data(config: BaselineConfig) -> BaselineData:
    """Open both splits and fill in what they decide: latent_dim, num_latents, vocab_size, token ids.

    Raises:
        UserError: no store, damaged store, unusable latents, or a config that contradicts the data.
    """
    max_seq_len = config.model.max_seq_len
    train, validation = open_splits(config.data, max_seq_len)
    config = config.model_copy(deep=True)
    fill_from_store(config, train)
    train_lengths, validation_lengths = lengths_in_use(config.data, max_seq_len, train, validation)
    mean, std = standard_scaling(train)
    return BaselineData(
        config=config,
        train=train,
        validation=validation,
        train_lengths=train_lengths,
        validation_lengths=validation_lengths,
        notes=data_notes(max_seq_len, train, validation),
        latent_mean=mean,
        latent_std=std,
    )
