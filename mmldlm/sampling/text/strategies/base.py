"""The interface of text samplers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from mmldlm.diffusion import MaskedDiffusion
from mmldlm.sampling.text.draw import DrawSettings, draw_tokens
from mmldlm.sampling.text.state import DecodingState


class TextStrategy(ABC):
    """Fill the undecided positions of a batch of texts in a fixed number of steps.

    The loop calls, for k = 0 .. steps - 1: `positions(k)`, the model at `timesteps(k)`, `update(k, positions, logits)`.

    Args:
        state: the batch.
        diffusion: masking process of training.
        steps: number of steps.
        uniform: [B, 2, >= S] fp64 in [0, 1): when a position is decided, and which token it gets.
        draw: how tokens are drawn.
        shared_schedule: all texts take all steps (joint sampling), even if they have fewer tokens.
    """

    default_temperature: float

    def __init__(
        self,
        state: DecodingState,
        *,
        diffusion: MaskedDiffusion,
        steps: int,
        uniform: Tensor,
        draw: DrawSettings,
        shared_schedule: bool = False,
    ):
        assert steps >= 1
        self.state, self.diffusion, self.steps, self.draw = state, diffusion, steps, draw
        self.temperature = self.default_temperature if draw.temperature is None else draw.temperature
        lengths, width = state.lengths, state.tokens.shape[1]
        self.uniform = uniform[:, :, :width].to(lengths.device)
        self.token_uniform = self.uniform[:, 1].reshape(-1)
        self.row_steps = torch.full_like(lengths, steps) if shared_schedule else self.num_passes(lengths, steps)

    @staticmethod
    def num_passes(lengths: Tensor, steps: int) -> Tensor:
        """Return how many of the steps texts of these lengths (EOS counted) need: [B] int64."""
        return torch.full_like(lengths, steps)

    def timesteps(self, k: int) -> Tensor:
        """Return the timestep of the state before step k: [B] fp32."""
        return (1.0 - k / self.row_steps.double()).clamp_min(0.0).float()

    @abstractmethod
    def positions(self, k: int) -> Tensor:
        """Return the positions in B * S whose logits step k needs: [M] int64."""

    @abstractmethod
    def update(self, k: int, positions: Tensor, logits: Tensor | None) -> None:
        """Take step k.

        Args:
            positions: the result of `positions(k)`.
            logits: [M, V] at these positions, overwritten; None without positions.
        """

    # -- for the strategies --------------------------------------------------------------------------------------------

    def _grid(self, row_steps: Tensor) -> Tensor:
        """Return the timesteps from 1 to 0, [B, steps + 1] fp64; a row with fewer steps stays at 0."""
        k = torch.arange(self.steps + 1, device=row_steps.device, dtype=torch.float64)
        return (1.0 - k / row_steps[:, None]).clamp_min(0.0)

    def _penalize(self, positions: Tensor, logits: Tensor) -> None:
        """Apply the presence penalty and exclude special tokens, in place."""
        state = self.state
        if self.draw.presence_penalty:
            present = torch.zeros(len(state.tokens), logits.shape[1], dtype=logits.dtype, device=logits.device)
            present.scatter_(1, state.tokens, self.draw.presence_penalty)
            logits -= present[positions // state.tokens.shape[1]]
        logits[:, [state.mask_token_id, state.pad_token_id, state.eos_token_id]] = float("-inf")

    def _draw(self, positions: Tensor, logits: Tensor) -> None:
        """Draw tokens [M] from logits [M, V] and write them."""
        tokens = draw_tokens(logits, self.token_uniform[positions], self.temperature, self.draw.top_p)
        self.state.fill(positions, tokens)
