"""Small files of a launch on one node: what its ranks are to do (launch file), and how they stand.

They lie in fixed folders named by the launch's id: no path depends on TMPDIR, which a batch job and an ssh session may
set differently, and none holds text of the user's, which a launcher would hand to a shell. The node's agent makes the
folders; rank.py writes only where it finds one.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

# More than one, because any of them may be full, or private to a batch job's own mount namespace.
ROOTS = ("/tmp", "/dev/shm", "/var/tmp")
RESERVED = 1 << 14  # bytes of each state file: its blocks are there to be overwritten when the disk is full


def state_folders(launch: str) -> list[Path]:
    """Folders of a launch on this node that exist and belong to this user alone."""
    found = []
    for root in ROOTS:
        folder = Path(root) / f"mmldlm_{launch}"
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                found.append(folder)
    return found


def make_folders(launch: str) -> None:
    """Make the folders of a launch, wherever that is possible."""
    for root in ROOTS:
        with contextlib.suppress(OSError):
            os.mkdir(Path(root) / f"mmldlm_{launch}", mode=0o700)


def write(folder: Path, name: str, text: str) -> None:
    """Write a file that only its user can read, atomically.

    Raises:
        OSError: the folder is full, or gone; nothing is left of the file then.
    """
    beside = folder / f".{name}_{os.getpid()}"
    try:
        with open(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(text)
        os.replace(beside, folder / name)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def write_anywhere(launch: str, name: str, text: str) -> bool:
    """Write a file into the first folder that takes it, or over the blocks of its older self where none does.

    Args:
        text: JSON of at most RESERVED bytes.

    Returns:
        Whether it was written. Never raises OSError: a rank must not end because of it.
    """
    text = text.ljust(RESERVED)
    folders = state_folders(launch)
    for folder in folders:
        with contextlib.suppress(OSError):
            write(folder, name, text)
            return True
    for folder in folders:
        with contextlib.suppress(OSError), open(folder / name, "r+") as file:
            file.write(text)
            return True
    return False


def read_newest(launch: str, pattern: str) -> dict[str, Any]:
    """Name -> parsed content of the newest file of that name, of those that can be read."""
    found: dict[str, tuple[int, Any]] = {}
    for folder in state_folders(launch):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError, ValueError):
                entry = (path.stat().st_mtime_ns, json.loads(path.read_text()))
                if path.name not in found or found[path.name][0] < entry[0]:
                    found[path.name] = entry
    return {name: content for name, (_, content) in sorted(found.items())}


def remove(launch: str, pattern: str) -> None:
    """Delete files of a launch from all of its folders."""
    for folder in state_folders(launch):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):
                path.unlink()


def remove_folders(launch: str) -> None:
    """Delete the folders that are empty (hosts may share one)."""
    for folder in state_folders(launch):
        with contextlib.suppress(OSError):
            folder.rmdir()
