"""What the baselines share: the collator, the forward pass, and the part of a task that belongs to
the plain transformer.

A baseline writes its config (`config.py`), `text_fields` of a TextCollator, an objective, and of
its task `name`, `config_class`, `collator`, `objective`, `sums`, `metrics`, `scored_sum`,
`samplers`, `write_texts` and `score_texts`. ArTask writes all of them; MdlmTask inherits the last
three from MaskedTextTask, which asks for `pass_flops`; DivergenceTask has all but the process. Of
the attributes of TextTask, ArTask sets those whose defaults are of masked text.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmldlm.data.batch import Batch
from mmldlm.data.batch_plan import GlobalBatch
from mmldlm.data.lengths import AnyLengths
from mmldlm.data.store import Rows
from mmldlm.engines.parameter_plan import ParameterPlan
from mmldlm.models.base import LatentInputs, ModelOutput, TextInputs
from mmldlm.models.linear_cross_entropy import Candidates
from mmldlm.models.memory import head_bytes, plain_activation_bytes
from mmldlm.models.plain import PlainTransformer
from mmldlm.models.token_scores import TokenQuery
from mmldlm.tasks.base import Metric, ModelSizes
from mmldlm.tasks.baselines.config import BaselineConfig
from mmldlm.tasks.batch_checks import range_problems, store_problems
from mmldlm.tasks.candidates import CandidateSampler
from mmldlm.tasks.collation import BATCH_STREAM, StoreCollator, slot_uniforms
from mmldlm.tasks.latent_data import LatentData, open_latent_data
from mmldlm.tasks.text_task import TextTask, scores_of_targets
from mmldlm.tasks.translation.parameter_plan import no_decay_names
from mmldlm.tasks.validation import PassTotals
from mmldlm.utils.counter_rng import counter_generator
from mmldlm.utils.validation import not_none

# Stream of `slot_uniforms`.
_TEXT_PLACES = 1
STACKED = {"to_qkv": 3, "to_key_value": 2}
"""Linear layer -> number of matrices that its weight holds."""


@dataclass(kw_only=True)
class BaselineBatch(Batch):
    """One micro-batch of texts. B samples, S positions (longest text), M scored positions, D
    dimensions of a latent.

    Attributes:
        text_tokens: Texts as the model reads them: noised, but for AR. [B, S] int64
        attention_mask: True for tokens and EOS. [B, S] bool
        token_positions: Real tokens, as indices into B * S. [T] int64
        text_timesteps: Noise levels; None for AR. [B] fp32
        text_positions: Scored positions of real samples, as indices into B * S. [M] int64
        text_targets: Clean tokens at the scored positions. [M] int64
        text_weights: Weights of the scored positions in the loss. [M] fp32
        length_targets: Lengths - 1. [B] int64
        length_weights: 1, or 0 for placeholders. [B] fp32
        latents: Latents in model space; None: the model reads none. [B, D] or [B, N, D] fp32
        latent_is_null: True where the learned null stands for the latent; None as `latents`. [B]
            bool
        dropout_keys: Keys of `RowDropout`; None without model.dropout. [B] int64
        text_candidates: Tokens that the text head scores; None without loss.text_candidates. [C]
            int64
        text_columns: Columns of the targets in text_candidates. [M] int64
        counts: Counts text_tokens and texts.
    """

    text_tokens: Tensor
    attention_mask: Tensor
    token_positions: Tensor
    text_timesteps: Tensor | None = None
    text_positions: Tensor
    text_targets: Tensor
    text_weights: Tensor
    length_targets: Tensor
    length_weights: Tensor
    latents: Tensor | None = None
    latent_is_null: Tensor | None = None
    dropout_keys: Tensor | None = None
    text_candidates: Tensor | None = None
    text_columns: Tensor | None = None


class PaddedTexts(NamedTuple):
    """The clean texts of a micro-batch and their own draws. B samples, S positions.

    Attributes:
        tokens: Tokens with EOS, padded. [B, S] int64
        attention: True for tokens and EOS. [B, S] bool
        is_real: False for placeholders. [B] bool
        uniform: Numbers in [0, 1) for the noise of each token. [B, S] fp64
        strata: Numbers in [0, 1), spread evenly over the global batch, for timesteps. [B] fp64
        own: Independent numbers in [0, 1). [B] fp64
    """

    tokens: Tensor
    attention: Tensor
    is_real: Tensor
    uniform: Tensor
    strata: Tensor
    own: Tensor


class TextCollator(StoreCollator):
    """Reads texts and latents of a store; a task's own part is `text_fields`.

    Args:
        data: Data of the run, with latent_mean and latent_std [D], the scaling into model space.
        condition_dropout: Fraction of samples that read the learned null latent; None: the model
            reads no latents.
        seed, candidates: See `StoreCollator`.
    """

    batch_class: ClassVar[type[BaselineBatch]] = BaselineBatch

    def __init__(
        self,
        data: LatentData,
        condition_dropout: float | None,
        seed: int | None = None,
        candidates: CandidateSampler | None = None,
    ):
        scaling, max_norm = (data.latent_mean, data.latent_std), data.max_latent_norm()
        super().__init__(data.config, *scaling, max_norm, seed, seed is None, candidates)
        self.condition_dropout = condition_dropout

    @abstractmethod
    def text_fields(self, texts: PaddedTexts) -> dict[str, Any]:
        """Return the fields that depend on what the task does to texts: the tokens, their
        timesteps, and the scored positions with targets and weights.
        """

    def _count(self, batch: GlobalBatch, lengths: AnyLengths) -> dict[str, int]:
        """Return the text tokens and texts of a global batch."""
        return {"text_tokens": int(lengths[batch.ids].sum()), "texts": len(batch.ids)}

    def fields(
        self,
        batch: GlobalBatch,
        ids: np.ndarray,
        slots: np.ndarray,
        rows: Rows,
        real: np.ndarray,
        bad: list[dict],
    ) -> dict[str, Any]:
        own = np.empty((2, len(ids)))

        def draw(row: int, generator: np.random.Generator) -> None:
            own[:, row] = generator.random(2)

        tokens, attention, uniform = self.pad_texts(batch, ids, slots, rows.tokens, draw)
        dropout, independent = map(torch.from_numpy, own)
        offset = counter_generator(self.seed, batch.epoch, batch.index, 0, BATCH_STREAM).random()
        strata = torch.from_numpy(slot_uniforms(self.seed, batch, slots, _TEXT_PLACES, offset))
        is_real = torch.from_numpy(real)
        texts = PaddedTexts(tokens, attention, is_real, uniform, strata, independent)
        fields = {
            "attention_mask": attention,
            "token_positions": attention.flatten().nonzero()[:, 0],
            "length_targets": attention.sum(1) - 1,
            "length_weights": is_real.float(),
            **self.text_fields(texts),
        }
        if self.condition_dropout is not None:
            raw, mean, std = map(
                torch.from_numpy,
                (rows.latents.astype(np.float32), self.latent_mean, self.latent_std),
            )
            # In memory of torch, not numpy's: a product's last bits depend on the alignment of its
            # inputs.
            fields["latents"] = (raw - mean) / std
            # Present even when no row is null: the learned null must be in the graph on every
            # rank.
            fields["latent_is_null"] = dropout < self.condition_dropout
        return fields


def forward_text(model: nn.Module, batch: BaselineBatch, query: TokenQuery) -> ModelOutput:
    """Run a PlainTransformer on a batch.

    Args:
        query: What is wanted at its text_positions.
    """
    text = TextInputs(
        batch.text_tokens,
        batch.text_timesteps,
        batch.attention_mask,
        token_positions=batch.token_positions,
    )
    latents = None
    if batch.latents is not None:
        latents = LatentInputs(batch.latents, is_null=batch.latent_is_null)
    query = query._replace(positions=batch.text_positions)
    return model(text, latents, query, dropout_keys=batch.dropout_keys)


def text_loss(
    model: nn.Module,
    batch: BaselineBatch,
    weights: Tensor,
    dtype: str,
    candidates: Candidates | None = None,
) -> tuple[Tensor, ModelOutput]:
    """The sum of the weighted NLLs of the scored tokens over the text tokens of the global batch,
    and the pass that it is of.

    Args:
        weights: Weights of the scored tokens. [M]
        dtype: training.dtype.
        candidates: See `TokenQuery`.
    """
    scale = 1.0 / max(batch.counts["text_tokens"], 1)
    # Taken into the rows' weights, the scale saves a pass over the head's gradients; float16 lacks
    # the range for that.
    weighs_inside = dtype != "fp16"
    query = TokenQuery(
        targets=batch.text_targets,
        weights=weights * scale if weighs_inside else weights,
        candidates=candidates,
    )
    out = forward_text(model, batch, query)
    loss_sum, _, _ = scores_of_targets(out)
    return loss_sum if weighs_inside else loss_sum * scale, out


def add_length_loss(
    loss: Tensor, out: ModelOutput, batch: BaselineBatch, weight: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss plus weight * length NLL / texts of the global batch; and the sums loss,
    length_nll_sum and length_scored, detached."""
    length_nll = F.cross_entropy(
        not_none(out.length_logits), batch.length_targets, reduction="none"
    )
    length_sum = torch.dot(length_nll, batch.length_weights)
    loss = loss.add(length_sum, alpha=weight / max(batch.counts["texts"], 1))
    return loss, {
        "loss": loss.detach(),
        "length_nll_sum": length_sum.detach(),
        "length_scored": batch.length_weights.sum(),
    }


