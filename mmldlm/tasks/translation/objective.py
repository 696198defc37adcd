"""The objective of all modes: text NELBO, latent regression, length likelihood."""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmldlm.models.base import LatentInputs, ModelOutput, TextInputs
from mmldlm.models.token_scores import TokenQuery
from mmldlm.tasks.candidates import candidates_of
from mmldlm.tasks.text_task import scores_of_targets
from mmldlm.tasks.translation.config import MaskedTextLossConfig, TranslationConfig
from mmldlm.tasks.translation.noiser import TranslationBatch
from mmldlm.utils.validation import not_none


def training_weights(weights: Tensor, loss: MaskedTextLossConfig) -> Tensor:
    """Weights [M] of masked tokens in the loss, from those of the NELBO."""
    if loss.text_weighting == "uniform":
        # A token is masked half of the time by masking=fixed_count or schedule=loglinear.
        return torch.full_like(weights, 2.0)
    return weights if loss.text_weight_clip is None else weights.clamp_max(loss.text_weight_clip)


def _weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of values [B] times weights [B]; of values [B, N], too: a sample's latents share its
    timestep and weight.
    """
    return torch.dot(values if values.dim() == 1 else values.sum(1), weights.to(values.dtype))


class LatentTerm(NamedTuple):
    """The image or embedding's part of the loss.

    Attributes:
        total: Weighted sum of the term, in the graph. fp32 scalar
        denominator: Name of the count of the batch that divides it.
        error: Unweighted errors [B] or [B, N], for the metrics; None: there are none.
    """

    total: Tensor
    denominator: str = "latents"
    error: Tensor | None = None


class TranslationObjective:
    """(model, noised batch) -> loss and metric sums.

    loss = text_loss_weight   * sum of weight * NLL    / counts["text_tokens"]
         + latent_loss_weight * sum of weight * error  / counts["latents"]
         + length_loss_weight * sum of length NLL      / counts["texts"]

    Every denominator is counted over the GLOBAL batch, so that summing gradients over ranks and
    micro-batches gives exactly the gradient of the whole batch; nothing is divided by the number
    of ranks. The collator knows the counts from lengths and keyed modes, without communication
    (`Noiser._count`; `latents` is then multiplied by the latents of a text), and a row that was
    left out still counts.

    By default the text's term has the weight 1, L / k for each of a text's k masked of L tokens
    (EOS included), over all tokens of the samples that are not t2l; the latents' term the weight
    1, the mean error over D, over the latents of the samples that are not l2t; the length's term
    0.1, over the samples that are not t2l.

    Args:
        config: Config of the run (loss weights, options, latent diffusion).
    """

    LATENT_SUMS = ("latent_error_sum", "latent_cosine_sum", "latent_scored")

    def __init__(self, config: TranslationConfig):
        self.config, self.loss = config, config.loss
        # The text's scale is taken into the rows' weights, which saves a pass over the
        # head's gradients; float16 lacks the range for that (its loss scale comes later).
        self._weighs_inside = config.training.dtype != "fp16"
        self.latent = config.latent_diffusion.process()

    def __call__(
        self, model: nn.Module, batch: TranslationBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the model.

        Returns:
            loss: fp32 scalar, this micro-batch's share of the global batch's loss.
            metrics: fp32 scalars, detached: text_nelbo_sum (nats, with the weights of the NELBO),
                text_correct (masked positions predicted right), text_masked (masked positions),
                text_logits (logits computed under text_candidates, else 0), latent_error_sum
                (error of the prediction, of two predictions their sum), latent_cosine_sum (cosine
                of the x0 estimate with the clean latent), latent_scored, {name}_sum of each of the
                diagnostics of the latents' process, length_nll_sum, length_scored, loss.
        """
        weights = training_weights(batch.text_weights, self.loss)
        if self.loss.text_loss_clamp is not None:
            weights = self._clamped_text_weights(model, batch, weights)
        text_scale = self.loss.text_loss_weight / max(batch.counts["text_tokens"], 1)
        out = self._forward(model, batch, weights * text_scale if self._weighs_inside else weights)
        text_sum, _, _ = scores_of_targets(out)
        latent = self._latent_term(out, batch)
        length_logits = not_none(out.length_logits)
        length_nll = F.cross_entropy(length_logits, batch.length_targets, reduction="none")
        length_sum = _weighted_sum(length_nll, batch.length_weights)

        # Each term is in the graph even where this batch scores nothing of it: every parameter
        # then has a (zero) gradient on every rank, and no engine waits for one that never comes.
        latent_scale = self.loss.latent_loss_weight / max(batch.counts[latent.denominator], 1)
        length_scale = self.loss.length_loss_weight / max(batch.counts["texts"], 1)
        text_loss = text_sum if self._weighs_inside else text_sum * text_scale
        loss = text_loss.add(latent.total, alpha=latent_scale).add(length_sum, alpha=length_scale)
        with torch.no_grad():
            return loss, self._metrics(loss, out, batch, latent, length_sum)

    def _forward(self, model: nn.Module, batch: TranslationBatch, weights: Tensor) -> ModelOutput:
        assert batch.latents is not None
        return model(
            TextInputs(
                batch.text_tokens,
                batch.text_timesteps,
                batch.attention_mask,
                batch.text_is_null,
                batch.token_positions,
            ),
            LatentInputs(batch.latents, batch.latent_timesteps, batch.latent_is_null),
            TokenQuery(
                batch.text_positions,
                batch.text_targets,
                weights,
                candidates_of(self.config, batch.text_candidates, batch.text_columns),
            ),
            dropout_keys=batch.dropout_keys,
            **self._more_arguments(batch),
        )

    def _more_arguments(self, batch: TranslationBatch) -> dict[str, Any]:
        """Further arguments of the model."""
        return {}

    def _latent_term(self, out: ModelOutput, batch: TranslationBatch) -> LatentTerm:
        assert batch.latent_targets is not None and batch.latent_weights is not None
        errors = self._latent_errors(out.latent, batch.latent_targets)
        total = self._latent_sum(errors, batch.latent_weights)
        return LatentTerm(total, error=reduce(torch.add, errors))

    def _latent_errors(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """The error of each of the P predictions that stand side by side in the last dimension."""
        count = self.latent.num_predictions
        # One prediction needs no cut.
        if count == 1:
            return (self._latent_error(predictions, targets),)
        pairs = zip(predictions.chunk(count, -1), targets.chunk(count, -1), strict=True)
        return tuple(self._latent_error(prediction, target) for prediction, target in pairs)

    def _latent_sum(self, errors: tuple[Tensor, ...], weights: Tensor) -> Tensor:
        """Weighted sum of the errors of P predictions; weights [B], or [B, P]."""
        if self.loss.latent_weight_clip is not None:
            weights = weights.clamp_max(self.loss.latent_weight_clip)
        if self.loss.latent_loss_clamp is not None:
            errors = tuple(error.clamp_max(self.loss.latent_loss_clamp) for error in errors)
        columns = weights.view(-1, self.latent.num_predictions).unbind(1)
        return reduce(torch.add, map(_weighted_sum, errors, columns))

    def _latent_error(self, prediction: Tensor, target: Tensor) -> Tensor:
        """[B] (of several latents per sample [B, N]) mean squared error over D in fp32.

        Or MM-LDLM's, between L2-normalized vectors, summed over D.
        """
        prediction, target = prediction.float(), target.float()
        if self.loss.latent_prediction_clamp is not None:
            prediction = prediction.clamp(
                -self.loss.latent_prediction_clamp, self.loss.latent_prediction_clamp
            )
        if self.loss.latent_target_clamp is not None:
            target = target.clamp(-self.loss.latent_target_clamp, self.loss.latent_target_clamp)
        if self.loss.latent_loss == "normalized_mse":
            prediction = prediction / (
                prediction.norm(dim=-1, keepdim=True) + self.loss.normalize_eps
            )
            target = target / (target.norm(dim=-1, keepdim=True) + self.loss.normalize_eps)
            return (prediction - target).square().sum(-1)
        return F.mse_loss(prediction, target, reduction="none").mean(-1)

    @torch.no_grad()
    def _clamped_text_weights(
        self, model: nn.Module, batch: TranslationBatch, weights: Tensor
    ) -> Tensor:
        """Weights with the samples above text_loss_clamp set to 0: the gradient a clamp leaves.

        Costs a second forward pass.
        """
        assert self.loss.text_loss_clamp is not None
        _, nll, _ = scores_of_targets(self._forward(model, batch, weights))
        sums = torch.zeros(len(batch.ids), device=nll.device).index_add_(
            0, batch.text_samples, nll * weights
        )
        is_below_clamp = sums / batch.attention_mask.sum(1) <= self.loss.text_loss_clamp
        return weights * is_below_clamp[batch.text_samples]

    def _metrics(
        self,
        loss: Tensor,
        out: ModelOutput,
        batch: TranslationBatch,
        latent: LatentTerm,
        length_sum: Tensor,
    ) -> dict[str, Tensor]:
        candidates = batch.text_candidates
        num_logits = 0 if candidates is None else len(batch.text_targets) * len(candidates)
        zero = torch.zeros_like(loss)
        _, nll, correct = scores_of_targets(out)
        return {
            "loss": loss.detach(),
            "text_nelbo_sum": _weighted_sum(nll, batch.text_weights),
            "text_correct": correct.sum(dtype=torch.float32),
            "text_masked": torch.full_like(loss, float(len(batch.text_targets))),
            "text_logits": torch.full_like(loss, float(num_logits)),
            **self._latent_metrics(out, batch, latent, zero),
            "length_nll_sum": length_sum.detach(),
            "length_scored": batch.length_weights.sum(),
        }

    def _latent_metrics(
        self, out: ModelOutput, batch: TranslationBatch, term: LatentTerm, zero: Tensor
    ) -> dict[str, Tensor]:
        assert term.error is not None
        assert batch.latents is not None and batch.latent_weights is not None
        is_scored = batch.latent_weights > 0
        scored = (is_scored if is_scored.dim() == 1 else is_scored.any(1)).float()
        x0 = self.latent.to_x0(out.latent, batch.latents, batch.latent_timesteps)
        num_scored = scored.sum() if term.error.dim() == 1 else scored.sum() * term.error.shape[1]
        cosine = F.cosine_similarity(x0, batch.latent_clean, dim=-1)
        diagnosed = zip(self.latent.diagnostics, self.latent.diagnose(out.latent, x0), strict=True)
        return {
            "latent_error_sum": _weighted_sum(term.error, scored),
            "latent_cosine_sum": _weighted_sum(cosine, scored),
            "latent_scored": num_scored,
            **{f"{name}_sum": _weighted_sum(values, scored) for name, values in diagnosed},
        }
