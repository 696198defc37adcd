"""Open files beyond the soft limit of the process."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path


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
