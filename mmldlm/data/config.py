"""Config of the tasks that train on prepared stores."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmldlm.config.schema import DataConfig
from mmldlm.config.section import FilePath, IsPath, OnResume, Section, Weight, check_weights
from mmldlm.data.batch_plan import MIXTURE_BLOCK


class TokenizerConfig(Section):
    """Which tokenizer the data must have been prepared with."""

    name: Annotated[str | None, IsPath(or_name=True)] = None
    """Tokenizer the store was prepared with (a Hugging Face name or folder, `minilm`, or `train`).
    None: the store's own."""


class StoreDataConfig(DataConfig):
    """Where the prepared data lies and how it is fed."""

    latent_data_root: Annotated[FilePath, OnResume.IGNORE] = None
    """Folder of the store that `mmldlm prepare` wrote."""
    mixture: Annotated[dict[str, Weight] | None, IsPath(), OnResume.IGNORE] = None
    """Several stores instead of latent_data_root: folder -> weight, as in 'data.mixture={a: 0.8,
    b: 0.2}'. Of every 4,096 samples each store has its share, in epochs of its own; they must have
    one tokenizer and one encoder. Of images as pixels, stores may differ in size: a batch is then
    of one store, and shares are of batches."""
    long_texts: Literal["error", "truncate"] = "error"
    """What to do with texts longer than model.max_seq_len. truncate cuts them when they are read
    (the number is reported; their latents are of the whole texts). `mmldlm prepare --overlong
    chunk` drops nothing."""
    verify: Annotated[Literal["none", "sizes", "checksums"], OnResume.IGNORE] = "sizes"
    """How much of the store is checked when a run opens it."""

    @property
    def roots(self) -> list[str]:
        """Folders of all stores that a run reads."""
        if self.mixture is not None:
            return list(self.mixture)
        return [] if self.latent_data_root is None else [self.latent_data_root]

    @model_validator(mode="after")
    def _one_source(self) -> StoreDataConfig:
        if self.mixture is not None:
            if self.latent_data_root is not None:
                raise ValueError(
                    "data.latent_data_root and data.mixture are both set: one of them names the"
                    " data"
                )
            if not self.mixture:
                raise ValueError(
                    "data.mixture={}: at least one folder, each with a weight above 0"
                )
            check_weights("data.mixture", self.mixture, least_share=1 / MIXTURE_BLOCK)
            if self.max_train_samples is not None or self.max_validation_samples not in (
                None,
                "auto",
            ):
                raise ValueError(
                    "data.max_train_samples and data.max_validation_samples are for one store, not"
                    " a mixture"
                )
        return self


class ImageDataConfig(StoreDataConfig):
    """Where the prepared images lie and how they are fed."""

    shift_pixels: int = Field(0, ge=0)
    """In training, shift every image by up to this many pixels each way; what comes in has the
    color of the border. 0: none. A sixteenth of the side is a good choice for small sets."""
    shift_only_i2t: bool = False
    """Shift only the images that captions are written of (i2t); those to make stay as they are
    stored.
    """
