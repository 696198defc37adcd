"""What several rooms need: outputs that are tried before the work begins, JSON files that somebody else may have
written, and the signals that ask to stop."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_os_error


def check_writable_dir(path: str | os.PathLike, option: str) -> Path:
    """Makes sure that a folder can be made and written to, with a file that vanishes; leaves no trace.

    Args:
        option: what named it, for the error.

    Raises:
        UserError: it cannot be made, is no folder, or cannot be written to.
    """
    try:
        _probe_write(Path(path))
    except OSError as error:
        raise _cannot_write(path, option, error) from error
    return Path(path)


def check_writable_file(path: str | os.PathLike, option: str) -> Path:
    """Makes sure that a file can be written, in a folder that is yet to be made or is there; leaves no trace.

    Raises:
        UserError: it cannot.
    """
    path = Path(path)
    try:
        _probe_write(path.parent)
        if path.exists() and not path.is_file():  # --json replaces what is there: no device, pipe or folder
            found = "a folder" if path.is_dir() else "something that is no file"
            raise UserError(f"a file to write for {option}", f"{path}: {found}", "give the path of a file")
        if path.exists():
            open(path, "ab").close()
    except OSError as error:
        raise _cannot_write(path, option, error) from error
    return path


def _probe_write(folder: Path) -> None:
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
    return UserError(f"{option} where it can be written", f"{path}: {describe_os_error(error)}", "give another path")
