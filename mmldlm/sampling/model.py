"""What samplers call of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from mmldlm.models.base import EncodedLatent, LatentInputs, TextInputs
from mmldlm.models.flops import latent_rows
from mmldlm.models.token_scores import TokenQuery


class Model(Protocol):
    """A model with the forward contract of MultimodalMMDiT.

    Attributes:
        config: Its shape and its token ids.
        latent_mean, latent_std: Statistics of the training latents. [D]
    """

    config: Any
    latent_mean: Tensor
    latent_std: Tensor

    def __call__(
        self,
        text: TextInputs | None,
        latents: LatentInputs | EncodedLatent | None,
        query: TokenQuery | None = None,
    ) -> Any:
        """Return a `ModelOutput`: logits at the positions of the query, latents, lengths."""

    def encode_latents(
        self, latents: LatentInputs | None, batch: int | None = None, caches: bool = False
    ) -> EncodedLatent:
        """Encode latents once for several calls; None: the null condition of `batch` samples."""

    def normalize_latents(self) -> None:
        """Make `scale_latents` divide latents by their norm before."""

    def scale_latents(self, raw: Tensor) -> Tensor:
        """Latents of the encoder's space in model space."""

    def unscale_latents(self, latents: Tensor) -> Tensor:
        """Latents of model space in the encoder's space."""

    def parameters(self) -> Iterator[Parameter]:
        """Weights, on one device."""


def device_of(model: Any) -> torch.device:
    """Return the device of a model's weights."""
    parameter = next(iter(model.parameters()), None)
    return torch.device("cpu") if parameter is None else parameter.device


def rows_of_latents(config: Any) -> int:
    """Return the rows of a sample's latents in the blocks, which count in the budget of a pass:
    those of an image outweigh those of its text. Those of a single latent do not count.
    """
    return int(latent_rows(config)) if getattr(config, "num_latents", 1) > 1 else 0
