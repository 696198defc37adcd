"""Config of the plain transformer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmldlm.config.section import MAX_COUNT, MAX_WIDTH, FilledFromData, OnResume, Section
from mmldlm.models.mmdit_config import Checkpointing, check_heads, check_mlp_width

Conditioning = Literal["none", "prefix", "adaln", "cross_attention"]
DEFAULT_COND_DIM, DEFAULT_TOKENS_PER_LATENT = 256, 4


class PlainConfig(Section):
    """The plain transformer: shape, vocabulary and switches. Also what `config.json` of an
    exported model holds.

    A task narrows a switch that it decides: `causal: Literal[True] = True`.
    """

    on_resume = OnResume.FIXED

    hidden_size: int = Field(384, ge=8, le=MAX_WIDTH)
    """Width H."""
    n_blocks: int = Field(6, ge=1, le=10_000)
    """Number of blocks."""
    n_heads: int = Field(6, ge=1, le=MAX_WIDTH)
    """Attention heads; must divide hidden_size, and hidden_size / n_heads must be even (RoPE)."""
    mlp_ratio: float = Field(4.0, gt=0, le=1000)
    """Hidden width of each MLP as a multiple of hidden_size."""
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
    max_seq_len: int = Field(128, ge=2, le=MAX_COUNT)
    """Longest text in tokens, EOS included."""
    latent_dim: Annotated[int | None, FilledFromData()] = Field(None, ge=1, le=MAX_WIDTH)
    """Dimension D of a latent. None: taken from the data."""
    tokens_per_latent: int | None = Field(None, ge=1, le=MAX_WIDTH)
    """Chunk tokens K that present one latent (conditioning=prefix, cross_attention). None: 4."""
    num_latents: Annotated[int, FilledFromData()] = Field(1, ge=1, le=MAX_COUNT)
    """Latents N of one sample. 1: as many as the data has."""
    qk_rmsnorm: bool = True
    """RMS-normalize queries and keys in every head (keeps attention logits bounded in bf16)."""
    tie_embeddings: bool = False
    """Share the token embedding with the text head."""
    token_embedding_init: Literal["random", "encoder"] = "random"
    """encoder: start from the input embeddings of the encoder that made the latents, cut to
    hidden_size by their principal components. A token that only the text's tokenizer has starts
    from the mean of those that spell it."""
    token_embedding_scale: float = Field(1.0, gt=0, le=1e6)
    """The model reads token embeddings times this."""
    output_bias_init: Literal["zeros", "frequency"] = "zeros"
    """frequency: the biases of the text and length heads start from the log frequencies of the
    training split.
    """
    dropout: Annotated[float, OnResume.REPORT] = Field(0.0, ge=0, lt=1)
    """In training, the fraction of the elements of each block's attention outputs and MLP output
    that is set to 0. The masks are functions of seed, epoch, sample and position: equal on every
    engine and number of ranks, and after a resume."""
    gradient_checkpointing: Annotated[Checkpointing, OnResume.REPORT] = False
    """Keep only the rows between blocks and run each block again in the backward pass. A number n:
    only every n-th block."""
    vocab_size: Annotated[int | None, FilledFromData()] = Field(None, ge=3, le=MAX_COUNT)
    """Vocabulary V. None: taken from the tokenizer."""
    extra_input_tokens: Annotated[int, FilledFromData()] = Field(0, ge=0, le=MAX_COUNT)
    """Ids V, V + 1, ... that the model reads but never predicts (HDLM's clusters)."""
    mask_token_id: Annotated[int | None, FilledFromData()] = Field(None, ge=0, le=MAX_COUNT)
    """Id of [MASK]; the text head never predicts it. None: taken from the tokenizer."""
    pad_token_id: Annotated[int | None, FilledFromData()] = Field(None, ge=0, le=MAX_COUNT)
    """Id used to fill up rows. None: taken from the tokenizer."""
    eos_token_id: Annotated[int | None, FilledFromData()] = Field(None, ge=0, le=MAX_COUNT)
    """Id that ends every text. None: taken from the tokenizer."""

    @model_validator(mode="after")
    def _keys_are_read(self) -> PlainConfig:
        check_heads(self.hidden_size, self.n_heads)
        check_mlp_width(self.hidden_size, self.mlp_ratio)
        if self.causal and self.reads_time:
            raise ValueError(
                "model.reads_time belongs to diffusion: with model.causal=true nothing has a"
                " timestep"
            )
        if self.reads_pooled and self.conditioning not in ("prefix", "cross_attention"):
            raise ValueError(
                "model.reads_pooled is read only with model.conditioning=prefix or"
                f" cross_attention (it is {self.conditioning}): drop it"
            )
        if self.tokens_per_latent is not None and not self.has_latent_tokens:
            raise ValueError(
                "model.tokens_per_latent is read only with model.conditioning=prefix or"
                f" cross_attention (it is {self.conditioning}): drop it"
            )
        if self.cond_dim is not None and not (self.is_modulated or self.has_length_head):
            raise ValueError(
                "model.cond_dim is read by adaLN and the length head, and this model has neither:"
                " drop it"
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
