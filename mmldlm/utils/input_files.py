"""Open files that others wrote: regular files only, in bounded memory.

A FIFO in place of a file waits for a writer for ever, a device may never end.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from typing import BinaryIO, TextIO

from mmldlm.errors import UserError

MAX_BYTES = 64 << 20
"""Default limit of `read_bytes` and `read_text`: far above any config, manifest or log that is
read whole.
"""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}


class NotRegularFileError(UserError, OSError):
    """A FIFO, socket or device stands where a file is read or written: a user's error that is an
    OSError as well.
    """

    def __init__(self, path: str | os.PathLike, kind: str):
        super().__init__(
            f"a regular file at {os.fspath(path)}", kind, "put a file there, or name another path"
        )
        self.errno, self.strerror, self.filename = (
            errno.EINVAL,
            f"{kind}, not a regular file",
            os.fspath(path),
        )

    def __str__(self) -> str:
        return self.args[0]


def require_regular(path: str | os.PathLike) -> None:
    """Check that a path leads to a regular file, for libraries that open it themselves.

    Raises:
        NotRegularFileError: a FIFO, socket or device.
        OSError: nothing there, or a folder.
    """
    check_kind(path, os.stat(path).st_mode)


def require_regular_or_none(path: str | os.PathLike) -> None:
    """Check that a path is free, or leads to a regular file or a folder; before it is written."""
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        require_regular(path)


def kind_of_file(mode: int) -> str | None:
    """Return what a path with this mode is, if it is not a regular file: "a folder", "a
    FIFO", ...
    """
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "another kind of file")


def check_kind(path: str | os.PathLike, mode: int) -> None:
    """Check that the mode of an opened path is that of a regular file.

    Raises:
        OSError: as of `require_regular`.
    """
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if (kind := kind_of_file(mode)) is not None:
        raise NotRegularFileError(path, kind)


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        NotRegularFileError: a FIFO, socket or device.
        OSError: not readable, or a folder.
    """
    require_regular(path)  # opening a device may have effects of its own
    # Another kind may have taken its place meanwhile: O_NONBLOCK waits for no writer.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    try:
        check_kind(path, os.fstat(file.fileno()).st_mode)
    except OSError:
        file.close()
        raise
    return file


def open_text(path: str | os.PathLike, encoding: str = "utf-8", errors: str = "strict") -> TextIO:
    """Open a regular file for reading as text.

    Raises:
        OSError: as of `open_regular`.
    """
    return io.TextIOWrapper(open_regular(path), encoding=encoding, errors=errors)


def open_append(path: str | os.PathLike) -> TextIO:
    """Open a text file for appending, or create it; characters that UTF-8 cannot hold are escaped.

    Raises:
        OSError: as of `open_regular`.
    """
    with contextlib.suppress(FileNotFoundError):
        require_regular(path)
    return open(path, "a", encoding="utf-8", errors="backslashreplace")


def read_bytes(path: str | os.PathLike, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: as of `open_regular`, or the file is larger than `max_bytes`.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes:,} bytes", os.fspath(path))
    return content


def read_text(
    path: str | os.PathLike,
    max_bytes: int = MAX_BYTES,
    encoding: str = "utf-8",
    errors: str = "strict",
) -> str:
    """Return the text of a regular file, with the line ends of a text file.

    Raises:
        OSError: as of `read_bytes`.
        UnicodeDecodeError: not text in this encoding.
    """
    content = read_bytes(path, max_bytes)
    return io.TextIOWrapper(io.BytesIO(content), encoding=encoding, errors=errors).read()
