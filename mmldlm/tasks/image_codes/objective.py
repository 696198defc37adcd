"""The objective of images as codes: their NELBO in place of the regression of latents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmldlm.models.latent_transformer import ModelOutput
from mmldlm.models.token_scores import TokenQuery
from mmldlm.tasks.translation.objective import LatentTerm, TranslationObjective


class CodeObjective(TranslationObjective):
    """loss = latent_loss_weight * NELBO of the images / codes + the terms of text and length.

    Its metrics have, beside those of TranslationObjective (0 where they are of latents):
    code_nelbo_sum (nats, weighted by N / k), code_correct (masked codes predicted right),
    code_scored (masked codes) and code_total (all codes of the images that are scored: the sum of
    the weights).
    """

    def _more_arguments(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        return {
            "latent_query": TokenQuery(
                tensors["code_positions"], tensors["code_targets"], tensors["code_weights"]
            )
        }

    def _latent_term(self, out: ModelOutput, tensors: dict[str, Tensor]) -> LatentTerm:
        return LatentTerm(out.latent.loss_sum, "codes")

    def _latent_metrics(
        self, out: ModelOutput, tensors: dict[str, Tensor], term: LatentTerm, zero: Tensor
    ) -> dict[str, Tensor]:
        return {
            **dict.fromkeys(self.LATENT_SUMS, zero),
            "code_nelbo_sum": torch.dot(out.latent.nll.float(), tensors["code_weights"]),
            "code_correct": out.latent.correct.sum(dtype=torch.float32),
            "code_scored": torch.full_like(zero, float(len(tensors["code_targets"]))),
            "code_total": tensors["code_weights"].sum(),
        }
