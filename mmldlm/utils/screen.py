"""The console of every command."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from mmldlm.utils.formatting import printable


class PlainConsole(Console):
    """A console on which control characters of names and texts are escaped."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def open_console(
    stream: TextIO | None = None,
    quiet: bool = False,
    soft_wrap: bool = False,
    kind: type[PlainConsole] = PlainConsole,
) -> PlainConsole:
    """Return a console that reads no markup, emoji codes or highlighting into what it prints.

    Texts, names and paths may have square brackets and colons; style is given by `rich.text.Text`.
    Cursor codes go to terminals only: FORCE_COLOR, which is set for whole CI jobs, makes no
    terminal of a file.

    Args:
        stream: Output (default: standard output).
        soft_wrap: Whether to leave the breaking of lines to the terminal.
        kind: Class of the console.
    """
    stream = stream or sys.stdout
    try:
        is_terminal = stream.isatty()
    except (AttributeError, ValueError):  # not a real stream, or a closed one
        is_terminal = False
    return kind(
        file=stream,
        quiet=quiet,
        soft_wrap=soft_wrap,
        markup=False,
        emoji=False,
        highlight=False,
        force_terminal=is_terminal,
        force_interactive=is_terminal,
    )
