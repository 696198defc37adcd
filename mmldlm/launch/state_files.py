"""Small files of a launch on one node: the launch file for its ranks, and the state of each rank.

The folders are fixed and named by the launch id. No path depends on TMPDIR, which may differ
between a batch job and an ssh session, and no path contains text of the user. The node agent
creates the folders; rank_wrapper.py only writes.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

from mmldlm.errors import UserError
from mmldlm.utils.json_files import read_json_value

# Several folders, because one may be full, or private to the mount namespace of a batch job.
ROOTS = ("/tmp", "/dev/shm", "/var/tmp")
# Of a rank's state and of its report of failed ranks.
MAX_BYTES = 1 << 14


def state_folders(launch_id: str) -> list[Path]:
    """Return the existing folders of a launch on this node that belong to this user."""
    folders = []
    for root in ROOTS:
        folder = Path(root) / f"mmldlm_{launch_id}"
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                folders.append(folder)
    return folders


def make_folders(launch_id: str) -> None:
    """Create the folders of a launch where possible."""
    for root in ROOTS:
        with contextlib.suppress(OSError):
            os.mkdir(Path(root) / f"mmldlm_{launch_id}", mode=0o700)


def write(folder: Path, name: str, text: str) -> None:
    """Write a file atomically, readable by this user alone (utils/atomic_files keeps the umask,
    and syncs).

    Raises:
        OSError: the folder is full or missing; no partial file is left.
    """
    partial = folder / f".{name}_{os.getpid()}"
    try:
        with open(
            os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8"
        ) as file:
            file.write(text)
        os.replace(partial, folder / name)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write_anywhere(launch_id: str, name: str, text: str) -> bool:
    """Write a file into the first folder with space; return whether one has any.

    Never raises OSError: a rank must not end because of it.
    """
    for folder in state_folders(launch_id):
        with contextlib.suppress(OSError):
            write(folder, name, text)
            return True
    return False


def read_newest(launch_id: str, pattern: str) -> dict[str, Any]:
    """Return name -> parsed content of the newest readable file of each name."""
    newest: dict[str, tuple[int, Any]] = {}
    for folder in state_folders(launch_id):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError, UserError):
                entry = (path.stat().st_mtime_ns, read_json_value(path, ""))
                if path.name not in newest or newest[path.name][0] < entry[0]:
                    newest[path.name] = entry
    return {name: content for name, (_, content) in sorted(newest.items())}


def remove(launch_id: str, pattern: str) -> None:
    """Delete files of a launch from all of its folders."""
    for folder in state_folders(launch_id):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):
                path.unlink()


def remove_folders(launch_id: str) -> None:
    """Delete the empty folders of a launch (hosts may share one)."""
    for folder in state_folders(launch_id):
        with contextlib.suppress(OSError):
            folder.rmdir()
