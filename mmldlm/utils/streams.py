"""Standard streams that may be closed; standard library only, for commands that start often."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import IO, TextIO

ERASE_LINE = "\r\x1b[K"
"""What takes a line from a terminal that has no line end yet."""


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


def is_terminal(stream: IO[str]) -> bool:
    """Whether a stream is a terminal; a closed one, or no real stream, is none."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print a line to `stream` (default: stdout); a closed terminal or a closed pipe is no error.

    For a process that others depend on, such as the launcher of ranks that still have to save.
    """
    with contextlib.suppress(OSError):
        print(text, file=stream or sys.stdout, flush=True)
