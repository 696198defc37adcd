"""Config of GIDD."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from mmldlm.config.section import MAX_WEIGHT, OnResume, Section
from mmldlm.models.plain_config import Conditioning, PlainConfig
from mmldlm.tasks.baselines.common.config import BaselineConfig


class GiddModelConfig(PlainConfig):
    """A bidirectional transformer that reads the time."""

    causal: Literal[False] = False
    """GIDD reads the whole text."""
    conditioning: Conditioning = "none"
    """How the latent enters. none: unconditional. prefix: its chunk tokens are rows before the
    text. adaln: pooled, it modulates every block. cross_attention: every block attends to its
    chunk tokens."""
    reads_time: bool = True
    """Modulate every block by the timestep (adaLN-Zero): which share of the tokens is noise cannot
    be seen in them.
    """
    extra_input_tokens: Literal[0] = 0
    """GIDD reads words and [MASK]."""


class GiddDiffusionConfig(Section):
    """Masks and uniform noise (GIDD, arXiv 2503.04482)."""

    on_resume = OnResume.FIXED

    uniform_share: float = Field(0.1, ge=0, lt=1)
    """p_u, share of tokens replaced by random ones at t = 1/2. 0: masks alone, the process of
    MDLM.
    """
    gamma: float = Field(1.0, gt=0, le=2)
    """Exponent of the uniform noise, (t (1 - t))^(gamma / 2)."""


class GiddLossConfig(Section):
    """Weights of the loss terms."""

    length_loss_weight: float = Field(0.1, ge=0, le=MAX_WEIGHT)
    """Weight of the length head's negative log-likelihood (per sample)."""
    text_weighting: Literal["elbo", "clip", "dynamic"] = "dynamic"
    """Weight of a token in training. elbo: the NELBO's. clip: that, at most text_weight_clip.
    dynamic (GIDD+): 2 at [MASK], 1 at a wrong token, little at a right one, whatever t. Logs and
    evaluations report the NELBO in all cases."""
    text_weight_clip: float | None = Field(None, gt=0, le=1e30)
    """Largest weight w_max of text_weighting=clip (None: 1) and dynamic (None: 2, whose weights it
    scales).
    """

    @model_validator(mode="after")
    def _the_elbo_is_not_clipped(self) -> GiddLossConfig:
        if self.text_weighting == "elbo" and self.text_weight_clip is not None:
            raise ValueError(
                "loss.text_weight_clip is read only with loss.text_weighting=clip or dynamic: drop"
                " it, or set loss.text_weighting=clip"
            )
        return self

    @property
    def largest_weight(self) -> float:
        """w_max."""
        return self.text_weight_clip or (1.0 if self.text_weighting == "clip" else 2.0)


class GiddConfig(BaselineConfig):
    """One run of GIDD."""

    model: GiddModelConfig = Field(default_factory=GiddModelConfig)
    text_diffusion: GiddDiffusionConfig = Field(default_factory=GiddDiffusionConfig)
    loss: GiddLossConfig = Field(default_factory=GiddLossConfig)
