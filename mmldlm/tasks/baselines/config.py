"""Configs of the baselines; they start without torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmldlm.config.schema import Config, TrainingConfig
from mmldlm.config.section import MAX_COUNT, MAX_WEIGHT, FilledFromData, OnResume, Section
from mmldlm.data.config import StoreDataConfig, TokenizerConfig
from mmldlm.models.plain_config import Conditioning, PlainConfig
from mmldlm.tasks.translation.config import TextDiffusionConfig
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


class DiffusionLossConfig(Section):
    """Weights of the loss terms."""

    length_loss_weight: float = Field(0.1, ge=0, le=MAX_WEIGHT)
    """Weight of the length head's negative log-likelihood (per sample)."""


class MdlmModelConfig(BidirectionalModelConfig):
    """A bidirectional transformer over words and [MASK]."""

    extra_input_tokens: Literal[0] = 0
    """MDLM reads words and [MASK]."""


class MdlmLossConfig(DiffusionLossConfig):
    """Weights of the loss terms."""

    text_weighting: Literal["elbo", "uniform"] = "elbo"
    """Weight of a masked token in training. elbo: the NELBO's. uniform: 2 for all, of the
    same mean with masking=fixed_count or schedule=loglinear. Logs and evaluations report the NELBO
    in both cases."""
    text_weight_clip: float | None = Field(None, gt=0, le=LARGEST)
    """Largest weight of a masked token (L / k; with masking=bernoulli the schedule's, as 1 / t).
    Clipped, the loss bounds no likelihood. None: off.
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


class GiddLossConfig(DiffusionLossConfig):
    """Weights of the loss terms."""

    text_weighting: Literal["elbo", "clip", "dynamic"] = "dynamic"
    """Weight of a token in training. elbo: the NELBO's. clip: that, at most text_weight_clip.
    dynamic (GIDD+): 2 at [MASK], 1 at a wrong token, little at a right one, whatever t. Logs and
    evaluations report the NELBO in all cases."""
    text_weight_clip: float | None = Field(None, gt=0, le=LARGEST)
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


class HdlmLossConfig(DiffusionLossConfig):
    """Weights of the loss terms."""

    text_weighting: Literal["elbo", "clip"] = "clip"
    """Weight of a token in training. elbo: the NELBO's. clip: that, at most text_weight_clip. Logs
    and evaluations report the NELBO in both cases."""
    text_weight_clip: float | None = Field(None, gt=0, le=LARGEST)
    """Largest weight of text_weighting=clip. None: 10 (HDLM's on LM1B)."""

    @model_validator(mode="after")
    def _the_elbo_is_not_clipped(self) -> HdlmLossConfig:
        if self.text_weighting == "elbo" and self.text_weight_clip is not None:
            raise ValueError(
                "loss.text_weight_clip is read only with loss.text_weighting=clip: drop it, or set"
                " loss.text_weighting=clip"
            )
        return self

    @property
    def largest_weight(self) -> float | None:
        """None: no bound."""
        return None if self.text_weighting == "elbo" else self.text_weight_clip or 10.0


class HdlmConfig(BaselineConfig):
    """One run of HDLM."""

    model: HdlmModelConfig = Field(default_factory=HdlmModelConfig)
    text_diffusion: HdlmDiffusionConfig = Field(default_factory=HdlmDiffusionConfig)
    loss: HdlmLossConfig = Field(default_factory=HdlmLossConfig)
