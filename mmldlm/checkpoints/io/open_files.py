"""Open the files of checkpoints: regular files alone, and beyond the soft limit of open files.

Every reader in mmldlm/checkpoints opens through this module: a FIFO in place of a file would otherwise be waited for
without end, and a device read without end.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
from pathlib import Path

MAX_SMALL_BYTES = 64 << 20  # of a file that is read as a whole: a manifest, an index, a config


def open_descriptor(path: Path, flags: int, mode: int = 0o644) -> int:
    """Open a file; raise the soft limit of open files to the hard limit if it is reached.

    A checkpoint of many ranks has more files than the usual soft limit of 1024.

    Raises:
        OSError: the file cannot be opened, or the hard limit is reached.
    """
    try:
        return os.open(path, flags, mode)
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.EMFILE or soft == hard:
            raise
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return os.open(path, flags, mode)


def open_regular_descriptor(path: Path) -> int:
    """Open a regular file for reading, without waiting for anything.

    Raises:
        OSError: it cannot be opened, or is a folder, FIFO, socket or device; `strerror` says which.
    """
    kind = kind_of_file(os.stat(path).st_mode)  # before opening, which may act on a device
    if kind is None:
        fd = open_descriptor(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        kind = kind_of_file(os.fstat(fd).st_mode)  # again: it may have been replaced
        if kind is None:
            return fd
        os.close(fd)
    raise OSError(errno.EINVAL, f"{kind} in place of a regular file", str(path))


def read_small_file(path: Path, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
    """Return the bytes of a regular file that is expected to be small.

    Raises:
        OSError: as open_regular_descriptor, or it has more than `max_bytes`.
    """
    with open(open_regular_descriptor(path), "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes:,} bytes", str(path))
    return data


def kind_of_file(mode: int) -> str | None:
    """Return what a path with this mode is, if it is not a regular file: "a folder", "a FIFO", ..."""
    if stat.S_ISREG(mode):
        return None
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFLNK: "a link",
    }
    return kinds.get(stat.S_IFMT(mode), "a special file")
