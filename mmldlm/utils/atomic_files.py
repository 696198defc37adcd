"""Files and folders that are either complete or absent: written under another name, synced, then renamed.

Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, without waiting for a FIFO.

    Raises:
        OSError: the file is not readable, or is a FIFO, socket or device.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def fsync_path(path: Path) -> None:
    """Flush a file or a folder to the disk; ignore EINVAL, with which some network file systems refuse folders."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def write_text_synced(path: Path, text: str) -> None:
    """Write a text file and flush it to the disk; for a file that is not visible under its final name yet."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    with atomic_file(path) as file:
        file.write(content)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON atomically."""
    write_bytes(path, json.dumps(value, indent=1).encode())


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[io.BufferedWriter]:
    """Open a file for writing that is synced and appears under its name at the end of the block."""
    partial = _partial_path(path)
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Make a folder to fill; at the end of the block its files are synced and it appears under its name.

    A folder of that name that appeared in the meantime is kept instead.
    """
    partial = _partial_path(path)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in sorted(partial.rglob("*")):
            fsync_path(file)
        fsync_path(partial)
        if path.exists():  # an orphan of a killed launch was faster: it wrote the same
            shutil.rmtree(partial)
        else:
            partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _partial_path(path: Path) -> Path:
    """Return a hidden name in the same folder, different for every process of every host."""
    return path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}")


def list_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Map the relative name of every file below a folder to its `bytes` and `sha256`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in files
    }
