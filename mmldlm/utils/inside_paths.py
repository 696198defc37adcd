"""Paths from names that a file lists.

Such a file may come from anyone, so a name must stay inside its folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_MAX_PART_BYTES = 255  # of a file name on every common file system


def path_inside(folder: Path, name: object) -> Path:
    """Return the path of `name` below `folder`.

    A name is relative, its parts separated by slashes (`a/b` is legitimate), and has one spelling
    alone: no empty part, no `.` and no `..`. Links are not followed here.

    Raises:
        ValueError: anything else; the message completes "found ...".
    """
    problem = _problem(name)
    if problem is not None:
        raise ValueError(f"the name {str(name)[:80]!r}, {problem}")
    return folder / str(name)


def check_distinct(names: Iterable[str]) -> None:
    """Check that files of these names can exist beside each other: none twice, and none as the
    folder of another.

    Raises:
        ValueError: two names collide; the message completes "found ...".
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"two files named {name[:80]!r}")
        seen.add(name)
    for name in seen:
        folder = name
        while folder := folder.rpartition("/")[0]:
            if folder in seen:
                raise ValueError(
                    f"{folder[:80]!r} both as a file and as the folder of {name[:80]!r}"
                )


def _problem(name: object) -> str | None:
    if not isinstance(name, str):
        return f"a {type(name).__name__} instead of text"
    if not name:
        return "which is empty"
    if "\0" in name:
        return "with a NUL byte"
    if name.startswith("/"):
        return "an absolute path"
    parts = name.split("/")
    if ".." in parts:
        return "which leads out of the folder"
    if "" in parts or "." in parts:
        return "with an empty part or `.`"
    try:
        longest = max(len(os.fsencode(part)) for part in parts)
    except UnicodeEncodeError:
        return "which is not valid text"
    return (
        f"with a part of more than {_MAX_PART_BYTES} bytes" if longest > _MAX_PART_BYTES else None
    )
