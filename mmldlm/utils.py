"""What several rooms need: outputs that are tried before the work begins, and the signals that ask to stop."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from pathlib import Path
from typing import NoReturn

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
