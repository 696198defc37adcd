"""Files and folders that others wrote: regular files only, in bounded memory.

A FIFO in place of a file waits for a writer for ever, and a device may never end.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_os_error

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
    require_regular(path)
    return open(path, "rb")


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
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"more than {max_bytes:,} bytes", os.fspath(path))
        return file.read()


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


_POINTER = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(path: Path) -> None:
    """Refuse a pointer of Git LFS, which stands where a clone without git-lfs has not fetched the
    file.

    Raises:
        UserError: the file is such a pointer.
    """
    with open_regular(path) as file:
        if file.read(len(_POINTER)) == _POINTER:
            fix = "install git-lfs and run git lfs pull in that clone"
            raise UserError(
                f"the content of {path}", "a pointer of Git LFS, not the file itself", fix
            )


MACOS = "files of macOS"
DANGLING = "links to nothing"
READ_ALREADY = "folders reached twice"
NOT_REGULAR = "FIFOs, sockets and devices"
OTHER_KIND = "files of another kind"
_NUM_NAMED = 3


@dataclass
class LeftOut:
    """Files that are not read: their number and the first names, by reason."""

    counts: Counter = field(default_factory=Counter)
    names: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, name: object) -> None:
        """Count one file."""
        self.counts[reason] += 1
        named = self.names.setdefault(reason, [])
        if len(named) < _NUM_NAMED:
            named.append(str(name))

    def update(self, others: Iterable[LeftOut]) -> LeftOut:
        """Add the files that others have left out; return this object."""
        for other in others:
            self.counts.update(other.counts)
            for reason, names in other.names.items():
                own = self.names.setdefault(reason, [])
                own += names[: _NUM_NAMED - len(own)]
        return self

    def entry(self) -> dict[str, Any]:
        """Return the manifest's entry: reason -> number and some names; empty if everything was
        read.
        """
        found = {
            r: {"number": n, "such_as": self.names[r]} for r, n in sorted(self.counts.items())
        }
        return {"not_read": found} if found else {}

    def describe(self) -> str:
        """Format them for a message: "files of another kind 2 (a.md, b.md)"."""
        return "; ".join(
            f"{reason} {count} ({', '.join(self.names[reason])})"
            for reason, count in sorted(self.counts.items())
        )


def is_of_macos(name: str) -> bool:
    """Whether a path is one that macOS adds to folders and archives: AppleDouble, Finder's files,
    __MACOSX.
    """
    parts = name.split("/")
    return "__MACOSX" in parts or parts[-1].startswith("._") or parts[-1] == ".DS_Store"


def walk_files(folder: Path, left_out: LeftOut | None = None) -> list[Path]:
    """Return the regular files below a folder and below the folders that links in it name, sorted
    by path.

    A folder that is reached twice, such as by a link to its parent, is read once, under its own
    name.

    Args:
        left_out: List that receives what is not returned: links to nothing, files of macOS, FIFOs.

    Raises:
        UserError: a folder cannot be read.
    """
    left_out = LeftOut() if left_out is None else left_out
    files: list[Path] = []
    seen: set[tuple[int, int]] = set()
    folders: deque[Path] = deque([folder])
    linked: deque[Path] = deque()
    while folders or linked:
        # Links last, so that a folder is found under its own name.
        current = (folders or linked).popleft()
        try:
            state = os.stat(current)
            if (state.st_dev, state.st_ino) in seen:
                left_out.add(READ_ALREADY, current.relative_to(folder))
                continue
            seen.add((state.st_dev, state.st_ino))
            with os.scandir(current) as entries:
                found = sorted((entry.name, entry.is_symlink()) for entry in entries)
        except OSError as error:
            raise UserError(
                f"a readable folder {current}", describe_os_error(error), "check its permissions"
            ) from None
        for name, is_link in found:
            path = current / name
            if is_of_macos(name):
                left_out.add(MACOS, path.relative_to(folder))
            elif path.is_dir():
                (linked if is_link else folders).append(path)
            elif path.is_file():
                files.append(path)
            else:
                left_out.add(NOT_REGULAR if path.exists() else DANGLING, path.relative_to(folder))
    return sorted(files)
