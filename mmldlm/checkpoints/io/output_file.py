"""A new file of known size, written at any position by several threads."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from mmldlm.checkpoints.io.open_files import open_descriptor

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class OutputFile:
    """Create `path`, which must not exist, with space reserved for `size` bytes.

    Args:
        path: the new file.
        size: its number of bytes; every byte must be written.
        fsync: flush the file to the disk in finish().

    Raises:
        OSError: the file exists, or the disk has no space for all of it.
    """

    def __init__(self, path: Path, size: int, fsync: bool = True):
        self._fsync = fsync
        self._fd = open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            preallocate(self._fd, size)
        except BaseException:
            self.close()
            raise

    def write(self, data: bytes | memoryview, position: int) -> None:
        """Write bytes at `position`. Thread-safe for disjoint ranges."""
        view = memoryview(data)
        while view:
            count = os.pwrite(self._fd, view, position)
            view, position = view[count:], position + count

    def finish(self) -> None:
        """Flush to the disk, if requested, and close."""
        if self._fsync:
            os.fsync(self._fd)
        self.close()

    def close(self) -> None:
        """Close the descriptor; without finish() the file may be incomplete."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def preallocate(fd: int, size: int) -> None:
    """Reserve the space of a new file; make a sparse file where the file system cannot reserve.

    Raises:
        OSError: the disk has no space for it.
    """
    try:
        os.posix_fallocate(fd, 0, size)
    except (AttributeError, OSError) as error:
        if getattr(error, "errno", None) in _NO_SPACE:
            raise
        os.truncate(fd, size)
