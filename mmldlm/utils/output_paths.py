"""Check that outputs are writable before starting long work."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path

from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_os_error


def output_root(path: str | os.PathLike) -> Path:
    """Return the absolute path of an output folder behind all links.

    Work beside it is then on the disk of the folder itself, and the rename at the end does not meet a link.
    """
    return Path(os.path.realpath(path))


def check_writable_dir(path: str | os.PathLike, option: str) -> Path:
    """Check, with a temporary file, that a folder can be created and written to; leave nothing behind.

    Args:
        path: the folder.
        option: the option that named it, for the error.

    Raises:
        UserError: it cannot be created, is not a folder, or cannot be written to.
    """
    try:
        _probe_write(Path(path))
    except OSError as error:
        raise _cannot_write(path, option, error) from error
    return Path(path)


def check_writable_file(path: str | os.PathLike, option: str) -> Path:
    """Check that a file can be written, in a folder that may not exist yet; leave nothing behind.

    Raises:
        UserError: it cannot be written, or the path is not a regular file.
    """
    path = Path(path)
    try:
        _probe_write(path.parent)
        if path.exists() and not path.is_file():  # the output replaces the path: not a device, pipe or folder
            found = "a folder" if path.is_dir() else "not a regular file"
            raise UserError(f"a file to write for {option}", f"{path}: {found}", "give the path of a file")
        if path.exists():
            open(path, "ab").close()
    except OSError as error:
        raise _cannot_write(path, option, error) from error
    return path


def _probe_write(folder: Path) -> None:
    created = [part for part in (folder, *folder.parents) if not part.exists()]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:  # the system's "File exists" would not say that a folder was needed
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from error
        # Permission bits are not enough: root passes them, but cannot write to /proc or a read-only disk.
        with tempfile.TemporaryFile(dir=folder):
            pass
    finally:
        for part in created:  # the work may still fail on its input, and must then leave nothing
            with contextlib.suppress(OSError):
                part.rmdir()


def _cannot_write(path: str | os.PathLike, option: str, error: OSError) -> UserError:
    return UserError(f"a writable path for {option}", f"{path}: {describe_os_error(error)}", "give another path")
