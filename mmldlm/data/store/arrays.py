"""Reading .npy and .npz files of which nothing is believed: what a header says is compared with the file's size."""

from __future__ import annotations

import io
import math
import os
import zipfile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mmldlm.utils.atomic_files import open_regular

MAX_NPZ_BYTES = 64 << 20  # of one array, unpacked: the tokens of one sample


class UnreadableArrayError(ValueError):
    """A file that does not hold the array that it promises."""


def read_array(path: Path) -> np.ndarray:
    """The array in a .npy file. Objects are never unpickled.

    Raises:
        UnreadableArrayError: not .npy, or of another size than its header says. OSError: not a regular file.
    """
    with open_regular(path) as file:
        _read_header(file, os.fstat(file.fileno()).st_size)
        file.seek(0)
        return _load(file)


def map_array(path: Path) -> np.ndarray:
    """A memory map of a .npy file, as a plain array: slicing numpy's own class costs several times as much.

    Raises:
        UnreadableArrayError, OSError: as for `read_array`.
    """
    with open_regular(path) as file:
        _read_header(file, os.fstat(file.fileno()).st_size)
    return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)


def read_small_npz(path: Path, *names: str) -> list[np.ndarray]:
    """Some arrays of a small .npz file.

    Raises:
        UnreadableArrayError: not .npz, an array missing, damaged or too large. OSError: not a regular file.
    """
    with open_regular(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                return [_from_zip(archive, f"{name}.npy") for name in names]
        except (zipfile.BadZipFile, KeyError, NotImplementedError, RuntimeError, EOFError) as error:
            raise UnreadableArrayError(f"not a .npz file with {', '.join(names)}: {error}") from error


def _from_zip(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    if archive.getinfo(name).file_size > MAX_NPZ_BYTES:
        raise UnreadableArrayError(f"{name} of {archive.getinfo(name).file_size} bytes")
    content = archive.read(name)
    _read_header(io.BytesIO(content), len(content))
    return _load(io.BytesIO(content))


def _read_header(file: BinaryIO, size: int) -> None:
    """Compares a header's shape and dtype with the file's size."""
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, _, dtype = read(file)
    except (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError, EOFError) as error:
        raise UnreadableArrayError(f"not a .npy file: {str(error)[:100]}") from error
    if dtype.hasobject:
        raise UnreadableArrayError("Python objects, which are never read")
    expected = file.tell() + math.prod(shape) * dtype.itemsize
    is_absurd = any(not 0 <= count < 1 << 48 for count in shape)  # beside a 0 no product shows it
    if is_absurd or expected != size:
        raise UnreadableArrayError(f"{size} bytes where its header, {dtype} {list(shape)}, asks for {expected}")


def _load(file: BinaryIO) -> np.ndarray:
    try:
        return np.lib.format.read_array(file, allow_pickle=False)
    except (OverflowError, MemoryError) as error:  # no bytes of an absurd shape
        raise UnreadableArrayError(str(error)[:100]) from error
