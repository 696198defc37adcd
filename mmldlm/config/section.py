"""The base of every config section, and what a resumed run may change in it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict

# Bounds far above any model: a config.json of unknown origin must not ask for more than a machine has.
MAX_WIDTH, MAX_COUNT = 1 << 20, 1 << 28


class OnResume(Enum):
    """What a resume does about a key that differs from the checkpoint's config.

    Set for a section with `on_resume`, for one field with `Annotated[type, OnResume.FIXED]`.
    """

    REPORT = "report"
    """Continue, and print the change."""
    IGNORE = "ignore"
    """Continue: the key says where the run runs or what it writes."""
    FIXED = "fixed"
    """Refuse: the meaning of the weights depends on it."""


@dataclass(frozen=True)
class IsPath:
    """Marks a field that holds a path, which files of a run store as an absolute one.

    Attributes:
        words: values that are not paths.
    """

    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class FilledFromData:
    """Marks a field that the data decides where the config leaves it unset: preflight and training may differ in it."""


FilePath = Annotated[str | None, IsPath()]


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values are checked on assignment.

    Every field has a docstring below it, which `mmldlm config --keys` prints.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, use_attribute_docstrings=True)
    on_resume: ClassVar[OnResume] = OnResume.REPORT

    @classmethod
    def field_on_resume(cls, name: str) -> OnResume:
        """What a resume does about a change of one field."""
        markers = [marker for marker in cls.model_fields[name].metadata if isinstance(marker, OnResume)]
        return markers[0] if markers else cls.on_resume
