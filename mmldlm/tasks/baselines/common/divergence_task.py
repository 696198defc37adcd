"""The part of a Task that GIDD and HDLM share. Torch is imported where it is needed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from mmldlm.models.memory import logits_bytes
from mmldlm.tasks.base import Metric, ModelSizes
from mmldlm.tasks.baselines.common.config import BaselineConfig
from mmldlm.tasks.baselines.common.data import BaselineData
from mmldlm.tasks.baselines.common.task import BaselineTask

if TYPE_CHECKING:
    from torch import Tensor

    from mmldlm.diffusion.process import DivergenceProcess
    from mmldlm.engines.base import Engine
    from mmldlm.sampling.records import TextSamples
    from mmldlm.tasks.baselines.common.noising_collator import NoisingCollator
    from mmldlm.tasks.pretrained import Pretrained
    from mmldlm.tasks.text_scores import TextScores
    from mmldlm.tasks.validation import Validation


class DivergenceTask(BaselineTask):
    """A process whose NELBO weighs a divergence over the vocabulary, with a length head.

    A task adds its config, process, training weights and objective.

    Class attributes:
        logit_copies: tensors of a chunk's logits in fp32 that the backward pass holds at once
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
    metrics = (
        Metric(
            "text_loss",
            "text_nelbo_sum",
            "text_tokens",
            label="text",
            is_loss=True,
            evaluation="nelbo",
        ),
        Metric("length_loss", "length_nll_sum", "length_scored", evaluation="length_nll"),
        Metric("text_accuracy", "text_correct", "text_scored", evaluation="token_accuracy"),
    )
    scored_sum: ClassVar[str] = "text_scored"
    samplers = {"l2t": ("ancestral",), "unconditional": ("ancestral",)}
    sampling_options = frozenset({"num_steps", "sampler", "temperature", "top_p", "guidance"})
    evaluation_decoding = (
        "steps of the exact posterior, lengths from the model (median of p(length | latent))"
    )

    def model_sizes(self, config: BaselineConfig, length: int) -> ModelSizes:
        model, batch, dtype = config.model, config.training.train_batch_size, config.training.dtype
        counted = round(2 * self.scored_share(config) * length)
        cpu, gpu = (
            self.logit_copies * logits_bytes(model, batch, counted, "fp32", on_gpu)
            for on_gpu in (0, 1)
        )
        return {
            **super().model_sizes(config, length),
            "logits_cpu": cpu if dtype == "fp32" else 2 * cpu,
            "logits_gpu": gpu,
        }

    @abstractmethod
    def process_of_data(self, data: BaselineData) -> DivergenceProcess:
        """Return the process of a run."""

    @abstractmethod
    def process_of_model(self, pretrained: Pretrained) -> DivergenceProcess:
        """Return the process that a model was trained on, on the model's device."""

    @abstractmethod
    def training_weights(self, data: BaselineData) -> Callable[[Tensor, Tensor], Tensor]:
        """Return (NELBO weights [M], t [M]) -> weights of the training [M]
        (`loss.text_weighting`).
        """

    def model_config(self, data: BaselineData) -> dict[str, Any]:
        return {
            **super().model_config(data),
            "text_diffusion": data.config.text_diffusion.model_dump(),
        }

    def collator(
        self, data: BaselineData, seed: int | None = None, condition_dropout: float | None = None
    ) -> NoisingCollator:
        """Return the collator; `condition_dropout` replaces that of training."""
        from mmldlm.tasks.baselines.common.noising_collator import NoisingCollator

        dropout = None
        if data.config.model.conditioning != "none":
            dropout = (
                data.config.condition_dropout if condition_dropout is None else condition_dropout
            )
        return NoisingCollator(
            data, self.process_of_data(data), self.training_weights(data), dropout, seed
        )

    def validation(self, data: BaselineData, engine: Engine) -> Validation:
        from mmldlm.tasks.baselines.common.validation import validation

        return validation(self, data, engine)

    def records_passes(self, sampler: str) -> bool:
        return True

    def write_texts(
        self, pretrained: Pretrained, latents: Tensor | None, *, sampler: str, **options: Any
    ) -> TextSamples:
        from mmldlm.sampling.posterior import sample_by_posterior

        given = {name: value for name, value in options.items() if value is not None}
        process = self.process_of_model(pretrained)
        return sample_by_posterior(
            pretrained.model, latents, process, corrects=sampler == "self_correction", **given
        )

    def score_texts(
        self,
        pretrained: Pretrained,
        tokens: Tensor,
        real: Tensor,
        latents: Tensor | None,
        uniform: Tensor,
        stratum: tuple[int, int],
    ) -> TextScores:
        """One draw of the exact NELBO."""
        from mmldlm.tasks.baselines.common.divergence import divergence_scores

        process = self.process_of_model(pretrained)
        return divergence_scores(
            pretrained.model, process, tokens, real, latents, uniform, stratum
        )
