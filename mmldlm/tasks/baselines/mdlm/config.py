"""Config of MDLM."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from mmldlm.config.section import MAX_WEIGHT, Section
from mmldlm.models.plain_config import Conditioning, PlainConfig
from mmldlm.tasks.baselines.common.config import BaselineConfig
from mmldlm.tasks.translation.config import TextDiffusionConfig


class MdlmModelConfig(PlainConfig):
    """A bidirectional transformer."""

    causal: Literal[False] = False
    """MDLM reads the whole text."""
    conditioning: Conditioning = "none"
    """How the latent enters. none: unconditional. prefix: its chunk tokens are rows before the
    text. adaln: pooled, it modulates every block. cross_attention: every block attends to its
    chunk tokens."""
    extra_input_tokens: Literal[0] = 0
    """MDLM reads words and [MASK]."""


class MdlmLossConfig(Section):
    """Weights of the loss terms."""

    length_loss_weight: float = Field(0.1, ge=0, le=MAX_WEIGHT)
    """Weight of the length head's negative log-likelihood (per sample)."""
    text_weighting: Literal["elbo", "uniform"] = "elbo"
    """Weight of a masked token in training. elbo: the NELBO's. uniform: 2 for all, of the same
    mean. Logs and evaluations report the NELBO in both cases."""
    text_weight_clip: float | None = Field(None, gt=0, le=1e30)
    """Largest weight of a masked token (1 / t). Clipped, the loss bounds no likelihood. None: off.

    """

    @model_validator(mode="after")
    def _only_the_elbo_is_clipped(self) -> MdlmLossConfig:
        if self.text_weighting != "elbo" and self.text_weight_clip is not None:
            raise ValueError(
                "loss.text_weight_clip is read only with loss.text_weighting=elbo (those of"
                " uniform are 2): drop one"
            )
        return self


class MdlmConfig(BaselineConfig):
    """One run of MDLM."""

    model: MdlmModelConfig = Field(default_factory=MdlmModelConfig)
    text_diffusion: TextDiffusionConfig = Field(default_factory=TextDiffusionConfig)
    loss: MdlmLossConfig = Field(default_factory=MdlmLossConfig)
