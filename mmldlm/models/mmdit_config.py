"""Config of the MMDiT."""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from mmldlm.config.section import MAX_COUNT, MAX_WIDTH, FilledFromData, OnResume, Section
from mmldlm.errors import UserError

Grid: TypeAlias = Annotated[
    list[Annotated[int, Field(ge=1, le=MAX_COUNT)]], Field(min_length=2, max_length=2)
]

Checkpointing: TypeAlias = bool | Annotated[int, Field(ge=1, le=10_000)]


class ModelConfig(Section):
    """The MMDiT: shape, vocabulary and switches.

    Also what `config.json` of an exported model holds.
    """

    on_resume = OnResume.FIXED

    hidden_size: int = Field(384, ge=8, le=MAX_WIDTH)
    """Width H of both streams."""
    n_blocks: int = Field(6, ge=1, le=10_000)
    """Number of joint blocks."""
    n_heads: int = Field(6, ge=1, le=MAX_WIDTH)
    """Attention heads; must divide hidden_size, and hidden_size / n_heads must be even (RoPE)."""
    cond_dim: int = Field(256, ge=8, le=MAX_WIDTH)
    """Width of the conditioning vector (timesteps and pooled latent) that drives adaLN-Zero."""
    mlp_ratio: float = Field(4.0, gt=0, le=1000)
    """Hidden width of each MLP as a multiple of hidden_size."""
    max_seq_len: int = Field(128, ge=2, le=MAX_COUNT)
    """Longest text in tokens, EOS included."""
    latent_dim: Annotated[int | None, FilledFromData()] = Field(None, ge=1, le=MAX_WIDTH)
    """Dimension D of a latent. None: taken from the data."""
    tokens_per_latent: int = Field(4, ge=1, le=MAX_WIDTH)
    """Chunk tokens K that present one latent; K * hidden_size >= D passes it without loss."""
    num_latents: Annotated[int, FilledFromData()] = Field(1, ge=1, le=MAX_COUNT)
    """Latents N of one sample. 1: as many as the data has (`mmldlm prepare --latents-per-text N`,
    for long texts).
    """
    latent_grid: Annotated[Grid | None, FilledFromData()] = None
    """[rows, columns] of the latents of an image, rows * columns = num_latents: their positions
    then start from two-dimensional sinusoids instead of noise. None: as the data says; a text's
    latents have none."""
    latent_grids: Annotated[list[Grid] | None, FilledFromData()] = None
    """Grids of images of several sizes (data.mixture), the smallest first; latent_grid is the
    largest. Positions are then fixed two-dimensional sinusoids, not learned. None: as the data
    says; images of one size have none."""
    latent_rope: bool = False
    """Apply axial RoPE (as in JiT, arXiv 2511.13720) to latent queries and keys, using their row
    and column in model.latent_grid: the first half of the pairs of a head turns by the row, the
    second by the column. The width of a head must be a multiple of 4."""
    latent_predictions: int = Field(1, ge=1, le=2)
    """Vectors that the latent head predicts for each latent: 2 with
    latent_diffusion.prediction=x0_epsilon, which sets it."""
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
    scale_noisy_latents: bool = False
    """Multiply the latents that the model reads by cos(pi t / 2) of their timestep: noise that
    says nothing of the latent is then not read (EDM's input scaling, arXiv 2206.00364, for unit
    variance and the cosine schedule). With predictions x0 and v alone: the others hold the
    noise."""
    dropout: Annotated[float, OnResume.REPORT] = Field(0.0, ge=0, lt=1)
    """In training, the fraction of the elements of each block's attention output and MLP output
    that is set to 0. The masks are functions of seed, epoch, sample and position: equal on every
    engine and number of ranks, and after a resume."""
    gradient_checkpointing: Annotated[Checkpointing, OnResume.REPORT] = False
    """Keep only the rows between blocks and run each block again in the backward pass: a third
    more work for about a tenth of the memory. A number n: only every n-th block. Off, blocks still
    recompute what is cheap (norms, modulation, GELU, rotation)."""
    vocab_size: Annotated[int | None, FilledFromData()] = Field(None, ge=3, le=MAX_COUNT)
    """Vocabulary V. None: taken from the tokenizer."""
    mask_token_id: Annotated[int | None, FilledFromData()] = Field(None, ge=0, le=MAX_COUNT)
    """Id of [MASK]; the text head never predicts it (SUBS). None: taken from the tokenizer."""
    pad_token_id: Annotated[int | None, FilledFromData()] = Field(None, ge=0, le=MAX_COUNT)
    """Id used to fill up rows. None: taken from the tokenizer."""
    eos_token_id: Annotated[int | None, FilledFromData()] = Field(None, ge=0, le=MAX_COUNT)
    """Id that ends every text. None: taken from the tokenizer."""

    @model_validator(mode="after")
    def _widths_and_ids_fit(self) -> ModelConfig:
        check_heads(self.hidden_size, self.n_heads)
        check_mlp_width(self.hidden_size, self.mlp_ratio)
        check_token_ids(self)
        return self

    @model_validator(mode="after")
    def _grid_holds_the_latents(self) -> ModelConfig:
        if self.latent_grid is not None and math.prod(self.latent_grid) != self.num_latents:
            raise ValueError(
                f"model.latent_grid={self.latent_grid} has {math.prod(self.latent_grid)} places"
                f" for model.num_latents={self.num_latents}: leave both unset (the data has them),"
                " or set both"
            )
        return self

    @model_validator(mode="after")
    def _grids_can_be_distinguished(self) -> ModelConfig:
        if self.latent_grids is None:
            return self
        counts = [math.prod(grid) for grid in self.latent_grids]
        if (
            len(counts) < 2
            or sorted(set(counts)) != counts
            or self.latent_grid not in self.latent_grids
        ):
            raise ValueError(
                f"model.latent_grids={self.latent_grids} must be two or more grids by their number"
                f" of places, and model.latent_grid={self.latent_grid} one of them: leave both"
                " unset (the data has them)"
            )
        return self

    @model_validator(mode="after")
    def _rope_has_two_axes(self) -> ModelConfig:
        if self.latent_rope and (self.hidden_size // self.n_heads) % 4:
            raise ValueError(
                f"a head is model.hidden_size / model.n_heads = {self.hidden_size // self.n_heads}"
                " wide; model.latent_rope needs a multiple of 4: choose another model.n_heads"
            )
        return self

    @property
    def rows_per_latent(self) -> int:
        """Rows of one latent in the blocks."""
        return self.tokens_per_latent

    def grid_of(self, count: int) -> list[int] | None:
        """Return the grid of a sample of `count` latents; raise a ValueError where latent_grids
        has none of so many.
        """
        if self.latent_grids is None:
            return self.latent_grid
        for grid in self.latent_grids:
            if math.prod(grid) == count:
                return grid
        raise ValueError(f"{count} latents, but model.latent_grids is {self.latent_grids}")

    def check_places(self) -> None:
        """Raise a UserError if latent_rope is on and no grid is known, the data's included."""
        if self.latent_rope and self.latent_grid is None:
            raise UserError(
                "model.latent_grid for model.latent_rope=true: the rows and columns by which"
                " latents turn",
                "latents without places (texts have none, nor have `pca` latents)",
                "set model.latent_rope=false; latents that have an order:"
                f" model.latent_grid=[1,{self.num_latents}]",
            )


def recomputed_blocks(gradient_checkpointing: Checkpointing, num_blocks: int) -> range:
    """Return the blocks that run again in the backward pass: all, every n-th, or none."""
    return range(0, num_blocks if gradient_checkpointing else 0, int(gradient_checkpointing) or 1)


def check_heads(hidden_size: int, n_heads: int) -> None:
    """Raise a ValueError unless the heads divide the width into parts of even width."""
    if hidden_size % n_heads:
        low = [n for n in range(1, math.isqrt(hidden_size) + 1) if hidden_size % n == 0]
        divisors = {*low, *(hidden_size // n for n in low)}
        near = sorted(divisors, key=lambda n: abs(n - n_heads))[:3]
        raise ValueError(
            f"model.n_heads={n_heads} does not divide model.hidden_size={hidden_size}; "
            f"nearest that do: {', '.join(map(str, sorted(near)))}"
        )
    if (hidden_size // n_heads) % 2:
        raise ValueError(
            f"a head is model.hidden_size / model.n_heads = {hidden_size // n_heads} wide; "
            "RoPE needs an even width: choose another model.n_heads"
        )


def check_mlp_width(hidden_size: int, mlp_ratio: float) -> None:
    """Raise a ValueError unless an MLP has a hidden unit."""
    if int(hidden_size * mlp_ratio) < 1:
        raise ValueError(
            f"model.mlp_ratio={mlp_ratio} times model.hidden_size={hidden_size} is an MLP without"
            f" hidden units: at least {1 / hidden_size:g}"
        )


def check_token_ids(model: ModelConfig) -> None:
    """Raise a ValueError unless the ids of special tokens are in the vocabulary, where it
    is set.
    """
    for key in ("mask_token_id", "pad_token_id", "eos_token_id"):
        value = getattr(model, key)
        if value is not None and model.vocab_size is not None and value >= model.vocab_size:
            raise ValueError(
                f"model.{key}={value} is not in the vocabulary: below"
                f" model.vocab_size={model.vocab_size}"
            )
