"""Config of the plain transformer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmldlm.config.section import MAX_COUNT, MAX_WIDTH, FilledFromData, check_keys_are_read
from mmldlm.models.transformer_config import TransformerConfig

Conditioning = Literal["none", "prefix", "adaln", "cross_attention"]
DEFAULT_COND_DIM, DEFAULT_TOKENS_PER_LATENT = 256, 4


class PlainConfig(TransformerConfig):
    """The plain transformer: shape, vocabulary and switches.

    A task narrows a switch that it decides: `causal: Literal[True] = True`.
    """

    causal: bool = False
    """A position sees itself and those before it: it then reads the token before its own, and
    predicts its own.
    """
    conditioning: Conditioning = "prefix"
    """How the latent enters. prefix: its chunk tokens are rows before the text. adaln: pooled, it
    modulates every block. cross_attention: every block attends to its chunk tokens. none:
    unconditional."""
    reads_time: bool = False
    """Modulate every block by the timestep (adaLN-Zero).

    Off: blocks have weighted norms, unless conditioning=adaln.
    """
    reads_pooled: bool = False
    """Under conditioning=prefix or cross_attention: the pooled latent modulates every block as
    well.
    """
    cond_dim: int | None = Field(None, ge=8, le=MAX_WIDTH)
    """Width of the conditioning vector of adaLN and of the length head. None: 256."""
    tokens_per_latent: int | None = Field(None, ge=1, le=MAX_WIDTH)
    """Chunk tokens K that present one latent (conditioning=prefix, cross_attention). None: 4."""
    extra_input_tokens: Annotated[int, FilledFromData()] = Field(0, ge=0, le=MAX_COUNT)
    """Ids V, V + 1, ... that the model reads but never predicts (HDLM's clusters)."""

    @model_validator(mode="after")
    def _keys_are_read(self) -> PlainConfig:
        if self.causal and self.reads_time:
            raise ValueError(
                "model.reads_time belongs to diffusion: with model.causal=true nothing has a"
                " timestep"
            )
        has_tokens = "model.conditioning=prefix or cross_attention"
        has_condition = self.is_modulated or self.has_length_head
        check_keys_are_read(
            self,
            "model",
            ("reads_pooled", self.has_latent_tokens, has_tokens),
            ("tokens_per_latent", self.has_latent_tokens, has_tokens),
            ("cond_dim", has_condition, "adaLN or a length head, and this model has neither"),
        )
        if self.tie_embeddings and self.extra_input_tokens:
            raise ValueError(
                "model.tie_embeddings does not go with model.extra_input_tokens: the head has no"
                " such rows"
            )
        return self

    @property
    def is_modulated(self) -> bool:
        """Whether blocks and head are under adaLN-Zero."""
        return self.reads_time or self.reads_pooled or self.conditioning == "adaln"

    @property
    def has_latent_tokens(self) -> bool:
        """Whether latents become chunk tokens."""
        return self.conditioning in ("prefix", "cross_attention")

    @property
    def has_length_head(self) -> bool:
        """Whether lengths are predicted: a causal model ends its text itself."""
        return not self.causal

    @property
    def pools_latent(self) -> bool:
        """Whether a pooled latent is computed, for adaLN or for the length head."""
        return self.conditioning != "none" and (self.has_length_head or self.is_modulated)

    @property
    def cond_width(self) -> int:
        """Width C of the conditioning vector."""
        return self.cond_dim or DEFAULT_COND_DIM

    @property
    def chunks(self) -> int:
        """Chunk tokens K of one latent; 0 without."""
        return (
            (self.tokens_per_latent or DEFAULT_TOKENS_PER_LATENT) if self.has_latent_tokens else 0
        )

    @property
    def prefix_rows(self) -> int:
        """Rows before the text of a sample with N latents, N * K; 0 without a prefix."""
        return self.num_latents * self.chunks if self.conditioning == "prefix" else 0
