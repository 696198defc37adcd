"""Configs of the baselines; they start without torch."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from mmldlm.config.schema import Config, TrainingConfig
from mmldlm.config.section import (
    MAX_COUNT,
    MAX_WEIGHT,
    FilledFromData,
    OnResume,
    Section,
    check_keys_are_read,
)
from mmldlm.data.config import StoreDataConfig, TokenizerConfig
from mmldlm.models.plain_config import Conditioning, PlainConfig
from mmldlm.tasks.translation.config import MaskedTextLossConfig, TextDiffusionConfig
from mmldlm.utils.option_types import LARGEST

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
        reads_latents = self.model.conditioning != "none"
        check_keys_are_read(
            self.training,
            "training",
            ("condition_dropout", reads_latents, "a model.conditioning other than none"),
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

    def mode_weights(self) -> dict[str, float]:
        """Fractions of the kinds of samples that the model learns, by the names of `mmldlm
        sample`.
        """
        if self.model.conditioning == "none":
            return {"unconditional": 1.0}
        return {"l2t": 1.0 - self.condition_dropout, "unconditional": self.condition_dropout}


class ArModelConfig(PlainConfig):
    """The plain transformer, causal."""

    causal: Literal[True] = True
    """A position sees itself and those before it."""
    conditioning: Literal["none", "prefix", "cross_attention"] = "prefix"
    """How the latent enters. prefix: its chunk tokens are rows before the text, without a loss.
    cross_attention: every block attends to its chunk tokens. none: unconditional."""
    reads_time: Literal[False] = False
    """Nothing has a timestep."""
    extra_input_tokens: Literal[0] = 0
    """Every token is a word of the tokenizer."""


class ArLossConfig(Section):
    """Options of the loss."""

    text_candidates: int | None = Field(None, ge=1)
    """In training, score tokens against this many most frequent tokens and a sample of 1,024
    others that stands for the rest: an estimate of the NLL at a fraction of the text head's cost.
    Evaluation is exact. None: against the whole vocabulary."""


class ArConfig(BaselineConfig):
    """One run of the autoregressive task."""

    model: ArModelConfig = Field(default_factory=ArModelConfig)
    loss: ArLossConfig = Field(default_factory=ArLossConfig)


class BidirectionalModelConfig(PlainConfig):
    """A transformer that reads the whole text."""

    causal: Literal[False] = False
    """A position sees all others."""
    conditioning: Conditioning = "none"
    """How the latent enters. none: unconditional. prefix: its chunk tokens are rows before the
    text. adaln: pooled, it modulates every block. cross_attention: every block attends to its
    chunk tokens."""


class MdlmModelConfig(BidirectionalModelConfig):
    """A bidirectional transformer over words and [MASK]."""

    extra_input_tokens: Literal[0] = 0
    """MDLM reads words and [MASK]."""


class MdlmConfig(BaselineConfig):
    """One run of MDLM."""

    model: MdlmModelConfig = Field(default_factory=MdlmModelConfig)
    text_diffusion: TextDiffusionConfig = Field(default_factory=TextDiffusionConfig)
    loss: MaskedTextLossConfig = Field(default_factory=MaskedTextLossConfig)


class DivergenceLossConfig(Section):
    """Weights of the loss terms of a process whose NELBO weighs a divergence.

    Class attributes:
        default_clips: Weighting -> its largest weight where text_weight_clip is unset.
    """

    default_clips: ClassVar[dict[str, float]]

    length_loss_weight: float = Field(0.1, ge=0, le=MAX_WEIGHT)
    """Weight of the length head's negative log-likelihood (per sample)."""
    text_weighting: Literal["elbo", "clip", "dynamic"]
    """Weight of a token in training."""
    text_weight_clip: float | None = Field(None, gt=0, le=LARGEST)
    """Largest weight of a token in training."""

    @model_validator(mode="after")
    def _the_elbo_is_not_clipped(self) -> Self:
        reader = f"loss.text_weighting={' or '.join(self.default_clips)}"
        check_keys_are_read(
            self, "loss", ("text_weight_clip", self.text_weighting in self.default_clips, reader)
        )
        return self

    @property
    def largest_weight(self) -> float:
        """text_weight_clip or its default; infinite for the NELBO's own weights."""
        return self.text_weight_clip or self.default_clips.get(self.text_weighting, math.inf)


class GiddModelConfig(BidirectionalModelConfig):
    """A bidirectional transformer that reads the time."""

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


class GiddLossConfig(DivergenceLossConfig):
    """Weights of the loss terms."""

    default_clips = {"clip": 1.0, "dynamic": 2.0}

    text_weighting: Literal["elbo", "clip", "dynamic"] = "dynamic"
    """Weight of a token in training. elbo: the NELBO's. clip: that, at most text_weight_clip.
    dynamic (GIDD+): 2 at [MASK], 1 at a wrong token, little at a right one, whatever t. Logs and
    evaluations report the NELBO in all cases."""
    text_weight_clip: float | None = Field(None, gt=0, le=LARGEST)
    """Largest weight w_max of text_weighting=clip (None: 1) and dynamic (None: 2, whose weights it
    scales).
    """


class GiddConfig(BaselineConfig):
    """One run of GIDD."""

    model: GiddModelConfig = Field(default_factory=GiddModelConfig)
    text_diffusion: GiddDiffusionConfig = Field(default_factory=GiddDiffusionConfig)
    loss: GiddLossConfig = Field(default_factory=GiddLossConfig)


class HdlmModelConfig(BidirectionalModelConfig):
    """A bidirectional transformer that reads the time, and clusters next to words."""

    reads_time: bool = True
    """Modulate every block by the timestep (adaLN-Zero)."""
    tie_embeddings: Literal[False] = False
    """The model reads clusters, which the text head does not predict."""


class HdlmDiffusionConfig(Section):
    """Word -> cluster -> [MASK] (HDLM, arXiv 2510.08632), with the right cluster always (the
    paper's xi = 1).
    """

    on_resume = OnResume.FIXED

    gamma: float = Field(1.0, gt=0, le=1e6)
    """A word is left with probability 1 - (1 - t)^gamma: the larger, the sooner words become
    clusters.
    """
    num_clusters: Annotated[int | None, FilledFromData()] = Field(None, ge=1, le=MAX_COUNT)
    """Clusters n. None: the root of the vocabulary, at most 128."""


class HdlmLossConfig(DivergenceLossConfig):
    """Weights of the loss terms."""

    default_clips = {"clip": 10.0}

    text_weighting: Literal["elbo", "clip"] = "clip"
    """Weight of a token in training. elbo: the NELBO's. clip: that, at most text_weight_clip. Logs
    and evaluations report the NELBO in both cases."""
    text_weight_clip: float | None = Field(None, gt=0, le=LARGEST)
    """Largest weight of text_weighting=clip. None: 10 (HDLM's on LM1B)."""


class HdlmConfig(BaselineConfig):
    """One run of HDLM."""

    model: HdlmModelConfig = Field(default_factory=HdlmModelConfig)
    text_diffusion: HdlmDiffusionConfig = Field(default_factory=HdlmDiffusionConfig)
    loss: HdlmLossConfig = Field(default_factory=HdlmLossConfig)
