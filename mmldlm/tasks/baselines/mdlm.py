"""MDLM on a one-stream transformer, unconditional or given a latent (latent DiT).

Its collator, objective and task.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmldlm.diffusion import MaskedDiffusion
from mmldlm.models.flops import estimate_flops
from mmldlm.tasks.baselines.config import MdlmConfig
from mmldlm.tasks.baselines.shared import (
    BaselineBatch,
    BaselineTask,
    PaddedTexts,
    TextCollator,
    add_length_loss,
    nelbo_metrics,
    text_loss,
)
from mmldlm.tasks.collation import mask_texts
from mmldlm.tasks.latent_data import LatentData
from mmldlm.tasks.text_task import MaskedTextTask, scores_of_targets
from mmldlm.tasks.translation.config import TextDiffusionConfig
from mmldlm.tasks.translation.objective import training_weights


class MaskingCollator(TextCollator):
    """Masks texts as the translation task does, and scores the masked tokens with the NELBO's
    weights.
    """

    def __init__(self, data: LatentData, condition_dropout: float | None, seed: int | None = None):
        super().__init__(data, condition_dropout, seed)
        self.text: TextDiffusionConfig = data.config.text_diffusion
        self.process = MaskedDiffusion(
            data.config.model.mask_token_id, self.text.schedule, self.text.eps
        )

    def text_fields(self, texts: PaddedTexts) -> dict[str, Any]:
        strata = texts.strata if self.text.timesteps == "low_discrepancy" else texts.own
        noised, masked, timesteps, weights = mask_texts(
            self.process, self.text, texts.tokens, strata, texts.uniform, texts.attention
        )
        positions = (masked & texts.is_real[:, None]).flatten().nonzero()[:, 0]
        rows = positions // texts.tokens.shape[1]
        return {
            "text_tokens": noised,
            "text_timesteps": timesteps.float(),
            "text_positions": positions,
            "text_targets": texts.tokens.flatten()[positions],
            "text_weights": weights[rows].float(),
        }


class MdlmObjective:
    """(model, batch of MaskingCollator) -> loss and metric sums.

    loss = NELBO / text tokens + length_loss_weight * length NLL / lengths, both counted over the
    GLOBAL batch.

    Args:
        config: Config of the run.
    """

    def __init__(self, config: MdlmConfig):
        self.loss, self.dtype = config.loss, config.training.dtype

    def __call__(self, model: nn.Module, batch: BaselineBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the model.

        Returns:
            loss: fp32 scalar, this micro-batch's share of the global batch's loss.
            sums: fp32 scalars, detached: loss, text_nelbo_sum (nats, with the NELBO's weights
                whatever the training weighs by), text_correct and text_masked (masked tokens),
                length_nll_sum, length_scored.
        """
        weights = training_weights(batch.text_weights, self.loss)
        loss, out = text_loss(model, batch, weights, self.dtype)
        _, nll, correct = scores_of_targets(out)
        loss, sums = add_length_loss(loss, out, batch, self.loss.length_loss_weight)
        return loss, sums | {
            "text_nelbo_sum": torch.dot(nll.detach(), batch.text_weights),
            "text_correct": correct.sum(dtype=torch.float32),
            "text_masked": torch.full_like(loss.detach(), float(len(batch.text_targets))),
        }


class MdlmTask(MaskedTextTask, BaselineTask):
    """Masked diffusion of text (arXiv 2406.07524) on a one-stream transformer, with a
    length head.
    """

    name = "mdlm"
    config_class = MdlmConfig
    sums = (
        "loss",
        "text_nelbo_sum",
        "text_correct",
        "text_masked",
        "length_nll_sum",
        "length_scored",
    )
    metrics = nelbo_metrics("text_masked")

    def pass_flops(self, model_config: Any, length: float, scored: float) -> float:
        return estimate_flops(model_config, [length], scored).forward

    def collator(
        self, data: LatentData, seed: int | None = None, condition_dropout: float | None = None
    ) -> MaskingCollator:
        """Return the collator; `condition_dropout` replaces that of training."""
        dropout = self.dropout_of_latents(data.config, condition_dropout)
        return MaskingCollator(data, dropout, seed)

    def objective(self, config: MdlmConfig) -> MdlmObjective:
        return MdlmObjective(config)
