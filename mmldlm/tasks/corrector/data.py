"""Data of the corrector task: that of translation, and hypotheses of both splits."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import partial

from mmldlm.data.manifest import sample_checksums
from mmldlm.errors import UserError
from mmldlm.tasks.corrector.config import CorrectorConfig
from mmldlm.tasks.corrector.hypotheses import SplitHypotheses
from mmldlm.tasks.latent_data import open_latent_data
from mmldlm.tasks.translation.data import TranslationData, latent_scaling
from mmldlm.tasks.translation.parameter_plan import decided_freeze


@dataclass(kw_only=True)
class CorrectorData(TranslationData):
    """Stores, the scaling of their latents, and hypotheses.

    Attributes:
        hypotheses: Those of the training and the validation split; `open_data` sets them.
    """

    config: CorrectorConfig
    hypotheses: tuple[SplitHypotheses, SplitHypotheses] | None = None

    def fingerprint(self) -> str:
        """SHA-256 of the training split and its hypotheses: a resume must find both."""
        assert self.hypotheses is not None
        files = sample_checksums(self.hypotheses[0].store.manifest)
        samples = super().fingerprint()
        return hashlib.sha256(json.dumps([samples, files], sort_keys=True).encode()).hexdigest()


def open_data(config: CorrectorConfig) -> CorrectorData:
    """Open both splits and their hypotheses, and fill in what the data decides.

    Raises:
        UserError: as for the translation task, or no hypotheses for this store.
    """
    data = open_latent_data(CorrectorData, config, partial(latent_scaling, config))
    data.config.training.freeze = decided_freeze(data.config)
    root = config.data.hypotheses
    if root is None:
        raise UserError(
            "data.hypotheses: the texts that task=corrector learns to correct",
            "no data.hypotheses",
            "write them: mmldlm hypotheses --checkpoint RUN --data STORE --output-dir DIR",
        )
    data.hypotheses = SplitHypotheses(root, data.train), SplitHypotheses(root, data.validation)
    data.notes.append(
        f"hypotheses of {len(data.hypotheses[0].store):,} of {len(data.train):,} training texts"
        " (data.hypotheses)"
    )
    return data
