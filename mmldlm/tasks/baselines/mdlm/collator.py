"""Masks texts for MDLM (arXiv 2406.07524), as the translation task does."""

from __future__ import annotations

from torch import Tensor

from mmldlm.diffusion import MaskedDiffusion
from mmldlm.tasks.baselines.common.data import BaselineData
from mmldlm.tasks.baselines.common.text_collator import PaddedTexts, TextCollator
from mmldlm.tasks.masking import mask_texts


class MaskingCollator(TextCollator):
    """Adds text_tokens [B, S] int64 (masked), text_timesteps [B] fp32, and of the M masked tokens
    of real samples text_positions [M] int64 in B * S, text_targets [M] int64 and text_weights [M]
    fp32 (the NELBO's)."""

    def __init__(
        self, data: BaselineData, condition_dropout: float | None, seed: int | None = None
    ):
        super().__init__(data, condition_dropout, seed)
        self.text = data.config.text_diffusion
        self.process = MaskedDiffusion(self.model.mask_token_id, self.text.schedule, self.text.eps)

    def noise(self, texts: PaddedTexts) -> dict[str, Tensor]:
        strata = texts.strata if self.text.timesteps == "low_discrepancy" else texts.own
        noised, masked, timesteps, weights = mask_texts(
            self.process, self.text, texts.tokens, strata, texts.uniform, texts.attention
        )
        positions = (masked & texts.real[:, None]).flatten().nonzero()[:, 0]
        rows = positions // texts.tokens.shape[1]
        return {
            "text_tokens": noised,
            "text_timesteps": timesteps.float(),
            "text_positions": positions,
            "text_targets": texts.tokens.flatten()[positions],
            "text_weights": weights[rows].float(),
        }
