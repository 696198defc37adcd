"""The model as a text sampler calls it: latents encoded once, texts without a wanted position left
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmldlm.diffusion.process import LatentProcess
from mmldlm.models.base import EncodedLatent, LatentInputs, TextInputs
from mmldlm.models.token_scores import TokenQuery
from mmldlm.sampling.device import device_of
from mmldlm.utils.counter_rng import Stream, normals

if TYPE_CHECKING:
    from mmldlm.sampling.text.state import DecodingState


class Denoiser:
    """Logits of a batch of texts.

    Args:
        model: with the forward contract of MultimodalMMDiT.
        latents: [B, D] (or [B, M, D]) in the encoder's space; None: the null condition.
        times: [B] timesteps of latents that are noised already and in model space; None: clean
            ones.

    Attributes:
        num_rows: texts computed so far, summed over the passes.
        num_scored: positions whose logits were computed.
    """

    def __init__(self, model: nn.Module, latents: Tensor | None, times: Tensor | None = None):
        self.model, self.num_rows, self.num_scored = model, 0, 0
        self.encoded: EncodedLatent | None = None
        if latents is not None and times is not None:
            self.encoded = model.encode_latents(LatentInputs(latents, times), caches=True)
        elif latents is not None:
            given = model.scale_latents(latents.to(device_of(model)))
            self.encoded = model.encode_latents(LatentInputs(given), caches=True)

    @property
    def has_latents(self) -> bool:
        """Whether there is a condition."""
        return self.encoded is not None

    def __call__(
        self, state: DecodingState, timesteps: Tensor, positions: Tensor, *, null: bool = False
    ) -> Tensor:
        """Return logits [M, V] at positions [M] of B * S.

        Args:
            timesteps: [B] fp32 of the texts.
            null: leave the condition out.
        """
        width = state.tokens.shape[1]
        rows, row_index = torch.unique(positions // width, return_inverse=True)
        everything = len(rows) == len(state.tokens)
        self.num_rows += len(rows)
        self.num_scored += len(positions)

        def select(values: Tensor) -> Tensor:
            return values if everything else values[rows]

        if null or self.encoded is None:
            encoded = self.model.encode_latents(None, batch=len(rows))
        else:
            encoded = self.encoded if everything else self.encoded.select(rows)
        text = TextInputs(select(state.tokens), select(timesteps), select(state.real))
        query = TokenQuery(row_index * width + positions % width)
        return self.model(text, encoded, query).text.logits


def noised_latents(
    model: nn.Module,
    latents: Tensor,
    indices: Sequence[int],
    timestep: float,
    diffusion: LatentProcess,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Return latents in model space, noised to one timestep, and that timestep [B]; the noise
    belongs to the index.
    """
    given = model.scale_latents(latents.to(device_of(model)))
    times = torch.full((len(given),), timestep, device=given.device)
    noise = normals(seed, Stream.CONDITION, indices, tuple(given.shape[1:])).to(given.device)
    return diffusion.add_noise(given, noise, times), times
