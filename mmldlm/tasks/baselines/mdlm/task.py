"""MDLM, unconditional or given a latent (latent DiT). Torch is imported where it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmldlm.models.flops import estimate_flops
from mmldlm.tasks.base import Metric
from mmldlm.tasks.baselines.common.data import BaselineData
from mmldlm.tasks.baselines.common.task import BaselineTask
from mmldlm.tasks.baselines.mdlm.config import MdlmConfig
from mmldlm.tasks.text_task import MaskedTextTask

if TYPE_CHECKING:
    from mmldlm.engines.base import Engine
    from mmldlm.tasks.baselines.mdlm.collator import MaskingCollator
    from mmldlm.tasks.baselines.mdlm.objective import MdlmObjective
    from mmldlm.tasks.validation import Validation


class MdlmTask(MaskedTextTask, BaselineTask):
    """Masked diffusion of text (arXiv 2406.07524) on a one-stream transformer, with a
    length head.
    """

    name = "mdlm"
    config_class = MdlmConfig
    sums = (
        "loss",
        "text_nelbo_sum",
        "text_correct",
        "text_masked",
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
        Metric("text_accuracy", "text_correct", "text_masked", evaluation="token_accuracy"),
    )

    def pass_flops(self, model_config: Any, length: float, scored: float) -> float:
        return estimate_flops(model_config, [length], scored).forward

    def model_config(self, data: BaselineData) -> dict[str, Any]:
        return {
            **super().model_config(data),
            "text_diffusion": data.config.text_diffusion.model_dump(),
        }

    def collator(
        self, data: BaselineData, seed: int | None = None, condition_dropout: float | None = None
    ) -> MaskingCollator:
        """Return the collator; `condition_dropout` replaces that of training."""
        from mmldlm.tasks.baselines.mdlm.collator import MaskingCollator

        if data.config.model.conditioning == "none":
            return MaskingCollator(data, None, seed)
        dropout = data.config.condition_dropout if condition_dropout is None else condition_dropout
        return MaskingCollator(data, dropout, seed)

    def objective(self, config: MdlmConfig) -> MdlmObjective:
        from mmldlm.tasks.baselines.mdlm.objective import MdlmObjective

        return MdlmObjective(config)

    def validation(self, data: BaselineData, engine: Engine) -> Validation:
        from mmldlm.tasks.baselines.common.validation import validation

        return validation(self, data, engine)
