"""Text for messages, tables and the screen."""

from __future__ import annotations

import difflib
import errno
import os
import shlex
from collections.abc import Iterable, Mapping
from typing import IO

from mmldlm.errors import ACCESS_FIX
from mmldlm.utils.streams import is_terminal


def join_some(values: Iterable[object], limit: int = 4, separator: str = ", ") -> str:
    """Join the first `limit` values and count the rest: "a, b, c, d and 3 more"."""
    texts = [str(value) for value in values]
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return separator.join(texts[:limit]) + more


def closing_lines(result: str, *next_words: str) -> list[str]:
    """Return the lines that end a command: its result with its place, and the command that goes
    on from there.
    """
    return [f"done: {result}", f"next: {shlex.join(next_words)}"]


def describe_counts(counts: Mapping[str, int]) -> str:
    """Return what was counted in words: "9 read, 8 dropped (too short)"; zeros are left out."""
    parts = []
    for key, count in counts.items():
        reason = key.removeprefix("drop_").replace("_", " ")
        what = f"dropped ({reason})" if key.startswith("drop_") else reason
        parts += [f"{count:,} {what}"] * bool(count)
    return ", ".join(parts) or "nothing"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean X?)" for the known word that is most like an unknown one; "" where
    none is.
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def print_table(rows: list[tuple[str, str]]) -> None:
    """Print rows of (label, value) in two aligned columns."""
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:<{width}}  {value}")


def describe_os_error(error: OSError) -> str:
    """Return the message of an OSError without its number and path; of shutil.Error the first of
    its errors.
    """
    if error.errno is None and error.args and isinstance(error.args[0], list) and error.args[0]:
        *_, target, reason = error.args[0][0]
        return f"{target}: {str(reason).removeprefix('[Errno ').partition('] ')[2] or reason}"
    return error.strerror or str(error) or type(error).__name__


def explain_os_error(error: OSError) -> str:
    """Return the message of an OSError with its path, and what to do where a disk is full or
    access is refused.
    """
    path = error.filename
    text = (
        describe_os_error(error)
        if path is None
        else f"{os.fsdecode(path)}: {describe_os_error(error)}"
    )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        text += "; free some space and run the same command again"
    if isinstance(error, PermissionError):
        text += f"; {ACCESS_FIX}"
    return text


def format_duration(seconds: float) -> str:
    """Format seconds: 75 -> 1m15s, 4000 -> 1h06m, 200000 -> 2d07h."""
    total = max(0, round(seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"


def fold(text: str, width: int, indent: str = "") -> str:
    """Wrap every line at spaces to `width` columns, continuation lines indented; longer words are
    not broken.
    """
    import textwrap  # imported here to keep the start-up of the CLI short

    lines: list[str] = []
    for line in text.splitlines():
        lead = line[: len(line) - len(line.lstrip())] + indent
        lines += textwrap.wrap(
            line, width, subsequent_indent=lead, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(lines) + "\n" * text.endswith("\n")


def for_screen(text: str, stream: IO[str], indent: str = "  ") -> str:
    """Wrap text to the width of a terminal; return it unchanged for a pipe or a file."""
    import shutil

    if not is_terminal(stream):
        return text
    return fold(text, shutil.get_terminal_size().columns, indent)


def format_bytes(count: float) -> str:
    """Format a number of bytes: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def first_line(error: BaseException) -> str:
    """Return the type and first line of an exception, for a one-line message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def count_noun(number: int, noun: str) -> str:
    """Format a count: "1 text", "2 texts"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def printable(text: str) -> str:
    r"""Return text, for instance a name of a file, with what no screen or UTF-8 file can hold
    escaped.

    A byte that is not UTF-8 becomes \udc80 to \udcff, a control character such as \x1b.
    """
    escaped = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(
        c if c.isprintable() or c in "\n\t" or ord(c) > 0x9F else f"\\x{ord(c):02x}"
        for c in escaped
    )


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can hold a text: lone surrogates stand for other bytes, or come from broken
    escapes.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
