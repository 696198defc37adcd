"""Config keys that both networks have, and what they check."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from mmldlm.config.section import MAX_COUNT, MAX_WIDTH, FilledFromData, OnResume, Section

Checkpointing: TypeAlias = bool | Annotated[int, Field(ge=1, le=10_000)]


class TransformerConfig(Section):
    """Shape, vocabulary and switches of a network; also what `config.json` of an exported model
    holds.
    """

    on_resume = OnResume.FIXED

    hidden_size: int = Field(384, ge=8, le=MAX_WIDTH)
    """Width H of a row, of both streams in an MMDiT."""
    n_blocks: int = Field(6, ge=1, le=10_000)
    """Number of blocks."""
    n_heads: int = Field(6, ge=1, le=MAX_WIDTH)
    """Attention heads; must divide hidden_size, and hidden_size / n_heads must be even (RoPE)."""
    mlp_ratio: float = Field(4.0, gt=0, le=1000)
    """Hidden width of each MLP as a multiple of hidden_size."""
    max_seq_len: int = Field(128, ge=2, le=MAX_COUNT)
    """Longest text in tokens, EOS included."""
    latent_dim: Annotated[int | None, FilledFromData()] = Field(None, ge=1, le=MAX_WIDTH)
    """Dimension D of a latent. None: taken from the data."""
    num_latents: Annotated[int, FilledFromData()] = Field(1, ge=1, le=MAX_COUNT)
    """Latents N of one sample. 1: as many as the data has (`mmldlm prepare --latents-per-text N`,
    for long texts).
    """
    qk_rmsnorm: bool = True
    """RMS-normalize queries and keys in every head (keeps attention logits bounded in bf16)."""
    tie_embeddings: bool = False
    """Share the token embedding with the text head."""
    token_embedding_init: Literal["random", "encoder"] = "random"
    """encoder: start from the input embeddings of the encoder that made the latents, cut to
    hidden_size by their principal components. A token that only the text's tokenizer has starts
    from the mean of those that spell it."""
    token_embedding_scale: float = Field(1.0, gt=0, le=1e6)
    """The model reads token embeddings times this. They start at a standard deviation of 0.02, and
    what the blocks add would hide them in the residual stream (Gemma, arXiv 2403.08295, has
    sqrt(H))."""
    output_bias_init: Literal["zeros", "frequency"] = "zeros"
    """frequency: the biases of the text and length heads start from the log frequencies of the
    training split, which the model then need not learn first."""
    dropout: Annotated[float, OnResume.REPORT] = Field(0.0, ge=0, lt=1)
    """In training, the fraction of the elements of each block's attention output and MLP output
    that is set to 0. The masks are functions of seed, epoch, sample and position: equal on every
    engine and number of ranks, and after a resume."""
    gradient_checkpointing: Annotated[Checkpointing, OnResume.REPORT] = False
    """Keep only the rows between blocks and run each block again in the backward pass: a third
    more work for about a tenth of the memory. A number n: only every n-th block. Off, blocks of an
    MMDiT still recompute what is cheap (norms, modulation, GELU, rotation)."""
    vocab_size: Annotated[int | None, FilledFromData()] = Field(None, ge=3, le=MAX_COUNT)
    """Vocabulary V. None: taken from the tokenizer."""
    mask_token_id: Annotated[int | None, FilledFromData()] = Field(None, ge=0, le=MAX_COUNT)
    """Id of [MASK]; the text head never predicts it (SUBS). None: taken from the tokenizer."""
    pad_token_id: Annotated[int | None, FilledFromData()] = Field(None, ge=0, le=MAX_COUNT)
    """Id used to fill up rows. None: taken from the tokenizer."""
    eos_token_id: Annotated[int | None, FilledFromData()] = Field(None, ge=0, le=MAX_COUNT)
    """Id that ends every text. None: taken from the tokenizer."""

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> Self:
        if self.hidden_size % self.n_heads:
            raise ValueError(
                f"model.n_heads={self.n_heads} does not divide model.hidden_size="
                f"{self.hidden_size}: choose a divisor"
            )
        if (self.hidden_size // self.n_heads) % 2:
            raise ValueError(
                f"a head is model.hidden_size / model.n_heads = {self.hidden_size // self.n_heads}"
                " wide; RoPE needs an even width: choose another model.n_heads"
            )
        return self

    @model_validator(mode="after")
    def _mlp_has_a_hidden_unit(self) -> Self:
        if int(self.hidden_size * self.mlp_ratio) < 1:
            raise ValueError(
                f"model.mlp_ratio={self.mlp_ratio} times model.hidden_size={self.hidden_size} is"
                f" an MLP without hidden units: at least {1 / self.hidden_size:g}"
            )
        return self

    @model_validator(mode="after")
    def _ids_are_in_the_vocabulary(self) -> Self:
        for key in ("mask_token_id", "pad_token_id", "eos_token_id"):
            value = getattr(self, key)
            if value is not None and self.vocab_size is not None and value >= self.vocab_size:
                raise ValueError(
                    f"model.{key}={value} is not in the vocabulary: below"
                    f" model.vocab_size={self.vocab_size}"
                )
        return self

    @property
    def recomputed_blocks(self) -> range:
        """The blocks that run again in the backward pass: all, every n-th, or none."""
        every = int(self.gradient_checkpointing)
        return range(0, self.n_blocks, every) if every else range(0)
