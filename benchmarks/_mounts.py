"""Mounts that one rank alone sees: on one machine it then has the disk of another host."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_CLONE_NEWNS = 0x20000
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 32, 4096, 0x4000, 0x40000
_DETACH = 2


def own_namespace() -> None:
    """From now on mounts of this thread, and of threads that it starts, are seen by them alone.

    Raises:
        OSError: it takes root.
    """
    _call("unshare", _CLONE_NEWNS)
    _call("mount", b"none", b"/", None, _RECURSIVE | _PRIVATE, None)


def is_allowed() -> bool:
    """Whether this user may mount; tried in a child."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            own_namespace()
            code = 0
        os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def read_only(folder: Path) -> None:
    """Make a folder read-only, as a mount the kernel has found damaged; `unmount` undoes it."""
    path = os.fsencode(folder)
    _call("mount", path, path, None, _BIND, None)
    _call("mount", b"none", path, None, _REMOUNT | _BIND | _READ_ONLY, None)


def small_disk(folder: Path, num_bytes: int) -> None:
    """Put an empty disk of so many bytes there."""
    _call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={num_bytes}".encode())


def unmount(folder: Path) -> None:
    _call("umount2", os.fsencode(folder), _DETACH)


def _call(name: str, *arguments) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