def nelbo_metrics(scored_sum: str) -> tuple[Metric, ...]:
    """Return the metrics of a task with an NELBO and a length head; scored_sum: see
    `TextTask`.
    """
    return (
        Metric(
            "text_loss",
            "text_nelbo_sum",
            "text_tokens",
            label="text",
            is_loss=True,
            evaluation="nelbo",
        ),
        Metric("length_loss", "length_nll_sum", "length_scored", evaluation="length_nll"),
        Metric("text_accuracy", "text_correct", scored_sum, evaluation="token_accuracy"),
    )


class BaselineTask(TextTask):
    """Data, model and costs of a task on the plain transformer.

    A task adds its config, collator, objective, figures, sampler and scores.
    """

    architecture = "PlainTransformer"

    # -- data and costs ---------------------------------------------------------------------------

    def open_data(self, config: BaselineConfig) -> LatentData:
        return open_latent_data(LatentData, config)

    def model_sizes(self, config: BaselineConfig, length: int) -> ModelSizes:
        model, batch, dtype = config.model, config.training.train_batch_size, config.training.dtype
        scored_fraction = self.scored_fraction(config)
        vocab_size, scored = not_none(model.vocab_size), int(scored_fraction * batch * length)
        return ModelSizes(
            **self.parameter_sizes(config),
            activations=plain_activation_bytes(model, batch, length, dtype, scored_fraction),
            logits_cpu=head_bytes(vocab_size, scored, dtype, on_gpu=False),
            logits_gpu=head_bytes(vocab_size, scored, dtype, on_gpu=True),
        )

    def scored_fraction(self, config: BaselineConfig) -> float:
        """Return the mean fraction of a text's tokens that the loss scores."""
        return 1.0 if config.model.causal else 0.5

    def describe(self, config: BaselineConfig) -> str:
        return f"conditioning {config.model.conditioning}"

    # -- model ------------------------------------------------------------------------------------

    def model_class(self) -> type[PlainTransformer]:
        return PlainTransformer

    def parameter_plan(self, model: PlainTransformer, config: BaselineConfig) -> ParameterPlan:
        """Blocks are sharded; Muon updates their linear layers, q, k and v each by itself."""
        matrices = {
            f"{name}.weight": STACKED.get(name.rsplit(".", 1)[-1], 1)
            for name, module in model.named_modules()
            if name.startswith("blocks.") and type(module) is nn.Linear
        }
        return ParameterPlan(
            sharding_units=list(model.blocks), no_decay=no_decay_names(model), matrices=matrices
        )

    # -- batches and validation -------------------------------------------------------------------

    @abstractmethod
    def collator(
        self, data: LatentData, seed: int | None = None, condition_dropout: float | None = None
    ) -> TextCollator:
        """Return the collator; `condition_dropout` replaces that of training."""

    def dropout_of_latents(
        self, config: BaselineConfig, condition_dropout: float | None
    ) -> float | None:
        """Return the fraction of samples that read the null latent, `condition_dropout` in place
        of that of training; None: the model reads no latents.
        """
        if config.model.conditioning == "none":
            return None
        return config.condition_dropout if condition_dropout is None else condition_dropout

    def validation_passes(self, data: LatentData, seed: int) -> list[tuple[str, TextCollator]]:
        """Return l2t and, if it is trained, l2t_null; or unconditional."""
        if data.config.model.conditioning == "none":
            return [("unconditional", self.collator(data, seed))]
        passes = [("l2t", self.collator(data, seed, condition_dropout=0.0))]
        if data.config.condition_dropout > 0:
            passes.append(("l2t_null", self.collator(data, seed, condition_dropout=1.0)))
        return passes

    def validation_figures(self, totals: dict[str, PassTotals]) -> dict[str, float]:
        """Return `{pass}_{metric.evaluation}` of every metric, and l2t_gain_null: the first metric
        with the null minus with the right latent.
        """
        figures = {}
        for name, total in totals.items():
            # Without samples that were left out.
            counts = total.counts | {"text_tokens": total.num_tokens}
            for metric in self.metrics:
                value = metric.value(total.sums, counts)
                if value is not None:
                    figures[f"{name}_{metric.evaluation or metric.name}"] = value
        first = self.metrics[0].evaluation or self.metrics[0].name
        if f"l2t_{first}" in figures and f"l2t_null_{first}" in figures:
            figures["l2t_gain_null"] = figures[f"l2t_null_{first}"] - figures[f"l2t_{first}"]
        return figures

    def model_config(self, data: LatentData) -> dict[str, Any]:
        """Return the model, what it was trained for, and the encoder that its latents
        belong to.
        """
        config = data.config
        return {
            "task": self.name,
            "architecture": self.architecture,
            "buffers": sorted(self.buffers),
            **config.model.model_dump(),
            "training": {
                "mode_weights": config.mode_weights(),
                "condition_dropout": config.condition_dropout,
            },
            "encoder": data.train.manifest["encoder"],
            "tokenizer": data.train.manifest["tokenizer"],
            **config.model_dump(include={"text_diffusion"}),
        }

    # -- debugging --------------------------------------------------------------------------------

    def unused_parameters(
        self, model: PlainTransformer, config: BaselineConfig, batch: BaselineBatch
    ) -> Sequence[str]:
        """The learned null waits for a sample whose latent was dropped; zero gates let nothing
        through yet.
        """
        dropped = batch.latent_is_null
        if dropped is None or bool(dropped.any()):
            return ()
        return "latent_tokens.null_", "latent_pooled.null_"

    def check_batch(self, data: LatentData, batch: BaselineBatch) -> list[str]:
        """Return what is wrong with a micro-batch: values out of range, scored tokens or latents
        that are not the store's.

        A position that is not scored may hold a noised token.
        """
        model, times = data.config.model, batch.text_timesteps
        timesteps = {} if times is None else {"text_timesteps": times}
        return [
            *range_problems(batch, model.vocab_size, timesteps, model.extra_input_tokens),
            *store_problems(
                batch,
                data.train.get(batch.ids),
                model.eos_token_id,
                batch.latents,
                lambda rows: [torch.from_numpy((rows - data.latent_mean) / data.latent_std)],
            ),
        ]
