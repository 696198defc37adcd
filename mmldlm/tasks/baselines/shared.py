"""What the baselines share: the collator, the forward pass, and the part of a task that belongs to
the plain transformer.

A baseline writes its config (`config.py`), `text_fields` of a TextCollator, an objective, and of
its task `name`, `config_class`, `collator`, `objective`, `sums`, `metrics`, `scored_sum`,
`samplers`, `write_texts` and `score_texts`. ArTask writes all of them; MdlmTask inherits the last
three from MaskedTextTask, which asks for `pass_flops`; DivergenceTask has all but the process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmldlm.data.batch import Batch
from mmldlm.data.batch_plan import GlobalBatch
from mmldlm.engines.base import Engine
from mmldlm.engines.parameter_plan import ParameterPlan
from mmldlm.models.base import LatentInputs, ModelOutput, TextInputs
from mmldlm.models.flops import estimate_flops
from mmldlm.models.memory import logits_bytes, plain_activation_bytes
from mmldlm.models.plain import PlainTransformer
from mmldlm.models.token_scores import TokenQuery
from mmldlm.tasks.base import Metric, ModelSizes
from mmldlm.tasks.baselines.config import BaselineConfig
from mmldlm.tasks.batch_checks import range_problems, store_problems
from mmldlm.tasks.collation import GlobalCounts, RowReader, dropout_keys, slot_uniforms
from mmldlm.tasks.initialization import set_first_weights
from mmldlm.tasks.latent_data import LatentData, open_latent_data
from mmldlm.tasks.text_task import TextTask
from mmldlm.tasks.translation.parameter_plan import no_decay_names
from mmldlm.tasks.validation import PassTotals, Validation
from mmldlm.utils.counter_rng import counter_generator
from mmldlm.utils.validation import not_none

# Last counter words, which keep the streams of one (seed, epoch) apart; dropout_keys has 5.
_SAMPLE_STREAM, _BATCH_STREAM = 1, 2
# Stream of `slot_places`.
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
        real: False for placeholders. [B] bool
        uniform: Numbers in [0, 1) for the noise of each token. [B, S] fp64
        strata: Numbers in [0, 1), spread evenly over the global batch, for timesteps. [B] fp64
        own: Independent numbers in [0, 1). [B] fp64
    """

    tokens: Tensor
    attention: Tensor
    real: Tensor
    uniform: Tensor
    strata: Tensor
    own: Tensor


class TextCollator(ABC):
    """Reads texts and latents of a store, checks and pads them. Draws are functions of (seed,
    epoch, sample, slot).

    A task's own part is `text_fields`.

    Class attributes:
        batch_class: Class of the batches, whose fields the tensors are.

    Args:
        data: Data of the run, with latent_mean and latent_std [D], the scaling into model space.
        condition_dropout: Fraction of samples that read the learned null latent; None: the model
            reads no latents.
        seed: Seed of the noise; None: training.seed. Evaluation passes its own, so that it never
            sees training noise.
    """

    batch_class: ClassVar[type[BaselineBatch]] = BaselineBatch

    def __init__(self, data: LatentData, condition_dropout: float | None, seed: int | None = None):
        config = data.config
        self.model = config.model
        self.latent_mean, self.latent_std = data.latent_mean, data.latent_std
        self.condition_dropout = condition_dropout
        self.has_dropout = seed is None and config.model.dropout > 0
        self.seed = config.training.seed if seed is None else seed
        vocab_size, max_norm = config.model.vocab_size, data.max_latent_norm()
        self.counts = GlobalCounts()
        self.reader = RowReader(
            vocab_size, data.latent_mean, max_norm, config.stability.nan_to_num
        )

    @abstractmethod
    def text_fields(self, texts: PaddedTexts) -> dict[str, Any]:
        """Return the fields that depend on what the task does to texts: the tokens, their
        timesteps, and the scored positions with targets and weights.
        """

    def collate(
        self, batch: GlobalBatch, slots: np.ndarray, samples: Any, lengths: np.ndarray
    ) -> BaselineBatch:
        """Build a micro-batch; see Collator.

        Args:
            samples: Split of a store.
            lengths: Number of tokens of every sample, EOS included. [N]
        """
        ids, real = batch.samples_at(slots)
        rows, is_bad, bad = self.reader.read(samples, ids, slots, len(batch.ids), lengths)
        real = real & ~is_bad
        texts, dropout = self._pad(batch, rows.tokens, ids, slots, real)
        attention = texts.attention
        tensors: dict[str, Any] = {
            "attention_mask": attention,
            "token_positions": attention.flatten().nonzero()[:, 0],
            "length_targets": attention.sum(1) - 1,
            "length_weights": texts.real.float(),
            **self.text_fields(texts),
        }
        if self.condition_dropout is not None:
            raw, mean, std = map(
                torch.from_numpy,
                (rows.latents.astype(np.float32), self.latent_mean, self.latent_std),
            )
            # In memory of torch, not numpy's: a product's last bits depend on the alignment of its
            # inputs.
            tensors["latents"] = (raw - mean) / std
            # Present even when no row is null: the learned null must be in the graph on every
            # rank.
            tensors["latent_is_null"] = dropout < self.condition_dropout
        if self.has_dropout:
            tensors["dropout_keys"] = dropout_keys(self.seed, batch.epoch, ids, slots)
        return self.batch_class(
            **tensors,
            ids=ids,
            real=real,
            counts=dict(self.counts(batch, lengths, _count)),
            num_tokens=int(attention.numpy()[real].sum()),
            epoch=batch.epoch,
            index=batch.index,
            bad=bad,
        )

    def _pad(
        self,
        batch: GlobalBatch,
        texts: list[np.ndarray],
        ids: np.ndarray,
        slots: np.ndarray,
        real: np.ndarray,
    ) -> tuple[PaddedTexts, Tensor]:
        """The padded texts, and the uniforms [B] of the condition dropout."""
        count, width = len(ids), int(max(len(tokens) for tokens in texts)) + 1
        tokens = np.full((count, width), self.model.pad_token_id, dtype=np.int64)
        attention, uniform = np.zeros((count, width), dtype=bool), np.zeros((count, width))
        draws = np.empty((2, count))
        for row, (sample, slot) in enumerate(zip(ids.tolist(), slots.tolist(), strict=True)):
            generator = counter_generator(self.seed, batch.epoch, sample, slot, _SAMPLE_STREAM)
            draws[:, row] = generator.random(2)
            length = len(texts[row]) + 1
            tokens[row, : length - 1] = texts[row]
            tokens[row, length - 1] = self.model.eos_token_id
            attention[row, :length] = True
            uniform[row, :length] = generator.random(length)
        dropout, independent = map(torch.from_numpy, draws)
        offset = counter_generator(self.seed, batch.epoch, batch.index, 0, _BATCH_STREAM).random()
        padded = PaddedTexts(
            tokens=torch.from_numpy(tokens),
            attention=torch.from_numpy(attention),
            real=torch.from_numpy(real),
            uniform=torch.from_numpy(uniform),
            strata=slot_uniforms(self.seed, batch, slots, _TEXT_PLACES, offset),
            own=independent,
        )
        return padded, dropout


