"""The schema of an encoder's identity, as manifests of stores and configs of models hold it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, ValidationError, field_validator

from mmldlm.data.encoders.specs import POOLINGS
from mmldlm.utils.validation import describe_problems


class EncoderIdentity(BaseModel):
    """Types and ranges of the entries that are used; others are ignored, and of an image codec
    most are absent.
    """

    name: str = Field(min_length=1, max_length=4096)
    hub_name: str | None = None
    source: str | None = None
    pooling: str | None = None
    normalize: bool = False
    max_length: int | None = Field(None, ge=1, le=1 << 24)
    weights_sha256: str | None = None
    prefix: str | None = None
    cut_to: int | None = Field(None, ge=1, le=1 << 20)
    dtype: str | None = None
    source_language: str | None = None
    lower_case: bool | None = None
    include_prompt: bool | None = None
    is_bare: bool | None = None
    modules: list[str] | None = None

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if "\0" in name:
            raise ValueError("a name without NUL")
        return name

    @field_validator("pooling")
    @classmethod
    def _is_known(cls, pooling: str | None) -> str | None:
        if pooling is not None and not all(part in POOLINGS for part in pooling.split("+")):
            raise ValueError(f"a pooling among {', '.join(POOLINGS)}")
        return pooling


def find_identity_problems(identity: Any) -> str | None:
    """Describe the problems of an encoder's identity; None for a valid one."""
    try:
        EncoderIdentity.model_validate(identity, strict=True)
    except ValidationError as error:
        return describe_problems(error, "encoder")
    return None
