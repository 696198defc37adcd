"""Files and folders that are either complete or absent: written under another name, synced, then
renamed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmldlm.utils.input_files import open_regular, require_regular_or_none
from mmldlm.utils.json_files import to_json

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def fsync_path(path: Path) -> None:
    """Flush a file or a folder to the disk; ignore EINVAL, with which some network file systems
    refuse folders.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def write_text_synced(path: Path, text: str) -> None:
    """Write a text file and flush it to the disk; for a file that is not visible under its final
    name yet.
    """
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def naming_errors(path: str | os.PathLike) -> Iterator[None]:
    """Give an error of a disk that names no file this one: a failed write() knows its descriptor
    only.

    Other OSErrors, such as those of a network, stay as they are.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None and re.fullmatch(r"\d+ requested and \d+ written", str(error)):
            # Of numpy, which has no number for it: nearly always a full disk.
            raise OSError(errno.ENOSPC, str(error), os.fspath(path)) from error
        if error.filename is None and error.errno in _DISK_ERRORS:
            error.filename = os.fspath(path)
        raise


def write_bytes(path: str | os.PathLike, content: bytes) -> None:
    """Write a file atomically."""
    with atomic_file(path) as file:
        file.write(content)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a text file atomically, in UTF-8.

    A lone surrogate, which stands for a byte of a file name that is not UTF-8, is escaped: in JSON
    it stays the same.
    """
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_json(path: str | os.PathLike, value: Any, indent: int = 1) -> None:
    """Write a value as strict JSON atomically; see `to_json`."""
    write_text(path, to_json(value, indent) + "\n")


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[io.BufferedWriter]:
    """Open a file for writing that is synced and appears under its name at the end of the block.

    A link is kept: the file that it leads to is replaced.

    Raises:
        NotRegularFileError: a FIFO, socket or device has this name.
        OSError: it names this file, also where a write failed.
    """
    require_regular_or_none(path)
    target = Path(os.path.realpath(path))
    partial = _partial_path(target)
    try:
        with naming_errors(path), open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Make a folder to fill; at the end of the block its files are synced and it appears under its
    name.

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
    suffix = f".{os.uname().nodename}-{os.getpid()}"
    longest = 254 - len(os.fsencode(suffix))  # a name has at most 255 bytes
    name = os.fsdecode(os.fsencode(path.name)[:longest])
    return path.with_name(f".{name}{suffix}")


def list_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Map the relative name of every file below a folder to its `bytes` and `sha256`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": sha256_of(path),
        }
        for path in files
    }
