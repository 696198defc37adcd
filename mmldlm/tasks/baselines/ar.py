"""Autoregressive language model: p(x) = prod p(x_i | x_<i, z), EOS modelled, exact likelihood.

A causal PlainTransformer: row i reads token i - 1, the first a learned start; no length head.
`sampling/autoregressive.py` writes its texts. Here are its collator, objective and task.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from mmldlm.models.base import LatentInputs, TextInputs
from mmldlm.models.flops import estimate_flops
from mmldlm.models.plain import PlainTransformer
from mmldlm.models.token_scores import TokenQuery
from mmldlm.sampling.autoregressive import EXPONENTS, write_texts
from mmldlm.sampling.records import TextSamples
from mmldlm.tasks.base import Metric
from mmldlm.tasks.baselines.config import ArConfig
from mmldlm.tasks.baselines.shared import (
    BaselineBatch,
    BaselineTask,
    PaddedTexts,
    TextCollator,
    text_loss,
)
from mmldlm.tasks.candidates import CandidateSampler, candidates_of
from mmldlm.tasks.latent_data import LatentData
from mmldlm.tasks.text_task import Pretrained, TextScores, scores_of_targets, sum_by_row


class ArCollator(TextCollator):
    """Leaves texts as they are, and scores every token of real samples, EOS among them, with the
    weight 1.
    """

    def text_fields(self, texts: PaddedTexts) -> dict[str, Any]:
        positions = (texts.attention & texts.is_real[:, None]).flatten().nonzero()[:, 0]
        return {
            "text_tokens": texts.tokens,
            "text_positions": positions,
            "text_targets": texts.tokens.flatten()[positions],
            "text_weights": torch.ones(len(positions)),
        }


class ArObjective:
    """(model, batch of ArCollator) -> loss and metric sums.

    loss = sum of the NLLs of all tokens and EOS / their number in the GLOBAL batch.

    Args:
        config: Config of the run.
    """

    def __init__(self, config: ArConfig):
        self.config = config

    def __call__(self, model: nn.Module, batch: BaselineBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the model.

        Returns:
            loss: fp32 scalar, this micro-batch's share of the global batch's loss.
            sums: fp32 scalars, detached: loss, text_nll_sum (nats; an estimate under
                loss.text_candidates), text_correct and text_scored (tokens), text_logits (logits
                computed under loss.text_candidates, else 0).
        """
        candidates = candidates_of(self.config, batch.text_candidates, batch.text_columns)
        dtype = self.config.training.dtype
        loss, out = text_loss(model, batch, batch.text_weights, dtype, candidates)
        _, nll, correct = scores_of_targets(out)
        num_scored = torch.full_like(loss.detach(), float(len(batch.text_targets)))
        num_candidates = 0 if batch.text_candidates is None else len(batch.text_candidates)
        return loss, {
            "loss": loss.detach(),
            "text_nll_sum": nll.sum(),
            "text_correct": correct.sum(dtype=torch.float32),
            "text_scored": num_scored,
            "text_logits": num_scored * num_candidates,
        }


class ArTask(BaselineTask):
    """p(x) = prod p(x_i | x_<i, z) with EOS as a token, given a latent or not."""

    name = "ar"
    config_class = ArConfig
    sums = ("loss", "text_nll_sum", "text_correct", "text_scored", "text_logits")
    metrics = (
        Metric(
            "text_loss",
            "text_nll_sum",
            "text_tokens",
            label="text",
            is_loss=True,
            evaluation="nll",
        ),
        Metric("text_accuracy", "text_correct", "text_scored", evaluation="token_accuracy"),
    )
    scored_sum = "text_scored"
    samplers: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "l2t": ("greedy", "ancestral", "beam", "beam_sum"),
        "unconditional": ("ancestral", "greedy", "beam", "beam_sum"),
    }
    sampling_options = frozenset({"sampler", "temperature", "top_p", "num_beams"})
    exact_likelihood = True
    evaluation_decoding = "greedy, one token after the other, until EOS"
    samples_by_forward = False  # its cache is filled block by block

    def collator(
        self, data: LatentData, seed: int | None = None, condition_dropout: float | None = None
    ) -> ArCollator:
        """Return the collator; `condition_dropout` replaces that of training."""
        candidates = None
        # Evaluation, which passes a seed, is exact.
        if seed is None and data.config.loss.text_candidates is not None:
            candidates = CandidateSampler(data)
        dropout = self.dropout_of_latents(data.config, condition_dropout)
        return ArCollator(data, dropout, seed, candidates)

    def objective(self, config: ArConfig) -> ArObjective:
        return ArObjective(config)

    def records_passes(self, sampler: str) -> bool:
        return sampler not in EXPONENTS

    def write_texts(
        self, pretrained: Pretrained, latents: Tensor | None, **options: Any
    ) -> TextSamples:
        return write_texts(cast(PlainTransformer, pretrained.model), latents, **options)

    def writing_flops(self, model_config: Any, samples: TextSamples) -> float:
        """A row of the cache is one token: all rows cost what a pass over the texts costs per
        token.
        """
        lengths = samples.lengths.tolist()
        if not lengths:
            return 0.0
        flops = estimate_flops(model_config, lengths, sum(lengths))
        return samples.num_rows / sum(lengths) * flops.forward

    def score_texts(
        self,
        pretrained: Pretrained,
        tokens: Tensor,
        attention_mask: Tensor,
        latents: Tensor | None,
        uniform: Tensor,
        stratum: tuple[int, int],
    ) -> TextScores:
        """Exact: neither uniform nor stratum is read."""
        positions = attention_mask.flatten().nonzero()[:, 0]
        owner, targets = positions // tokens.shape[1], tokens.flatten()[positions]
        out = pretrained.model(
            TextInputs(tokens, attention_mask=attention_mask),
            None if latents is None else LatentInputs(latents),
            TokenQuery(positions, targets, torch.ones(len(targets), device=tokens.device)),
        )
        _, nll, correct = scores_of_targets(out)
        return TextScores(
            sum_by_row(nll.double(), owner, len(tokens)),
            sum_by_row(correct.double(), owner, len(tokens)),
            attention_mask.sum(1),
            None,
        )
