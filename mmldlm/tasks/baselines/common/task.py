"""The part of a Task that all tasks on the plain transformer share.

Torch is imported where it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mmldlm.data.batch import Batch
from mmldlm.models.flops import estimate_flops
from mmldlm.models.memory import logits_bytes, plain_activation_bytes
from mmldlm.tasks.base import ModelSizes
from mmldlm.tasks.baselines.common.config import BaselineConfig
from mmldlm.tasks.baselines.common.data import BaselineData, open_data
from mmldlm.tasks.text_task import TextTask

if TYPE_CHECKING:
    from mmldlm.engines.parameter_plan import ParameterPlan
    from mmldlm.models.plain import PlainTransformer


class BaselineTask(TextTask):
    """Data, model and costs of a task on the plain transformer.

    A task adds its config, collator, objective, figures, sampler and scores.

    Class attributes:
        scored_sum: name of the sum that counts the tokens that the text head scores.
    """

    architecture = "PlainTransformer"
    scored_sum: ClassVar[str] = "text_masked"
    buffers = frozenset({"latent_mean", "latent_std"})

    # -- without torch
    # ---------------------------------------------------------------------------------------------

    def open_data(self, config: BaselineConfig) -> BaselineData:
        return open_data(config)

    def names_data(self, config: BaselineConfig) -> bool:
        return bool(config.data.roots)

    def parameter_counts(self, config: BaselineConfig) -> dict[str, int] | None:
        if config.model.latent_dim is None or config.model.vocab_size is None:
            return None
        from mmldlm.tasks.parameter_sizes import count_by_group

        return count_by_group(self, config)

    def model_sizes(self, config: BaselineConfig, length: int) -> ModelSizes:
        from mmldlm.tasks.parameter_sizes import parameter_sizes

        model, batch, dtype = config.model, config.training.train_batch_size, config.training.dtype
        share = self.scored_share(config)
        counted = round(2 * share * length)  # logits_bytes takes half of the text
        return ModelSizes(
            **parameter_sizes(self, config),
            activations=plain_activation_bytes(model, batch, length, dtype, share),
            logits_cpu=logits_bytes(model, batch, counted, dtype, on_gpu=False),
            logits_gpu=logits_bytes(model, batch, counted, dtype, on_gpu=True),
        )

    def scored_share(self, config: BaselineConfig) -> float:
        """Return the mean share of a text's tokens that the loss scores."""
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
        lengths = [num_tokens / num_samples] * num_samples
        num_logits = sums.get("text_logits") or None  # under loss.text_candidates
        scored = sums[self.scored_sum]
        return estimate_flops(config.model, lengths, scored, num_logits=num_logits).training

    def describe(self, config: BaselineConfig) -> str:
        return f"conditioning {config.model.conditioning}"

    # -- with torch
    # ---------------------------------------------------------------------------------------------

    def model_class(self) -> type[PlainTransformer]:
        from mmldlm.models.plain import PlainTransformer

        return PlainTransformer

    def build_model(self, data: BaselineData) -> PlainTransformer:
        from mmldlm.tasks.baselines.common.build_model import build_model

        return build_model(data)

    def parameter_plan(self, model: PlainTransformer, config: BaselineConfig) -> ParameterPlan:
        from mmldlm.tasks.baselines.common.build_model import parameter_plan

        return parameter_plan(model)

    def compile(self, model: PlainTransformer, plan: ParameterPlan) -> None:
        model.compile_blocks()

    def model_config(self, data: BaselineData) -> dict[str, Any]:
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
                "mode_weights": config.mode_weights,
                "condition_dropout": config.condition_dropout,
            },
            "encoder": data.train.manifest["encoder"],
            "tokenizer": data.train.manifest["tokenizer"],
        }

    # -- debugging
    # ---------------------------------------------------------------------------------------------

    def unused_parameters(
        self, model: PlainTransformer, config: BaselineConfig, batch: Batch
    ) -> Sequence[str]:
        """The learned null waits for a sample whose latent was dropped; zero gates let nothing
        through yet.
        """
        from mmldlm.tasks.baselines.common.build_model import unused_parameters

        return unused_parameters(model, batch)

    def check_batch(self, data: BaselineData, batch: Batch) -> list[str]:
        from mmldlm.tasks.baselines.common.batch_checks import batch_problems

        return batch_problems(data, batch)
