"""The console of every command."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from mmldlm.utils.formatting import printable
from mmldlm.utils.streams import is_terminal


class _PlainConsole(Console):
    """A console on which control characters of names and texts are escaped."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def open_console(quiet: bool = False) -> Console:
    """Return a console on standard output that reads no markup, emoji codes or highlighting into
    what it prints.

    Texts, names and paths may have square brackets and colons; style is given by `rich.text.Text`.
    Cursor codes go to terminals only: FORCE_COLOR, which is set for whole CI jobs, makes no
    terminal of a file.
    """
    on_terminal = is_terminal(sys.stdout)
    return _PlainConsole(
        file=sys.stdout,
        quiet=quiet,
        markup=False,
        emoji=False,
        highlight=False,
        force_terminal=on_terminal,
        force_interactive=on_terminal,
    )
