"""What pydantic refuses, in one line; and what must be set by now."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from mmldlm.utils.formatting import join_some

T = TypeVar("T")


def describe_problems(error: ValidationError, name: str = "", limit: int = 3) -> str:
    """Return the first problems: key (below `name`), what is expected, and the value."""
    problems = []
    for item in error.errors():
        key, value = ".".join(map(str, filter(None, (name, *item["loc"])))), item["input"]
        found = "" if isinstance(value, (dict, BaseModel)) else f" (found {value!r:.100})"
        problems.append(
            f"{key}: {item['msg'].removeprefix('Value error, ')}{found}".removeprefix(": ")
        )
    return join_some(problems, limit, separator="; ")


def find_problems(model: type[BaseModel], value: object, name: str = "") -> str | None:
    """Describe the problems of a value that should be one of a model, by strict types; None for a
    valid one. Keys that the model does not know are ignored.
    """
    try:
        model.model_validate(value, strict=True)
    except ValidationError as error:
        return describe_problems(error, name)
    return None


def not_none(value: T | None) -> T:
    """Return a value whose type allows None where the caller knows that it is set."""
    assert value is not None
    return value
