"""Config of HDLM."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmldlm.config.section import MAX_COUNT, MAX_WEIGHT, FilledFromData, OnResume, Section
from mmldlm.models.plain_config import Conditioning, PlainConfig
from mmldlm.tasks.baselines.common.config import BaselineConfig


class HdlmModelConfig(PlainConfig):
    """A bidirectional transformer that reads the time, and clusters next to words."""

    causal: Literal[False] = False
    """HDLM reads the whole text."""
    conditioning: Conditioning = "none"
    """How the latent enters. none: unconditional. prefix: its chunk tokens are rows before the
    text. adaln: pooled, it modulates every block. cross_attention: every block attends to its
    chunk tokens."""
    reads_time: bool = True
    """Modulate every block by the timestep (adaLN-Zero)."""
    tie_embeddings: Literal[False] = False
    """The model reads clusters, which the text head does not predict."""


class HdlmDiffusionConfig(Section):
    """Word -> cluster -> [MASK] (HDLM, arXiv 2510.08632), with the right cluster always
    (xi = 1).
    """

    on_resume = OnResume.FIXED

    gamma: float = Field(1.0, gt=0, le=1e6)
    """A word is left with probability 1 - (1 - t)^gamma: the larger, the sooner words become
    clusters.
    """
    num_clusters: Annotated[int | None, FilledFromData()] = Field(None, ge=1, le=MAX_COUNT)
    """Clusters n. None: the root of the vocabulary, at most 128."""
    cluster_vectors: Literal["cooccurrence", "encoder"] = "cooccurrence"
    """What tokens are clustered by. cooccurrence: which frequent tokens stand near them in the
    training texts (PPMI). encoder: the input embeddings of the encoder that made the latents,
    where it shares the text's tokenizer; the clusters then know more than the training texts say,
    which a comparison must name."""
    xi: Literal[1] = 1
    """Probability that a cluster is the right one. The paper's xi < 1 is not offered: its loss
    only approximates a bound, and could not be compared with others."""


class HdlmLossConfig(Section):
    """Weights of the loss terms."""

    length_loss_weight: float = Field(0.1, ge=0, le=MAX_WEIGHT)
    """Weight of the length head's negative log-likelihood (per sample)."""
    text_weighting: Literal["elbo", "clip"] = "clip"
    """Weight of a token in training. elbo: the NELBO's. clip: that, at most text_weight_clip. Logs
    and evaluations report the NELBO in both cases."""
    text_weight_clip: float | None = Field(None, gt=0, le=1e30)
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
