"""Config sections of the tasks on the plain transformer."""

from __future__ import annotations

from pydantic import Field, model_validator

from mmldlm.config.schema import Config, TrainingConfig
from mmldlm.data.config import StoreDataConfig, TokenizerConfig
from mmldlm.models.plain_config import PlainConfig

DEFAULT_DROPOUT = 0.1


class BaselineTrainingConfig(TrainingConfig):
    """The common training section, and how often the latent is dropped."""

    condition_dropout: float | None = Field(None, ge=0, lt=1)
    """Fraction of samples whose latent is replaced by the learned null. None: 0.1.

    Not for model.conditioning=none.
    """


class BaselineConfig(Config):
    """One run of a task on the plain transformer."""

    model: PlainConfig = Field(default_factory=PlainConfig)
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    data: StoreDataConfig = Field(default_factory=StoreDataConfig)
    training: BaselineTrainingConfig = Field(default_factory=BaselineTrainingConfig)

    @model_validator(mode="after")
    def _dropout_needs_a_condition(self) -> BaselineConfig:
        if self.model.conditioning == "none" and self.training.condition_dropout is not None:
            raise ValueError(
                "training.condition_dropout is read only where a latent is (model.conditioning is"
                " none): drop it"
            )
        return self

    @property
    def condition_dropout(self) -> float:
        """Fraction of samples whose latent is the learned null; 0 for an unconditional model."""
        if self.model.conditioning == "none":
            return 0.0
        return (
            DEFAULT_DROPOUT
            if self.training.condition_dropout is None
            else self.training.condition_dropout
        )

    @property
    def mode_weights(self) -> dict[str, float]:
        """Shares of the kinds of samples that the model learns, by the names of `mmldlm
        sample`.
        """
        if self.model.conditioning == "none":
            return {"unconditional": 1.0}
        return {"l2t": 1.0 - self.condition_dropout, "unconditional": self.condition_dropout}
