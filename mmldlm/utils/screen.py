"""The console of every command, and standard streams that may be closed."""

from __future__ import annotations

import contextlib
import os
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


def open_standard_streams() -> None:
    """Open /dev/null in place of a closed stdin, stdout or stderr (`>&-`, cron, daemons); call it
    before anything else.

    Python sets a closed stream to None, on which libraries fail, and the next opened file would
    take its number. What a stream cannot encode is escaped: letters under LC_ALL=C, and names of
    files that are not UTF-8.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print a line to `stream` (default: stdout); a closed terminal or a closed pipe is no error.

    For a process that others depend on, such as the launcher of ranks that still have to save.
    """
    with contextlib.suppress(OSError):
        print(text, file=stream or sys.stdout, flush=True)
