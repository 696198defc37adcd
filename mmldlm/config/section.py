"""The base of every config section, and what a resumed run may change in it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from mmldlm.config.yaml_reader import WrittenFloat, WrittenInt
from mmldlm.utils.option_types import LARGEST
from mmldlm.utils.paths import expand_path

# Bounds far above any model: a config.json of unknown origin must not ask for more than a machine
# has.
MAX_WIDTH, MAX_COUNT = 1 << 20, 1 << 28
MAX_INT = (1 << 63) - 1  # int64 of C, torch and NumPy
MAX_WEIGHT = 1e9  # weight of a loss term: above it losses overflow


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
    """Marks a field that holds a path: ~ and variables are expanded, and files of a run store an
    absolute one.

    Attributes:
        words: Values that are not paths.
        or_name: Whether the field also takes names: ~ and variables are expanded, and nothing
            else is done.
    """

    words: tuple[str, ...] = ()
    or_name: bool = False

    def absolute(self, value: str) -> str:
        """Return the absolute path of a value; a word or a name as it is."""
        return value if value in self.words or self.or_name else str(Path(value).absolute())

    def identity(self, value: str) -> str:
        """Return what is equal for two spellings of the same file: links are followed."""
        return value if value in self.words or self.or_name else os.path.realpath(value)


@dataclass(frozen=True)
class FilledFromData:
    """Marks a field that the data decides where the config leaves it unset: preflight and training
    may differ in it.
    """


FilePath = Annotated[str | None, IsPath()]
Weight = Annotated[float, Field(ge=0, le=LARGEST)]  # of several that `check_weights` takes


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values are checked on assignment.

    Every field has a docstring below it, which `mmldlm config --keys` prints.
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )
    on_resume: ClassVar[OnResume] = OnResume.REPORT

    @classmethod
    def field_on_resume(cls, name: str) -> OnResume:
        """What a resume does about a change of one field."""
        markers = [
            marker for marker in cls.model_fields[name].metadata if isinstance(marker, OnResume)
        ]
        return markers[0] if markers else cls.on_resume

    @classmethod
    def path_marker(cls, name: str) -> IsPath | None:
        """Return the marker of a field that holds a path; None for another field."""
        return next(
            (marker for marker in cls.model_fields[name].metadata if isinstance(marker, IsPath)),
            None,
        )

    @classmethod
    def read_value(cls, name: str, value: Any) -> Any:
        """Return a value of YAML as a field takes it: in a field of text, a number is the text
        that was written.

        Raises:
            ValueError: a truth value or a text where a number is needed, a number that C cannot
                hold, or a path whose ~ or variable has no value.
        """
        annotation, marker = cls.model_fields[name].annotation, cls.path_marker(name)
        if not any(
            isinstance(leaf, type) and issubclass(leaf, BaseModel) for leaf in _leaves(annotation)
        ):
            value = _read(value, annotation)
        if marker is None:
            return value
        if isinstance(value, dict):
            return {
                expand_path(key) if isinstance(key, str) else key: item
                for key, item in value.items()
            }
        return (
            expand_path(value) if isinstance(value, str) and value not in marker.words else value
        )

    @field_validator("*", mode="before")
    @classmethod
    def _as_the_field_takes_it(cls, value: Any, info: ValidationInfo) -> Any:
        return value if info.field_name is None else cls.read_value(info.field_name, value)


def _read(value: Any, annotation: Any) -> Any:
    if isinstance(value, dict):
        keys, items = _dict_types(annotation)
        if glued := [
            key
            for key, item in value.items()
            if item is None and float in _leaves(items) and ":" in str(key)
        ]:
            spaced = ", ".join(": ".join(key.rsplit(":", 1)) for key in glued)
            raise ValueError(
                f"numbers by name; YAML wants a blank after the colon: write {{{spaced}}}"
            )
        return {_read_leaf(key, keys): _read(item, items) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_read(item, annotation) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return _read_leaf(value, annotation)


def _read_leaf(value: Any, annotation: Any) -> Any:
    types, words = _leaf_types(annotation)
    if isinstance(value, (WrittenInt, WrittenFloat)):
        if str in types:
            return value.text
        value = int(value) if isinstance(value, int) else float(value)
    if not types & {int, float} or types - {int, float, bool, str, type(None)}:
        return value  # no number, or a type of the user's own
    if isinstance(value, bool) and bool not in types:
        raise ValueError("a number, not true or false")
    if isinstance(value, str) and not types & {str, bool} and value not in words:
        raise ValueError(
            "a decimal number, without quotes, underscores or leading zeros"
            + "".join(f" or {word}" for word in words)
        )
    is_whole = isinstance(value, int) or (isinstance(value, float) and float not in types)
    if is_whole and abs(value) > MAX_INT:
        raise ValueError("a number below 2^63")
    return value


def _leaf_types(annotation: Any) -> tuple[frozenset[Any], tuple[Any, ...]]:
    """Return the types that a value, or an item of a list or tuple, may have, and the words of its
    Literals.
    """
    leaves = list(_leaves(annotation))
    words = tuple(
        word for leaf in leaves if get_origin(leaf) is Literal for word in get_args(leaf)
    )
    return frozenset(leaf for leaf in leaves if get_origin(leaf) is not Literal), words


def _leaves(annotation: Any) -> Iterator[Any]:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal or not parts:
        yield annotation
    elif origin is Annotated:
        yield from _leaves(parts[0])
    elif origin is not dict:
        for part in parts:
            if part is not Ellipsis:
                yield from _leaves(part)


def _dict_types(annotation: Any) -> tuple[Any, Any]:
    """Return the types of keys and values of a dict's annotation; Any where there is none."""
    if get_origin(annotation) is dict:
        keys, items = get_args(annotation)
        return keys, items
    nested = get_args(annotation) if get_origin(annotation) is not Literal else ()
    dict_types = (_dict_types(part) for part in nested if part is not Ellipsis)
    return next((types for types in dict_types if types != (Any, Any)), (Any, Any))


def check_weights(key: str, weights: Mapping[str, float], least_share: float = 0.0) -> None:
    """Check that weights can be turned into shares.

    Args:
        key: Key of the config, for the error.
        weights: Weights by name, each of type Weight.
        least_share: Lower bound of every share.

    Raises:
        ValueError: no weight above 0, or a smaller share.
    """
    total = sum(weights.values())
    if total == 0:
        raise ValueError(f"{key}={dict(weights)}: the sum is 0; one weight is above 0")
    small = {name: weight for name, weight in weights.items() if weight / total < least_share}
    if small:
        name, weight = next(iter(small.items()))
        raise ValueError(
            f"{key}: the weight of {name} is {weight}, a share of {weight / total:.3g}; every"
            f" share is at least 1/{round(1 / least_share):,}: leave it out, or give it a larger"
            " weight"
        )


def check_keys_are_read(section: Section, name: str, *rules: tuple[str, bool, str]) -> None:
    """Check that keys which the section's others leave unread have their default, as every saved
    config holds them.

    Args:
        rules: Key, whether it is read, and what it is read with.

    Raises:
        ValueError: the first that has another value.
    """
    for key, is_read, reader in rules:
        value = getattr(section, key)
        if value != type(section).model_fields[key].default and not is_read:
            raise ValueError(
                f"{name}.{key}={value} is read only with {reader}: drop it, or set that"
            )
