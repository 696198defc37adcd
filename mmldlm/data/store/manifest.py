"""The schema of a store's manifest: types and ranges of the entries that are used."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from pydantic import BaseModel, Field, ValidationError, field_validator

from mmldlm.utils.formatting import join_some


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


class _Manifest(BaseModel):
    latent_dim: int = Field(ge=1, le=1 << 20)
    latents_per_text: int = Field(1, ge=1, le=1 << 20)
    latent_stats: _Statistics
    tokenizer: _Tokenizer
    encoder: _Encoder
    splits: dict[str, _Split]
    files: dict[str, _File]

    @field_validator("files")
    @classmethod
    def _check_relative(cls, files: dict[str, _File]) -> dict[str, _File]:
        for name in files:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise ValueError(f"{name[:80]} is outside the store")
        return files


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
