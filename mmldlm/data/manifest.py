"""The manifest of a store: types and ranges of the entries that are used, and the advice for a
missing or damaged store.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from mmldlm.data.encoders.specs import EncoderIdentity
from mmldlm.data.writers import MAX_IMAGE_SIZE, MAX_LATENT_DIM, MAX_LATENTS
from mmldlm.utils.paths import path_inside

# Far above every known tokenizer: a model has one row per id.
MAX_VOCAB_SIZE = 1 << 24
MANIFEST = "manifest.json"


class _File(BaseModel):
    bytes: int = Field(ge=0)
    sha256: str


class _Split(BaseModel):
    num_samples: int = Field(ge=0, lt=1 << 48)
    num_tokens: int = Field(0, ge=0, lt=1 << 62)
    max_tokens: int = Field(0, ge=0, lt=1 << 31)


class _Norm(BaseModel):
    min: float = Field(ge=0, allow_inf_nan=False)
    mean: float = Field(ge=0, allow_inf_nan=False)
    max: float = Field(ge=0, allow_inf_nan=False)


class _Statistics(BaseModel):
    mean: list[float]
    std: list[float]
    norm: _Norm | None = None
    effective_rank: float | None = Field(None, ge=0, allow_inf_nan=False)

    def find_problem(self, latent_dim: int) -> str | None:
        """Say why these are not the mean and deviation of latents of this dimension."""
        for key, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != latent_dim:
                return f"{key} has {len(values)} values for latents of {latent_dim}"
            for i, value in enumerate(values):
                # Models store fp32, in which 1e300 would be infinite.
                if not abs(value) <= 1e30:
                    return f"{key}[{i}] is {value}, not a finite number"
                if key == "std" and value < 0:
                    return f"std[{i}] is {value}, below 0"
        if max(self.std) == 0:
            return "std is 0 in every dimension: all latents would be equal"
        return None


class _Tokenizer(BaseModel):
    name: str
    vocab_size: int = Field(ge=1, le=MAX_VOCAB_SIZE)
    mask_token_id: int
    pad_token_id: int
    eos_token_id: int
    unk_token_id: int | None = None

    @model_validator(mode="after")
    def _ids_are_of_the_vocabulary(self) -> _Tokenizer:
        for key in ("mask_token_id", "pad_token_id", "eos_token_id", "unk_token_id"):
            value = getattr(self, key)
            if value is not None and not 0 <= value < self.vocab_size:
                raise ValueError(f"{key} {value} in a vocabulary of {self.vocab_size}")
        return self


class _Image(BaseModel):
    size: int = Field(ge=1, le=MAX_IMAGE_SIZE)
    patch: int = Field(ge=1)
    channels: Literal[1, 3]
    grid: list[int] | None = Field(min_length=2, max_length=2)
    latents: Literal["pixels", "pca", "codes", "vae"]
    codes: int | None = Field(None, ge=2, le=1 << 16)
    codebook: Literal["kmeans", "fsq"] | None = None


class CodecIdentity(_Image):
    """The identity of an image codec, as the config of a model holds it."""

    num_latents: int = Field(ge=1, le=MAX_LATENTS)
    latent_dim: int = Field(ge=1, le=MAX_LATENT_DIM)

    @model_validator(mode="after")
    def _has_whole_patches(self) -> CodecIdentity:
        if self.size % self.patch:
            raise ValueError(f"patches of {self.patch} in images of {self.size}")
        return self


class Manifest(BaseModel):
    """The entries of a manifest that are used; others are ignored."""

    kind: Literal["text", "image"] = "text"
    image: _Image | None = None
    latent_dim: int = Field(ge=1, le=MAX_LATENT_DIM)
    latents_per_text: int = Field(1, ge=1, le=MAX_LATENTS)
    latent_stats: _Statistics | None
    tokenizer: _Tokenizer
    encoder: EncoderIdentity
    splits: dict[str, _Split]
    files: dict[str, _File]

    @field_validator("files")
    @classmethod
    def _check_relative(cls, files: dict[str, _File]) -> dict[str, _File]:
        for name in files:
            try:
                path_inside(Path(), name)
            except ValueError as error:
                raise ValueError(f"{error}, is outside the store") from None
        return files

    @model_validator(mode="after")
    def _check_image(self) -> Manifest:
        if (self.kind == "image") != (self.image is not None):
            raise ValueError(
                f"kind {self.kind} {'without' if self.image is None else 'with'} the entry image"
            )
        if self.image is None:
            return self
        image, shape = self.image, (self.latents_per_text, self.latent_dim)
        side = image.size // image.patch
        if image.size % image.patch or shape[0] != side**2:
            raise ValueError(
                f"{shape[0]} latents of patches of {image.patch} in images of {image.size}"
            )
        if image.latents == "pixels" and shape[1] != image.patch**2 * image.channels:
            raise ValueError(
                f"latents of {shape[1]} values for patches of {image.patch} x {image.patch}"
            )
        has_codes = image.latents == "codes"
        if has_codes != (image.codes is not None) or has_codes != (image.codebook is not None):
            raise ValueError(
                f"latents {image.latents} with {image.codes} codes of {image.codebook}"
            )
        if has_codes and shape[1] != 1:
            raise ValueError(f"{shape[1]} ids a patch")
        return self

    @model_validator(mode="after")
    def _check_statistics(self) -> Manifest:
        has_codes = self.image is not None and self.image.latents == "codes"
        if has_codes != (self.latent_stats is None):
            raise ValueError(
                "latent_stats are those of values: ids of codes have none, other latents have them"
            )
        if self.latent_stats is not None and (
            problem := self.latent_stats.find_problem(self.latent_dim)
        ):
            raise ValueError(f"latent_stats: {problem}")
        return self


def sample_checksums(manifest: dict[str, Any]) -> dict[str, str]:
    """Return the checksums of tokens and latents of all splits: what other data of these samples
    can be known by.
    """
    names = [
        f"{split}/{array}.npy" for split in manifest["splits"] for array in ("tokens", "latents")
    ]
    return {name: manifest["files"][name]["sha256"] for name in names}


def rebuild_hint(root: str | os.PathLike) -> str:
    """Return the advice for a damaged store."""
    command = shlex.join(["mmldlm", "prepare", "CORPUS", "--force", "--output-dir", str(root)])
    return (
        f"copy the store again, or rebuild it with: {command} (with the CORPUS and options that"
        " made it; mmldlm pack for one that was packed)"
    )


def missing_store_hint(root: Path) -> str:
    """Return the advice for a missing store."""
    make = shlex.join(["mmldlm", "prepare", "CORPUS", "--output-dir", str(root)])
    return f"check the path, or make a store there with: {make}"
