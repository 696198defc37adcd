"""Config of the MMDiT."""

from __future__ import annotations

import math
from typing import Annotated, TypeAlias

from pydantic import Field, model_validator

from mmldlm.config.section import MAX_COUNT, MAX_WIDTH, FilledFromData
from mmldlm.errors import UserError
from mmldlm.models.transformer_config import TransformerConfig

Grid: TypeAlias = Annotated[
    list[Annotated[int, Field(ge=1, le=MAX_COUNT)]], Field(min_length=2, max_length=2)
]


class ModelConfig(TransformerConfig):
    """The MMDiT: shape, vocabulary and switches."""

    cond_dim: int = Field(256, ge=8, le=MAX_WIDTH)
    """Width of the conditioning vector (timesteps and pooled latent) that drives adaLN-Zero."""
    tokens_per_latent: int = Field(4, ge=1, le=MAX_WIDTH)
    """Chunk tokens K that present one latent; K * hidden_size >= D passes it without loss."""
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
    scale_noisy_latents: bool = False
    """Multiply the latents that the model reads by cos(pi t / 2) of their timestep: noise that
    says nothing of the latent is then not read (EDM's input scaling, arXiv 2206.00364, for unit
    variance and the cosine schedule). With predictions x0 and v alone: the others hold the
    noise."""

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
