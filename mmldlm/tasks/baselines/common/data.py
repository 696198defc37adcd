"""Data of the tasks on the plain transformer."""

from __future__ import annotations

from dataclasses import dataclass

from mmldlm.tasks.baselines.common.config import BaselineConfig
from mmldlm.tasks.latent_data import LatentData, open_latent_data


@dataclass(kw_only=True)
class BaselineData(LatentData):
    """Stores and the scaling of their latents: mean and standard deviation [D] of the training
    split, fp32.
    """

    config: BaselineConfig


def open_data(config: BaselineConfig) -> BaselineData:
    """Open both splits and fill in what they decide; see `open_latent_data`."""
    return open_latent_data(BaselineData, config)
