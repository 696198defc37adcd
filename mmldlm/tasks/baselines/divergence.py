"""What GIDD and HDLM share: a process whose NELBO weighs a divergence over the vocabulary.

Its collator, objective, scores, and the part of a task.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmldlm.diffusion.process import Divergence, DivergenceProcess
from mmldlm.diffusion.timesteps import arcsine
from mmldlm.models.base import LatentInputs, TextInputs
from mmldlm.models.memory import head_bytes
from mmldlm.models.token_scores import LogitsFunction, TokenQuery
from mmldlm.sampling.posterior import sample_by_posterior
from mmldlm.sampling.records import TextSamples
from mmldlm.tasks.base import ModelSizes
from mmldlm.tasks.baselines.config import BaselineConfig, GiddConfig, HdlmConfig
from mmldlm.tasks.baselines.shared import (
    BaselineBatch,
    BaselineTask,
    PaddedTexts,
    TextCollator,
    add_length_loss,
    forward_text,
    nelbo_metrics,
)
from mmldlm.tasks.latent_data import LatentData
from mmldlm.tasks.text_task import Pretrained, TextScores, sum_by_row
from mmldlm.utils.validation import not_none


@dataclass(kw_only=True)
class DivergenceBatch(BaselineBatch):
    """One micro-batch of noised texts, scored by a divergence.

    Attributes:
        text_weights: Weights of the training. [M] fp32
        text_elbo_weights: Weights of the NELBO. [M] fp32
        divergence: Divergence of the M scored tokens, whose targets are text_targets.
    """

    text_elbo_weights: Tensor
    divergence: Divergence


class NoisingCollator(TextCollator):
    """Noises texts by a process, and scores the tokens whose weight is not zero.

    Times are drawn by the arcsine law; the weights hold dt/du, so that expectations are those over
    a uniform t.

    Args:
        process: Noise process of the tokens.
        The rest as in `TextCollator`.
    """

    batch_class = DivergenceBatch

    def __init__(
        self,
        data: LatentData,
        process: DivergenceProcess,
        condition_dropout: float | None,
        seed: int | None = None,
    ):
        super().__init__(data, condition_dropout, seed)
        self.process, self.loss = process, data.config.loss

    def text_fields(self, texts: PaddedTexts) -> dict[str, Any]:
        t, density = arcsine(texts.strata)
        noised, scored = self.process.corrupt(texts.tokens, t, texts.uniform, texts.attention)
        positions = (scored & texts.is_real[:, None]).flatten().nonzero()[:, 0]
        rows = positions // texts.tokens.shape[1]
        targets = texts.tokens.flatten()[positions]
        states = noised.flatten()[positions]
        times = t[rows]
        elbo = self.process.elbo_weights(targets, states, times)
        weights = training_weights(elbo, times, self.loss.text_weighting, self.loss.largest_weight)
        return {
            "text_tokens": noised,
            "text_timesteps": t.float(),
            "text_positions": positions,
            "text_weights": (weights * density[rows]).float(),
            "text_elbo_weights": (elbo * density[rows]).float(),
            "text_targets": targets,
            "divergence": self.process.divergence(targets, states, times),
        }


def training_weights(elbo_weights: Tensor, t: Tensor, weighting: str, largest: float) -> Tensor:
    """Weights of the training loss, whose gradients vary less; only `elbo` bounds a likelihood.

    `clip` is min(w, largest). `dynamic` (GIDD+) is largest / 2 times 2 t (1 - t) w, at most
    largest, which keeps the proportions between the three kinds of z: with largest = 2 and gamma
    = 1 it is 2 at [MASK], 1 at a wrong token and rho / (1 + rho) at the right one. The paper has
    rho = (B / N) sqrt(t / (1 - t)) there, the same to first order.

    Args:
        elbo_weights: Weights that the process's `elbo_weights` returns.
        t: Timesteps, broadcastable to the weights.
        weighting: Weighting: elbo, clip or dynamic.
        largest: Largest weight.
    """
    if weighting == "elbo":
        return elbo_weights
    if weighting == "clip":
        return elbo_weights.clamp_max(largest)
    t = t.double()
    return (largest * t * (1 - t) * elbo_weights).clamp_max(largest)


class _Score(torch.autograd.Function):
    """d of a chunk of rows; its closed gradient is computed in the backward pass, which keeps the
    logits alone.
    """

    @staticmethod
    def forward(ctx, logits, divergence, rows):
        ctx.save_for_backward(logits)
        ctx.divergence, ctx.rows = divergence, rows
        return divergence.score(logits, rows, False)[0]

    @staticmethod
    def backward(ctx, grad):
        (logits,) = ctx.saved_tensors
        _, slope = ctx.divergence.score(logits, ctx.rows, True)
        return slope.mul_(grad[:, None]), None, None


def row_scores(divergence: Divergence) -> LogitsFunction:
    """For `TokenQuery.function`: d and whether the clean token is the most probable [R, 2]."""

    def scores(logits: Tensor, rows: slice) -> Tensor:
        target = logits.detach().gather(1, divergence.targets[rows, None])[:, 0]
        is_best = target >= logits.detach().amax(-1)
        values = _Score.apply(logits, divergence, rows)
        return torch.stack([values, is_best.to(values.dtype)], -1)

    return scores


class DivergenceObjective:
    """(model, batch of NoisingCollator) -> loss and metric sums.

    loss = weighted divergence / text tokens + length_loss_weight * length NLL / lengths, both
    counted over the GLOBAL batch.

    Args:
        length_loss_weight: Weight of the length head's negative log-likelihood.
    """

    def __init__(self, length_loss_weight: float):
        self.length_loss_weight = length_loss_weight

    def __call__(
        self, model: nn.Module, batch: DivergenceBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the model.

        Returns:
            loss: fp32 scalar, this micro-batch's share of the global batch's loss.
            sums: fp32 scalars, detached: loss, text_nelbo_sum (nats, with the NELBO's weights
                whatever the training weighs by), text_correct and text_scored (scored tokens),
                length_nll_sum, length_scored.
        """
        out = forward_text(model, batch, TokenQuery(function=row_scores(batch.divergence)))
        assert out.text is not None and out.text.values is not None
        divergences, correct = out.text.values.unbind(-1)
        text_loss = torch.dot(divergences, batch.text_weights) / max(
            batch.counts["text_tokens"], 1
        )
        loss, sums = add_length_loss(text_loss, out, batch, self.length_loss_weight)
        return loss, sums | {
            "text_nelbo_sum": torch.dot(divergences.detach(), batch.text_elbo_weights),
            "text_correct": correct.detach().sum(),
            "text_scored": torch.full_like(loss.detach(), float(len(divergences))),
        }


