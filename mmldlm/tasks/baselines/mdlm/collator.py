"""Masks texts for MDLM (arXiv 2406.07524), as the translation task does."""

from __future__ import annotations

from torch import Tensor

from mmldlm.diffusion import MaskedDiffusion
from mmldlm.tasks.baselines.common.data import BaselineData
from mmldlm.tasks.baselines.common.text_collator import PaddedTexts, TextCollator
from mmldlm.tasks.masking import dynamic_weights, mask_texts


class MaskingCollator(TextCollator):
    """Adds text_tokens [B, S] int64 (masked), text_timesteps [B] fp32, and of the M masked tokens
    of real samples text_positions [M] int64 in B * S, text_targets [M] int64 and text_weights [M]
    fp32 (the NELBO's); under loss.text_weighting=dynamic text_loss_weights [M] fp32."""

    def __init__(
        self, data: BaselineData, condition_dropout: float | None, seed: int | None = None
    ):
        super().__init__(data, condition_dropout, seed)
        self.text = data.config.text_diffusion
        self.weighs_dynamically = data.config.loss.text_weighting == "dynamic"
        self.process = MaskedDiffusion(self.model.mask_token_id, self.text.schedule, self.text.eps)

    def noise(self, texts: PaddedTexts) -> dict[str, Tensor]:
        strata = texts.strata if self.text.timesteps == "low_discrepancy" else texts.own
        noised, masked, timesteps, weights = mask_texts(
            self.process, self.text, texts.tokens, strata, texts.uniform, texts.attention
        )
        positions = (masked & texts.real[:, None]).flatten().nonzero()[:, 0]
        rows = positions // texts.tokens.shape[1]
        extra = {}
        if self.weighs_dynamically:
            dynamic = dynamic_weights(self.process, self.text, timesteps, weights, texts.attention)
            extra["text_loss_weights"] = dynamic[rows].float()
        return extra | {
            "text_tokens": noised,
            "text_timesteps": timesteps.float(),
            "text_positions": positions,
            "text_targets": texts.tokens.flatten()[positions],
            "text_weights": weights[rows].float(),
        }
