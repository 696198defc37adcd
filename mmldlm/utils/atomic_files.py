"""Files that exist wholly or not at all: written beside, synced, renamed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import stat
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mmldlm.errors import MmldlmError


def open_regular(path: Path) -> BinaryIO:
    """A regular file opened for reading.

    Raises:
        OSError: not to be read, or a FIFO, socket or device, which is not waited for.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, as hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Force a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    """Write a whole file at once, or nothing."""
    with whole_file(path) as file:
        file.write(content)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, wholly or not at all."""
    write_bytes(path, json.dumps(value, indent=1).encode())


def write_npz(path: Path, **arrays: np.ndarray) -> None:
    """Write arrays as an uncompressed .npz (its CRCs are checked when it is read), wholly or not at all."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_bytes(path, buffer.getvalue())


def read_npz(path: Path, *names: str) -> dict[str, np.ndarray]:
    """What write_npz wrote (or some arrays of it), every byte that is read checked.

    Raises:
        MmldlmError: the file is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in names or file.files}
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise MmldlmError(f"{path} is damaged ({error}): delete it and start again, it will be made anew") from error


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[io.BufferedWriter]:
    """A file to write that takes its name only at the end of the block, synced."""
    partial = path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}")
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
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill that takes its name only at the end of the block, everything in it synced."""
    partial = path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in sorted(partial.rglob("*")):
            sync(file)
        sync(partial)
        if path.exists():  # an orphan of a killed launch was faster: it wrote the same
            shutil.rmtree(partial)
        else:
            partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


class NpyWriter:
    """A .npy file written block by block: memory of one block, any number of rows.

    Args:
        path: the file. dtype: of its items. row: shape of a row; none for one dimension.
    """

    def __init__(self, path: Path, dtype, row: Sequence[int] = ()):
        self.dtype, self.row, self.num_rows = np.dtype(dtype), tuple(row), 0
        self._file = open(path, "w+b")
        self._file.write(self._header())

    def _header(self) -> bytes:
        shape = (self.num_rows, *self.row)
        buffer = io.BytesIO()
        # numpy leaves room for the largest count, so that the header's length does not depend on it
        np.lib.format.write_array_header_1_0(buffer, {"descr": self.dtype.str, "fortran_order": False, "shape": shape})
        return buffer.getvalue()

    def append(self, block: np.ndarray) -> None:
        """Add the items (or rows) of a block."""
        block = np.ascontiguousarray(block, dtype=self.dtype)
        assert block.shape[1:] == self.row
        self._file.write(block.tobytes())
        self.num_rows += len(block)

    def close(self) -> None:
        """Write the number of rows and force everything to the disk."""
        start = self._header()
        self._file.seek(0)
        assert len(self._file.read(len(start))) == len(start)
        self._file.seek(0)
        self._file.write(start)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def list_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Relative name -> {bytes, sha256} of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in files
    }