class DivergenceTask(BaselineTask):
    """A process whose NELBO weighs a divergence over the vocabulary, with a length head.

    A task adds its config and process.

    Class attributes:
        logit_copies: Tensors of a chunk's logits in fp32 that the backward pass holds at once
            (measured).
    """

    logit_copies: ClassVar[int]

    sums = (
        "loss",
        "text_nelbo_sum",
        "text_correct",
        "text_scored",
        "length_nll_sum",
        "length_scored",
    )
    metrics = nelbo_metrics("text_scored")
    scored_sum: ClassVar[str] = "text_scored"
    samplers = {"l2t": ("ancestral",), "unconditional": ("ancestral",)}
    sampling_options = frozenset({"num_steps", "sampler", "temperature", "top_p", "guidance"})
    evaluation_decoding = (
        "steps of the exact posterior, lengths from the model (median of p(length | latent))"
    )

    def model_sizes(self, config: BaselineConfig, length: int) -> ModelSizes:
        model, batch, dtype = config.model, config.training.train_batch_size, config.training.dtype
        scored = int(self.scored_fraction(config) * batch * length)
        cpu, gpu = (
            self.logit_copies * head_bytes(not_none(model.vocab_size), scored, "fp32", on_gpu)
            for on_gpu in (False, True)
        )
        return {
            **super().model_sizes(config, length),
            "logits_cpu": cpu if dtype == "fp32" else 2 * cpu,
            "logits_gpu": gpu,
        }

    @abstractmethod
    def process_of_data(self, data: LatentData) -> DivergenceProcess:
        """Return the process of a run."""

    @abstractmethod
    def process_of_model(self, pretrained: Pretrained) -> DivergenceProcess:
        """Return the process that a model was trained on, on the model's device."""

    def collator(
        self, data: LatentData, seed: int | None = None, condition_dropout: float | None = None
    ) -> NoisingCollator:
        """Return the collator; `condition_dropout` replaces that of training."""
        dropout = self.dropout_of_latents(data.config, condition_dropout)
        return NoisingCollator(data, self.process_of_data(data), dropout, seed)

    def objective(self, config: GiddConfig | HdlmConfig) -> DivergenceObjective:
        return DivergenceObjective(config.loss.length_loss_weight)

    def records_passes(self, sampler: str) -> bool:
        return True

    def write_texts(
        self, pretrained: Pretrained, latents: Tensor | None, *, sampler: str, **options: Any
    ) -> TextSamples:
        set_options = {name: value for name, value in options.items() if value is not None}
        process = self.process_of_model(pretrained)
        return sample_by_posterior(
            pretrained.model,
            latents,
            process,
            corrects=sampler == "self_correction",
            **set_options,
        )

    def score_texts(
        self,
        pretrained: Pretrained,
        tokens: Tensor,
        attention_mask: Tensor,
        latents: Tensor | None,
        uniform: Tensor,
        stratum: tuple[int, int],
    ) -> TextScores:
        """One draw of the exact NELBO."""
        process = self.process_of_model(pretrained)
        width, (draw, draws) = tokens.shape[1], stratum
        t, density = arcsine((draw + uniform[:, -1]) / draws)
        noised, scored = process.corrupt(tokens, t, uniform[:, :width], attention_mask)
        positions = scored.flatten().nonzero()[:, 0]
        owner = positions // width
        targets, states = tokens.flatten()[positions], noised.flatten()[positions]
        weights = process.elbo_weights(targets, states, t[owner]) * density[owner]
        divergence = process.divergence(targets, states, t[owner])
        out = pretrained.model(
            TextInputs(noised, t.float(), attention_mask),
            None if latents is None else LatentInputs(latents),
            TokenQuery(positions, function=row_scores(divergence)),
        )
        divergences, correct = out.text.values.double().unbind(-1)
        return TextScores(
            sum_by_row(divergences * weights, owner, len(tokens)),
            sum_by_row(correct, owner, len(tokens)),
            scored.sum(1),
            F.cross_entropy(out.length_logits, attention_mask.sum(1) - 1, reduction="none"),
        )
