"""Data of the translation task: stores, the scaling of their latents, and training.freeze."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import partial

import numpy as np

from mmldlm.data.hypotheses import SplitHypotheses
from mmldlm.data.manifest import sample_checksums
from mmldlm.data.mixture import MixedStore
from mmldlm.data.store import Store
from mmldlm.errors import UserError
from mmldlm.tasks.latent_data import LatentData, open_latent_data, standard_scaling
from mmldlm.tasks.translation.config import TranslationConfig
from mmldlm.tasks.translation.freezing import decided_freeze


@dataclass(kw_only=True)
class TranslationData(LatentData):
    """Stores and the scaling of their latents.

    Attributes:
        hypotheses: of both splits, with model.corrector.
    """

    config: TranslationConfig
    hypotheses: tuple[SplitHypotheses, SplitHypotheses] | None = None

    def fingerprint(self) -> str:
        """SHA-256 of the training split and its hypotheses: a resume must find both."""
        own = super().fingerprint()
        if self.hypotheses is None:
            return own
        files = sample_checksums(self.hypotheses[0].store.manifest)
        return hashlib.sha256(json.dumps([own, files], sort_keys=True).encode()).hexdigest()


def open_data(config: TranslationConfig) -> TranslationData:
    """Open both splits and fill in what they decide: latent_dim, vocab_size, token ids,
    training.freeze=auto.

    Raises:
        UserError: no store, damaged store, unusable latents, a config that contradicts the data,
            or model.corrector without hypotheses for this store.
    """
    data = open_latent_data(TranslationData, config, partial(latent_scaling, config))
    data.config.training.freeze = decided_freeze(data.config)
    if config.model.corrector != "none":
        data.hypotheses = _open_hypotheses(config, data)
    return data


def _open_hypotheses(
    config: TranslationConfig, data: TranslationData
) -> tuple[SplitHypotheses, SplitHypotheses]:
    root = config.data.hypotheses
    if root is None:
        raise UserError(
            f"data.hypotheses: the texts that model.corrector={config.model.corrector} learns to"
            " correct",
            "no data.hypotheses",
            "write them: mmldlm hypotheses --checkpoint RUN --data STORE --output-dir DIR",
        )
    found = SplitHypotheses(root, data.train), SplitHypotheses(root, data.validation)
    data.notes.append(
        f"hypotheses of {len(found[0].store):,} of {len(data.train):,} training texts"
        " (data.hypotheses)"
    )
    return found


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
