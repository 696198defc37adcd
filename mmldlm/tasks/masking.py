"""Mask a batch of texts in training, as the section `text_diffusion` of masked diffusion says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmldlm.diffusion import MaskedDiffusion
from mmldlm.diffusion.timesteps import stretch

if TYPE_CHECKING:
    from mmldlm.tasks.translation.config import TextDiffusionConfig


def mask_texts(
    process: MaskedDiffusion,
    config: TextDiffusionConfig,
    tokens: Tensor,
    strata: Tensor,
    uniform: Tensor,
    maskable: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mask some tokens of every text.

    Args:
        tokens: [B, S] int64.
        strata: [B] fp64 in [0, 1), the noise level.
        uniform: [B, S] fp64 in [0, 1), which tokens.
        maskable: [B, S] bool, at least one per row.

    Returns:
        noised tokens [B, S], the mask [B, S] bool, timesteps [B] and the NELBO weight [B] of a
        masked token, fp64.
    """
    if config.fully_masked_only:
        masked = maskable.clone()
        ones = torch.ones(len(tokens), dtype=torch.float64)
        return tokens.masked_fill(masked, process.mask_token_id), masked, ones, ones
    if config.masking == "fixed_count":
        noised, masked, share = process.corrupt_count(
            tokens, strata, uniform, maskable, process.mask_token_id
        )
        return noised, masked, process.timestep_of(share), 1 / share
    t = stretch(strata, config.min_timestep)
    noised, masked = process.corrupt(tokens, t, uniform, maskable)
    return noised, masked, t, process.loss_weights(t)
