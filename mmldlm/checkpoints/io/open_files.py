"""Open the files of checkpoints: regular files alone, and beyond the soft limit of open files.

What is read as a whole (manifests, indexes, configs) is opened by utils/input_files.
"""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from mmldlm.utils.input_files import check_kind, require_regular


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
        OSError: as of `utils.input_files.open_regular`.
    """
    require_regular(path)  # before opening, which may act on a device
    fd = open_descriptor(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        check_kind(path, os.fstat(fd).st_mode)  # again: it may have been replaced
    except OSError:
        os.close(fd)
        raise
    return fd
