"""The schema of a store's manifest: types and ranges of the entries that are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from mmldlm.utils.formatting import join_some
from mmldlm.utils.inside_paths import path_inside


class _File(BaseModel):
    bytes: int = Field(ge=0)
    sha256: str


class _Split(BaseModel):
    num_samples: int = Field(ge=0)


class _Statistics(BaseModel):
    mean: list[float]
    std: list[float]


class _Tokenizer(BaseModel):
    name: str
    vocab_size: int = Field(ge=1)
    mask_token_id: int
    pad_token_id: int
    eos_token_id: int


class _Encoder(BaseModel):
    name: str


class _Image(BaseModel):
    size: int = Field(ge=1, le=1 << 14)
    patch: int = Field(ge=1)
    channels: Literal[1, 3]
    grid: list[int] | None = Field(min_length=2, max_length=2)
    latents: Literal["pixels", "pca", "codes", "vae"]
    codes: int | None = Field(None, ge=2, le=1 << 16)
    codebook: Literal["kmeans", "fsq"] | None = None


class _Manifest(BaseModel):
    kind: Literal["text", "image"] = "text"
    image: _Image | None = None
    latent_dim: int = Field(ge=1, le=1 << 20)
    latents_per_text: int = Field(1, ge=1, le=1 << 20)
    latent_stats: _Statistics | None
    tokenizer: _Tokenizer
    encoder: _Encoder
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
    def _check_image(self) -> _Manifest:
        if (self.kind == "image") != (self.image is not None):
            raise ValueError(f"kind {self.kind} {'without' if self.image is None else 'with'} the entry image")
        if self.image is None:
            return self
        image, shape = self.image, (self.latents_per_text, self.latent_dim)
        side = image.size // image.patch
        if image.size % image.patch or shape[0] != side**2:
            raise ValueError(f"{shape[0]} latents of patches of {image.patch} in images of {image.size}")
        if image.latents == "pixels" and shape[1] != image.patch**2 * image.channels:
            raise ValueError(f"latents of {shape[1]} values for patches of {image.patch} x {image.patch}")
        has_codes = image.latents == "codes"
        if has_codes != (image.codes is not None) or has_codes != (image.codebook is not None):
            raise ValueError(f"latents {image.latents} with {image.codes} codes of {image.codebook}")
        if has_codes and shape[1] != 1:
            raise ValueError(f"{shape[1]} ids a patch")
        return self

    @model_validator(mode="after")
    def _check_statistics(self) -> _Manifest:
        has_codes = self.image is not None and self.image.latents == "codes"
        if has_codes != (self.latent_stats is None):
            raise ValueError("latent_stats are those of values: ids of codes have none, other latents have them")
        return self


def find_problems(manifest: dict[str, Any]) -> str | None:
    """Describe the problems of a manifest; None for a valid one. Unknown keys are ignored."""
    try:
        _Manifest.model_validate(manifest, strict=True)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        return join_some(problems, limit=3, separator="; ")
    return None


def sample_checksums(manifest: dict[str, Any]) -> dict[str, str]:
    """Return the checksums of tokens and latents of all splits: what other data of these samples can be known by."""
    names = [f"{split}/{array}.npy" for split in manifest["splits"] for array in ("tokens", "latents")]
    return {name: manifest["files"][name]["sha256"] for name in names}
