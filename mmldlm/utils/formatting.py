"""Facts on the screen."""

from __future__ import annotations


def print_rows(rows: list[tuple[str, str]]) -> None:
    """Two columns."""
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:<{width}}  {value}")
