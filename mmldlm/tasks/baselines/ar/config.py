"""Config of the autoregressive task."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mmldlm.config.section import Section
from mmldlm.models.plain_config import PlainConfig
from mmldlm.tasks.baselines.common.config import BaselineConfig


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
