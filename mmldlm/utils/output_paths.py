"""What several rooms need: outputs that are tried before the work begins, JSON files that somebody else may have
written, and the signals that ask to stop."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn, TextIO

from mmldlm.errors import UserError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What asks a process to stop; SIGUSR1 is Slurm's warning."""


def interrupt_on_stop_signals() -> None:
    """Let every stop signal do what Ctrl-C does: raise KeyboardInterrupt, so that partial outputs are removed.

    A signal that the process was started to ignore (nohup, a shell's background job) stays ignored.
    """

    def interrupt(number, frame) -> NoReturn:
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        for name in STOP_SIGNALS:
            if signal.getsignal(name) is not signal.SIG_IGN:
                signal.signal(name, interrupt)


def open_standard_streams() -> None:
    """Put /dev/null where the shell has closed stdin, stdout or stderr (`>&-`, cron, daemons); call it first of all.

    Python has None there, on which libraries fail, and the next file that is opened would get the number.
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


def usable_folder(path: str | os.PathLike, option: str) -> Path:
    """Makes sure that a folder can be made and written to, with a file that vanishes; leaves no trace.

    Args:
        option: what named it, for the error.

    Raises:
        UserError: it cannot be made, is no folder, or cannot be written to.
    """
    try:
        _try(Path(path))
    except OSError as error:
        raise _cannot_write(path, option, error) from error
    return Path(path)


def usable_file(path: str | os.PathLike, option: str) -> Path:
    """Makes sure that a file can be written, in a folder that is yet to be made or is there; leaves no trace.

    Raises:
        UserError: it cannot.
    """
    path = Path(path)
    try:
        _try(path.parent)
        if path.exists() and not path.is_file():  # --json replaces what is there: no device, pipe or folder
            found = "a folder" if path.is_dir() else "something that is no file"
            raise UserError(f"a file to write for {option}", f"{path}: {found}", "give the path of a file")
        if path.exists():
            open(path, "ab").close()
    except OSError as error:
        raise _cannot_write(path, option, error) from error
    return path


def _try(folder: Path) -> None:
    import tempfile  # only here: `mmldlm convert` counts its start in milliseconds

    made = [part for part in (folder, *folder.parents) if not part.exists()]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:  # "File exists" is what the system says of a file where the folder should be
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from error
        # Permission bits do not tell: root may do anything, and yet nothing on /proc or a read-only disk.
        with tempfile.TemporaryFile(dir=folder):
            pass
    finally:
        for part in made:  # the work may still fail over its input, and then leaves nothing
            with contextlib.suppress(OSError):
                part.rmdir()


def _cannot_write(path: str | os.PathLike, option: str, error: OSError) -> UserError:
    return UserError(f"{option} where it can be written", f"{path}: {reason(error)}", "give another path")


def reason(error: OSError) -> str:
    """What the system said, without the number and the path."""
    return error.strerror or str(error) or type(error).__name__


def format_duration(seconds: float) -> str:
    """75 -> 1m15s, 4000 -> 1h06m, 200000 -> 2d07h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def fold(text: str, width: int, indent: str = "") -> str:
    """Break every line at spaces to `width` columns, with `indent` before what follows; a longer word stays whole."""
    import textwrap  # only here: see _try

    lines: list[str] = []
    for line in text.splitlines():
        lead = line[: len(line) - len(line.lstrip())] + indent
        whole_words = {"break_long_words": False, "break_on_hyphens": False}
        lines += textwrap.wrap(line, width, subsequent_indent=lead, **whole_words) or [""]
    return "\n".join(lines)


def for_screen(text: str, stream: TextIO, indent: str = "  ") -> str:
    """The text as it is for a pipe or a file (one line stays one line), folded to its width for a terminal."""
    import shutil

    try:
        return fold(text, shutil.get_terminal_size().columns, indent) if stream.isatty() else text
    except (AttributeError, ValueError):  # no stream, or a closed one
        return text


def read_json(path: Path, fix: str, max_bytes: int = 64 << 20) -> dict[str, Any]:
    """The object in a JSON file, of which nothing is believed yet.

    Args:
        fix: what the error advises. max_bytes: a larger file is not parsed.

    Raises:
        UserError: not readable, too large, not JSON, nested too deep, or not an object.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(max_bytes + 1)
        if len(raw) > max_bytes:
            raise ValueError(f"more than {max_bytes:,} bytes")
        value = json.loads(raw)
        if not isinstance(value, dict):
            raise ValueError(f"a JSON {type(value).__name__}")
    except OSError as error:
        raise UserError(f"a JSON object in {path}", reason(error), fix) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"a JSON object in {path}", f"damaged file: {str(error)[:200]}", fix) from error
    return value
