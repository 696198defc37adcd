"""The translation task: text from latents and latents from text, by one MMDiT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mmldlm.engines.parameter_plan import ParameterPlan
from mmldlm.models import MultimodalMMDiT
from mmldlm.models.memory import (
    logits_bytes,
    mmdit_activation_bytes,
    mmdit_block_bytes,
    mmdit_working_bytes,
)
from mmldlm.sampling.joint import sample_joint
from mmldlm.sampling.latents import sample_latents
from mmldlm.sampling.records import TextSamples
from mmldlm.tasks.base import Metric, ModelSizes
from mmldlm.tasks.batch_checks import range_problems, store_problems
from mmldlm.tasks.candidates import CandidateSampler
from mmldlm.tasks.text_task import MaskedTextTask, Pretrained
from mmldlm.tasks.translation.config import PURE_MODES, TranslationConfig
from mmldlm.tasks.translation.data import TranslationData, open_data
from mmldlm.tasks.translation.noiser import Noiser, TranslationBatch
from mmldlm.tasks.translation.objective import TranslationObjective
from mmldlm.tasks.translation.parameter_plan import (
    UNREAD_MODULES,
    decided_freeze,
    parameter_plan,
    random_projection,
)
from mmldlm.tasks.validation import PassTotals
from mmldlm.utils.validation import not_none


class TranslationTask(MaskedTextTask):
    """Masked diffusion of text and continuous diffusion of latents, in four modes
    (docs/objectives.md).
    """

    name = "translation"
    config_class = TranslationConfig
    sums: ClassVar[tuple[str, ...]] = (
        "loss",
        "text_nelbo_sum",
        "text_correct",
        "text_masked",
        "text_logits",
        "latent_error_sum",
        "latent_cosine_sum",
        "latent_scored",
        "length_nll_sum",
        "length_scored",
    )
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            "text_loss",
            "text_nelbo_sum",
            "text_tokens",
            label="text",
            is_loss=True,
            evaluation="nelbo",
        ),
        Metric(
            "latent_loss",
            "latent_error_sum",
            "latents",
            label="latent",
            is_loss=True,
            evaluation="latent_mse",
        ),
        Metric("length_loss", "length_nll_sum", "texts"),
        Metric("text_accuracy", "text_correct", "text_masked"),
        Metric("latent_cosine", "latent_cosine_sum", "latents"),
    )
    architecture = "MultimodalMMDiT"
    samplers: ClassVar[Mapping[str, tuple[str, ...]]] = {**MaskedTextTask.samplers, "t2l": ()}
    sampling_options = MaskedTextTask.sampling_options | {
        "method",
        "solver",
        "eta",
        "condition_timestep",
        "guidance_interval",
    }

    # -- data and costs ---------------------------------------------------------------------------

    def open_data(self, config: TranslationConfig) -> TranslationData:
        return open_data(config)

    def model_sizes(self, config: TranslationConfig, length: int) -> ModelSizes:
        freeze = {"freeze": decided_freeze(config)}
        config = config.model_copy(update={"training": config.training.model_copy(update=freeze)})
        logits_cpu, logits_gpu = (
            self.logits_bytes(config, length, on_gpu) for on_gpu in (False, True)
        )
        shape = (config.model, config.training.train_batch_size, length, config.training.dtype)
        return ModelSizes(
            **self.parameter_sizes(config),
            activations=self.activation_bytes(config, length),
            working=mmdit_block_bytes(*shape) + mmdit_working_bytes(*shape),
            logits_cpu=logits_cpu,
            logits_gpu=logits_gpu,
        )

    def activation_bytes(self, config: TranslationConfig, length: int) -> int:
        """Return what autograd keeps for a micro-batch, with the working memory of one block's
        backward pass.
        """
        shape = (config.model, config.training.train_batch_size, length, config.training.dtype)
        return mmdit_activation_bytes(*shape) + mmdit_working_bytes(*shape)

    def logits_bytes(self, config: TranslationConfig, length: int, on_gpu: bool) -> int:
        """Return the most bytes of logits that exist at once."""
        batch, dtype = config.training.train_batch_size, config.training.dtype
        return logits_bytes(config.model, batch, length, dtype, on_gpu)

    def pass_flops(self, model_config: Any, length: float, scored: float) -> float:
        flops = self.estimate_flops(model_config, [length], scored)
        return flops.text if scored else flops.forward

    def encoding_flops(self, model_config: Any) -> float:
        return self.estimate_flops(model_config, [1], 0).latent_inputs

    def metrics_of(self, config: TranslationConfig) -> tuple[Metric, ...]:
        of_process = config.latent_diffusion.process().diagnostics
        return (
            *self.metrics,
            *(Metric(name, f"{name}_sum", "latent_scored") for name in of_process),
        )

    def describe(self, config: TranslationConfig) -> str:
        shift = config.latent_diffusion.timestep_shift
        shifted = "" if shift == 1 else f", timestep shift {shift:g}"
        return f"mode {config.training.loss_type}, freeze={config.training.freeze}{shifted}"

    def warnings(self, config: TranslationConfig) -> list[str]:
        training = config.training
        frozen = random_projection(training.loss_type, training.freeze, training.init_from)
        found = [] if frozen is None else [frozen]
        mode = training.trained_mode
        if training.loss_type != mode and UNREAD_MODULES[mode]:
            found.append(
                "training.loss_type_weights with one mode alone freezes nothing, and weight decay"
                f" moves heads that no loss reads: training.loss_type={mode}"
                " training.loss_type_weights=null freezes what that mode freezes"
            )
        return found

    # -- model, batches and loss ------------------------------------------------------------------

    def parameter_plan(self, model: MultimodalMMDiT, config: TranslationConfig) -> ParameterPlan:
        return parameter_plan(model, config)

    def parameter_groups(self, model: MultimodalMMDiT) -> dict[str, list[str]]:
        return model.parameter_groups()

    def noiser_class(self, config: TranslationConfig) -> type[Noiser]:
        """Return the class of the collators."""
        return Noiser

    def collator(
        self,
        data: TranslationData,
        seed: int | None = None,
        mode: str | None = None,
        condition_dropout: float | None = None,
        **options: Any,
    ) -> Noiser:
        """Return the noiser; `mode` and `condition_dropout` replace those of training.

        Args:
            options: Further arguments of a subclass's noiser.
        """
        candidates = None
        # Evaluation, which passes a seed, is exact.
        if seed is None and data.config.loss.text_candidates is not None:
            candidates = CandidateSampler(data)
        return self.noiser_class(data.config)(
            data.config,
            data.latent_mean,
            data.latent_std,
            mode_weights=(
                None if mode is None else {other: float(other == mode) for other in PURE_MODES}
            ),
            seed=seed,
            condition_dropout=condition_dropout,
            max_norm=data.max_latent_norm(),
            candidates=candidates,
            in_training=seed is None,
            **options,
        )

    def objective(self, config: TranslationConfig) -> TranslationObjective:
        return TranslationObjective(config)

    def validation_passes(self, data: TranslationData, seed: int) -> list[tuple[str, Noiser]]:
        return [
            (name, self.collator(data, seed, mode, dropout))
            for name, mode, dropout in passes_of(data.config)
        ]

    def validation_figures(self, totals: dict[str, PassTotals]) -> dict[str, float]:
        """Return the validation metrics, from the totals of each pass.

        Returns:
            {mode}_nelbo (nats per token, EOS counted), {mode}_token_accuracy (at masked
            positions), {mode}_length_nll, {mode}_latent_mse, {mode}_latent_cosine; l2t_gain_null:
            NELBO with the null minus with the right latent. A figure without anything scored is
            left out.
        """
        figures: dict[str, float] = {}
        for name, total in totals.items():
            sums = total.sums
            if not name.startswith("t2l") and total.num_tokens:
                figures[f"{name}_nelbo"] = sums["text_nelbo_sum"] / total.num_tokens
                correct, num_masked = sums["text_correct"], max(sums["text_masked"], 1)
                figures[f"{name}_token_accuracy"] = correct / num_masked
                length_nll, num_lengths = sums["length_nll_sum"], max(sums["length_scored"], 1)
                figures[f"{name}_length_nll"] = length_nll / num_lengths
            if sums["latent_scored"]:
                figures[f"{name}_latent_mse"] = sums["latent_error_sum"] / sums["latent_scored"]
                cosine = sums["latent_cosine_sum"] / sums["latent_scored"]
                figures[f"{name}_latent_cosine"] = cosine
        if "l2t_null_nelbo" in figures:
            figures["l2t_gain_null"] = figures["l2t_null_nelbo"] - figures["l2t_nelbo"]
        return figures

    def model_config(self, data: TranslationData) -> dict[str, Any]:
        """Return the model, its diffusion, and the encoder that its latents belong to."""
        config = data.config
        return {
            "task": self.name,
            "architecture": self.architecture,
            "buffers": sorted(self.buffers),
            **config.model.model_dump(),
            "text_diffusion": config.text_diffusion.model_dump(),
            "latent_diffusion": config.latent_diffusion.model_dump(),
            "training": {
                "mode_weights": config.training.mode_weights(),
                "condition_dropout": config.training.condition_dropout,
                "l2t_condition_noise": config.training.l2t_condition_noise,
            },
            "encoder": data.train.manifest["encoder"],
            "tokenizer": data.train.manifest["tokenizer"],
        }

    # -- sampling and evaluation ------------------------------------------------------------------

    def model_class(self) -> type[MultimodalMMDiT]:
        return MultimodalMMDiT

    def draw_latents(
        self, pretrained: Pretrained, num_samples: int, *, solver: str, **options: Any
    ) -> Tensor:
        """Sample latents without a text, in the encoder's space.

        Args:
            options: Options steps, seed and progress of `sample_latents`.
        """
        return sample_latents(
            pretrained.model,
            None,
            num_samples=num_samples,
            diffusion=pretrained.latent_diffusion,
            method=solver,
            renormalize=pretrained.renormalize,
            clamp=pretrained.clamp_x0,
            unit=pretrained.renormalize,
            **options,
        )

    def draw_pairs(
        self, pretrained: Pretrained, num_samples: int, **options: Any
    ) -> tuple[TextSamples, Tensor]:
        """Sample texts and latents together.

        Args:
            options: Options of `sample_joint`.
        """
        return sample_joint(
            pretrained.model,
            num_samples,
            text_diffusion=pretrained.text_diffusion,
            latent_diffusion=pretrained.latent_diffusion,
            renormalize=pretrained.renormalize,
            clamp=pretrained.clamp_x0,
            unit=pretrained.renormalize,
            **options,
        )

    # -- debugging --------------------------------------------------------------------------------

    def unused_parameters(
        self, model: MultimodalMMDiT, config: TranslationConfig, batch: TranslationBatch
    ) -> Sequence[str]:
        """Return beginnings of the names of parameters, or parts of them by stream, that a batch
        gives a zero gradient.

        In the last block the stream that no head of the mode reads still gives keys and values to
        the other stream; the rest of it changes nothing, as such a head. A learned null waits for
        a sample whose condition was dropped.
        """
        mode = config.training.trained_mode
        stream = {"l2t": "latent", "t2l": "text"}.get(mode)
        last = f"blocks.{len(model.blocks) - 1}"
        unread = (
            [f"{last}.{layer}.weight[{stream}]" for layer in ("to_out", "mlp_in", "mlp_out")]
            if stream
            else []
        )
        is_null = {"text": batch.text_is_null, "latent": batch.latent_is_null}
        nulls = [f"{side}_encoder.null_" for side, rows in is_null.items() if not bool(rows.any())]
        return (*UNREAD_MODULES[mode], *unread, *nulls)

    def check_batch(self, data: TranslationData, batch: TranslationBatch) -> list[str]:
        timesteps = {
            "text_timesteps": batch.text_timesteps,
            "latent_timesteps": batch.latent_timesteps,
        }
        return [
            *range_problems(batch, not_none(data.config.model.vocab_size), timesteps),
            *store_problems(
                batch,
                data.train.get(batch.ids),
                not_none(data.config.model.eos_token_id),
                batch.latent_clean,
                lambda rows: (_in_model_space(variant, data) for variant in data.variants(rows)),
            ),
        ]


def _in_model_space(latents: np.ndarray, data: TranslationData) -> Tensor:
    found = torch.from_numpy(latents)
    if data.config.latent_diffusion.l2_normalize:
        found = torch.nn.functional.normalize(found.float(), dim=-1)
    return (found - torch.as_tensor(data.latent_mean)) / torch.as_tensor(data.latent_std)


def passes_of(config: TranslationConfig) -> list[tuple[str, str, float]]:
    """Return name, mode and fraction of null conditions of each pass over the validation samples:
    one per trained mode, and one of l2t with the null condition.
    """
    passes = []
    for mode, weight in config.training.mode_weights().items():
        if weight > 0:
            passes.append((mode, mode, 0.0))
            if mode == "l2t" and config.training.condition_dropout > 0:
                passes.append(("l2t_null", "l2t", 1.0))
    return passes
