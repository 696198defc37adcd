"""The objective of the autoregressive task: exact negative log-likelihood."""

from __future__ import annotations

import torch
from torch import Tensor

from mmldlm.models.token_scores import TokenQuery
from mmldlm.tasks.baselines.ar.config import ArConfig
from mmldlm.tasks.baselines.common.text_pass import forward_text
from mmldlm.tasks.translation.candidates import candidates_of


class ArObjective:
    """(model, batch of ArCollator) -> loss and metric sums.

    loss = sum of the NLLs of all tokens and EOS / their number in the GLOBAL batch.

    Args:
        config: the run's config.
    """

    def __init__(self, config: ArConfig):
        self.config = config
        # Taken into the rows' weights the share saves a pass over the head's gradients; float16
        # lacks the range.
        self._weighs_inside = config.training.dtype != "fp16"

    def __call__(self, model, batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the model.

        Returns:
            loss: fp32 scalar, this micro-batch's share of the global batch's loss.
            sums: fp32 scalars, detached: loss, text_nll_sum (nats; an estimate under
                loss.text_candidates), text_correct and text_scored (tokens), text_logits (logits
                computed under loss.text_candidates, else 0).
        """
        tensors = batch.tensors
        share = 1.0 / max(batch.counts["text_tokens"], 1)
        weights, targets = tensors["text_weights"], tensors["text_targets"]
        candidates = candidates_of(self.config, tensors) if "text_candidates" in tensors else None
        out = forward_text(
            model,
            tensors,
            TokenQuery(
                targets=targets,
                weights=weights * share if self._weighs_inside else weights,
                candidates=candidates,
            ),
        )
        loss = out.text.loss_sum if self._weighs_inside else out.text.loss_sum * share
        number = torch.full_like(loss.detach(), float(len(targets)))
        return loss, {
            "loss": loss.detach(),
            "text_nll_sum": out.text.nll.sum(),
            "text_correct": out.text.correct.sum(dtype=torch.float32),
            "text_scored": number,
            "text_logits": number * len(tensors.get("text_candidates", ())),
        }
