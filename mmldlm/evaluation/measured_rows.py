"""Which rows of a table of figures were measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

_Row = TypeVar("_Row", bound=tuple)


def measured_rows(rows: Sequence[_Row], is_measured: Callable[[str], bool]) -> list[_Row]:
    """Return the rows of a table that were measured: without indented rows whose parent was not.

    An indented line belongs to the line above it. Without its own, it would be read as one of
    another figure.

    Args:
        rows: key, label and more of each row, in order. The label of a row that belongs to another
            is indented.
        is_measured: by key.
    """
    found, has_parent = [], False
    for row in rows:
        key, label = row[0], row[1]
        is_child = label.startswith(" ")
        if not is_child:
            has_parent = is_measured(key)
        if is_measured(key) and (has_parent or not is_child):
            found.append(row)
    return found
