"""The objective of images as codes: their NELBO in place of the regression of latents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmldlm.models.base import ModelOutput
from mmldlm.models.token_scores import TokenQuery
from mmldlm.tasks.image_codes.noiser import CodesBatch
from mmldlm.tasks.translation.noiser import TranslationBatch
from mmldlm.tasks.translation.objective import LatentTerm, TranslationObjective


class CodeObjective(TranslationObjective):
    """loss = latent_loss_weight * NELBO of the images / codes + the terms of text and length.

    Its metrics have, beside those of TranslationObjective (0 where they are of latents):
    code_nelbo_sum (nats, weighted by N / k), code_correct (masked codes predicted right),
    code_scored (masked codes) and code_total (all codes of the images that are scored: the sum of
    the weights).
    """

    def _more_arguments(self, batch: TranslationBatch) -> dict[str, Any]:
        assert isinstance(batch, CodesBatch)
        query = TokenQuery(batch.code_positions, batch.code_targets, batch.code_weights)
        return {"latent_query": query}

    def _latent_term(self, out: ModelOutput, batch: TranslationBatch) -> LatentTerm:
        return LatentTerm(out.latent.loss_sum, "codes")

    def _latent_metrics(
        self, out: ModelOutput, batch: TranslationBatch, term: LatentTerm, zero: Tensor
    ) -> dict[str, Tensor]:
        assert isinstance(batch, CodesBatch)
        return {
            **dict.fromkeys(self.LATENT_SUMS, zero),
            "code_nelbo_sum": torch.dot(out.latent.nll.float(), batch.code_weights),
            "code_correct": out.latent.correct.sum(dtype=torch.float32),
            "code_scored": torch.full_like(zero, float(len(batch.code_targets))),
            "code_total": batch.code_weights.sum(),
        }
