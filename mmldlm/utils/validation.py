"""Describe in one line what pydantic refuses."""

from __future__ import annotations

from pydantic import BaseModel, ValidationError

from mmldlm.utils.formatting import join_some


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