def _count(batch: GlobalBatch, lengths: np.ndarray) -> dict[str, int]:
    """Return the text tokens and texts of a global batch."""
    return {"text_tokens": int(lengths[batch.ids].sum()), "texts": len(batch.ids)}


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


def add_length_loss(
    loss: Tensor, out: ModelOutput, batch: BaselineBatch, weight: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss plus weight * length NLL / lengths of the global batch; and the sums loss,
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
    `BaselineTask`.
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

    Class attributes:
        scored_sum: Name of the sum that counts the tokens that the text head scores.
    """

    architecture = "PlainTransformer"
    scored_sum: ClassVar[str] = "text_masked"
    buffers = frozenset({"latent_mean", "latent_std"})

    # -- data and costs ---------------------------------------------------------------------------

    def open_data(self, config: BaselineConfig) -> LatentData:
        return open_latent_data(LatentData, config)

    def names_data(self, config: BaselineConfig) -> bool:
        return bool(config.data.roots)

    def model_sizes(self, config: BaselineConfig, length: int) -> ModelSizes:
        model, batch, dtype = config.model, config.training.train_batch_size, config.training.dtype
        scored_fraction = self.scored_share(config)
        # `logits_bytes` takes half of the length that it is given.
        counted = round(2 * scored_fraction * length)
        return ModelSizes(
            **self.parameter_sizes(config),
            activations=plain_activation_bytes(model, batch, length, dtype, scored_fraction),
            logits_cpu=logits_bytes(model, batch, counted, dtype, on_gpu=False),
            logits_gpu=logits_bytes(model, batch, counted, dtype, on_gpu=True),
        )

    def scored_share(self, config: BaselineConfig) -> float:
        """Return the mean fraction of a text's tokens that the loss scores."""
        return 1.0 if config.model.causal else 0.5

    def training_flops(
        self,
        config: BaselineConfig,
        num_samples: int,
        num_tokens: float,
        sums: Mapping[str, float],
    ) -> float:
        if not num_samples or not num_tokens:
            return 0.0
        of_one = {name: value / num_samples for name, value in sums.items()}
        flops = estimate_flops(
            config.model,
            [num_tokens / num_samples],
            of_one[self.scored_sum],
            # Counted under loss.text_candidates only.
            num_logits=of_one.get("text_logits") or None,
        )
        return num_samples * flops.training

    def describe(self, config: BaselineConfig) -> str:
        return f"conditioning {config.model.conditioning}"

    # -- model ------------------------------------------------------------------------------------

    def model_class(self) -> type[PlainTransformer]:
        return PlainTransformer

    def build_model(self, data: LatentData) -> PlainTransformer:
        torch.manual_seed(data.config.training.seed)
        model = self.model_class()(data.config.model)
        set_first_weights(model, model.token_embedding, data)
        return model

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

    def compile(self, model: PlainTransformer, plan: ParameterPlan) -> None:
        model.compile_blocks()

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

    def validation(self, data: LatentData, engine: Engine) -> Validation:
        """Return the passes over the validation samples: l2t and, if it is trained, l2t_null; or
        unconditional.
        """
        config, seed = data.config, data.config.training.seed + Validation.SEED_OFFSET
        if config.model.conditioning == "none":
            passes = [("unconditional", self.collator(data, seed))]
        else:
            passes = [("l2t", self.collator(data, seed, condition_dropout=0.0))]
            if config.condition_dropout > 0:
                passes.append(("l2t_null", self.collator(data, seed, condition_dropout=1.0)))
        return Validation(self, data, engine, passes, self.validation_figures)

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
