"""Config of the corrector task: that of translation, with hypotheses to correct."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmldlm.config.section import FilePath, OnResume
from mmldlm.data.config import StoreDataConfig
from mmldlm.models.mmdit_config import ModelConfig
from mmldlm.tasks.translation.config import TranslationConfig, TranslationTrainingConfig


class CorrectorModelConfig(ModelConfig):
    """The MMDiT, which also reads a hypothesis."""

    corrector: Literal["feedback", "blind"] = "feedback"
    """feedback: correct a hypothesis from its words and the difference of its embedding to the
    latent (after vec2text, arXiv 2310.06816). blind: the ablation, without the hypothesis's
    embedding."""

    @property
    def rows_per_latent(self) -> int:
        """Rows of one latent in the blocks: its own, and those of the difference to it."""
        return 2 * self.tokens_per_latent

    @model_validator(mode="after")
    def _latents_are_those_of_texts(self) -> CorrectorModelConfig:
        for key, unused in (("latent_grids", None), ("latent_rope", False)):
            if (value := getattr(self, key)) != unused:
                raise ValueError(
                    f"model.{key}={value} does not go with task=corrector, whose model has rows"
                    " that have no place in a grid: drop it"
                )
        return self


class CorrectorDataConfig(StoreDataConfig):
    """Stores, and the hypotheses of their samples."""

    hypotheses: Annotated[FilePath, OnResume.IGNORE] = None
    """Folder that `mmldlm hypotheses` wrote for the samples of latent_data_root."""


class CorrectorTrainingConfig(TranslationTrainingConfig):
    """Modes, the share of corrections, and the common training keys."""

    hypothesis_share: float = Field(0.4, gt=0, le=1)
    """Fraction of the l2t samples with a given latent that read their hypothesis; their texts are
    wholly masked. The others are trained as in task=translation: their share decides how good
    first texts are."""


class CorrectorConfig(TranslationConfig):
    """One run of the corrector task."""

    model: CorrectorModelConfig = Field(default_factory=CorrectorModelConfig)
    data: CorrectorDataConfig = Field(default_factory=CorrectorDataConfig)
    training: CorrectorTrainingConfig = Field(default_factory=CorrectorTrainingConfig)

    @model_validator(mode="after")
    def _texts_are_written_from_latents(self) -> CorrectorConfig:
        if self.training.mode_weights()["l2t"] == 0:
            raise ValueError(
                "task=corrector corrects texts of latents, and"
                f" training.loss_type={self.training.loss_type} trains no l2t: set"
                " task=translation"
            )
        return self
