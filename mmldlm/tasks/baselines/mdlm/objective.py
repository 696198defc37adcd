"""The objective of MDLM: NELBO of the text, and the likelihood of its length."""

from __future__ import annotations

import torch
from torch import Tensor

from mmldlm.models.token_scores import TokenQuery
from mmldlm.tasks.baselines.common.text_pass import add_length_loss, forward_text
from mmldlm.tasks.baselines.mdlm.config import MdlmConfig


class MdlmObjective:
    """(model, batch of MaskingCollator) -> loss and metric sums.

    loss = NELBO / text tokens + length_loss_weight * length NLL / lengths, both counted over the
    GLOBAL batch.

    Args:
        config: the run's config.
    """

    def __init__(self, config: MdlmConfig):
        self.loss = config.loss
        # Taken into the rows' weights the share saves a pass over the head's gradients; float16
        # lacks the range.
        self._weighs_inside = config.training.dtype != "fp16"

    def __call__(self, model, batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the model.

        Returns:
            loss: fp32 scalar, this micro-batch's share of the global batch's loss.
            sums: fp32 scalars, detached: loss, text_nelbo_sum (nats, with the NELBO's weights
                whatever the training weighs by), text_correct and text_masked (masked tokens),
                length_nll_sum, length_scored.
        """
        tensors = batch.tensors
        share = 1.0 / max(batch.counts["text_tokens"], 1)
        weights = self._training_weights(tensors)
        out = forward_text(
            model,
            tensors,
            TokenQuery(
                targets=tensors["text_targets"],
                weights=weights * share if self._weighs_inside else weights,
            ),
        )
        text_loss = out.text.loss_sum if self._weighs_inside else out.text.loss_sum * share
        loss, sums = add_length_loss(text_loss, out, batch, self.loss.length_loss_weight)
        return loss, sums | {
            "text_nelbo_sum": torch.dot(out.text.nll.detach(), tensors["text_weights"]),
            "text_correct": out.text.correct.sum(dtype=torch.float32),
            "text_masked": torch.full_like(loss.detach(), float(len(tensors["text_targets"]))),
        }

    def _training_weights(self, tensors: dict[str, Tensor]) -> Tensor:
        """[M] weight of each masked token in the loss (`loss.text_weighting`)."""
        weights = tensors["text_weights"]
        if self.loss.text_weighting == "uniform":
            return torch.full_like(weights, 2.0)  # a token is masked half of the time
        return (
            weights
            if self.loss.text_weight_clip is None
            else weights.clamp_max(self.loss.text_weight_clip)
        )
