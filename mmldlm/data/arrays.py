"""Read and write .npy and .npz files.

Readers of foreign files trust nothing: the header is compared with the size of the file, and
objects are never unpickled.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from tokenize import TokenError
from typing import IO

import numpy as np
from numpy.typing import DTypeLike

from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import write_bytes
from mmldlm.utils.formatting import join_some, printable
from mmldlm.utils.input_files import NotRegularFileError, open_regular
from mmldlm.utils.resources import require_memory

# What zipfile raises for damaged archives, and for those of other programs.
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    KeyError,
    NotImplementedError,
    RuntimeError,
    EOFError,
)


class UnreadableArrayError(ValueError):
    """The file does not hold the array that its header promises."""


def read_array(path: Path) -> np.ndarray:
    """Read a .npy file.

    Raises:
        UnreadableArrayError: not a .npy file, or its size contradicts its header.
        OSError: not a regular file.
    """
    with open_regular(path) as file:
        return _load(file, os.fstat(file.fileno()).st_size)


def map_array(path: Path) -> np.ndarray:
    """Memory-map a .npy file as a plain array: slicing `np.memmap` costs several times as much.

    Raises:
        UnreadableArrayError, OSError: as for `read_array`.
    """
    with open_regular(path) as file:
        _read_header(file, os.fstat(file.fileno()).st_size)
    return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)


def read_npz_array(
    path: Path, name: str | None = None, max_bytes: int | None = None
) -> np.ndarray:
    """Read one array of a .npz file of any size that fits into memory.

    Args:
        name: Name of the array (default: the only one).
        max_bytes: Size above which the array is unreadable, before memory is considered.

    Raises:
        UserError: it is larger than the free memory.
        UnreadableArrayError: not a .npz file, not such an array, or damaged.
        OSError: not a regular file.
    """
    with open_regular(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                names = [member.removesuffix(".npy") for member in archive.namelist()]
                chosen = names[0] if name is None and len(names) == 1 else name
                if chosen not in names:
                    raise UnreadableArrayError(
                        f"arrays {join_some(map(printable, names)) or 'none'}, of which"
                        f" --latents-field names {'none' if name is None else repr(name)}"
                    )
                member = archive.getinfo(f"{chosen}.npy")
                if max_bytes is not None and member.file_size > max_bytes:
                    raise UnreadableArrayError(f"{chosen}.npy of {member.file_size} bytes")
                fix = "save it as .npy, which is mapped"
                require_memory(member.file_size, f"the array {chosen} in {path}", fix)
                with archive.open(member) as stream:
                    return _load(stream, member.file_size)
        except _ZIP_ERRORS as error:
            raise UnreadableArrayError(f"not a .npz file: {error}") from error


def _read_header(file: IO[bytes], size: int) -> None:
    """Compare the shape and dtype of a header with the size of the file."""
    try:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, _, dtype = read(file)
    except (
        ValueError,
        KeyError,
        TypeError,
        SyntaxError,
        TokenError,
        RecursionError,
        MemoryError,
        EOFError,
    ) as error:
        raise UnreadableArrayError(f"not a .npy file: {str(error)[:100]}") from error
    if dtype.hasobject:
        raise UnreadableArrayError("Python objects, which are never read")
    expected = file.tell() + math.prod(shape) * dtype.itemsize
    # A 0 in the shape would hide it in the product.
    is_absurd = any(not 0 <= count < 1 << 48 for count in shape)
    if is_absurd or expected != size:
        raise UnreadableArrayError(
            f"{size} bytes where its header, {dtype} {list(shape)}, asks for {expected}"
        )


def _load(file: IO[bytes], size: int) -> np.ndarray:
    _read_header(file, size)
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)


def write_npz(path: Path, **arrays: np.ndarray) -> None:
    """Write arrays atomically as an uncompressed .npz file, whose CRCs are checked on reading."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    write_bytes(path, buffer.getvalue())


def read_npz(path: Path, *names: str) -> dict[str, np.ndarray]:
    """Read the named (default: all) arrays that `write_npz` wrote, with their CRCs checked.

    Raises:
        UserError: the file is damaged.
    """
    try:
        with open_regular(path) as opened, np.load(opened, allow_pickle=False) as file:
            return {name: file[name] for name in names or file.files}
    except NotRegularFileError:
        raise
    except (ValueError, *_ZIP_ERRORS) as error:
        fix = "delete it and rerun; it will be rebuilt"
        raise UserError(f"the arrays of {path}", f"damaged file: {error}", fix) from error


class NpyWriter:
    """Write a .npy file block by block, with any number of rows in the memory of one block.

    Args:
        path: File to write.
        dtype: Dtype of its items.
        row: Shape of a row; () for a one-dimensional array.
    """

    def __init__(self, path: Path, dtype: DTypeLike, row: Sequence[int] = ()):
        self.path, self.dtype, self.row, self.num_rows = path, np.dtype(dtype), tuple(row), 0
        self._file = open(path, "wb")
        self._file.write(self._header())

    def _header(self) -> bytes:
        shape = (self.num_rows, *self.row)
        buffer = io.BytesIO()
        # NumPy pads for the largest count, so that the length of the header does not depend on it.
        np.lib.format.write_array_header_1_0(
            buffer, {"descr": self.dtype.str, "fortran_order": False, "shape": shape}
        )
        return buffer.getvalue()

    def append(self, block: np.ndarray) -> None:
        """Add the items (or rows) of a block."""
        block = np.ascontiguousarray(block, dtype=self.dtype)
        assert block.shape[1:] == self.row
        self._file.write(block.tobytes())
        self.num_rows += len(block)

    def close(self) -> None:
        """Write the number of rows and sync the file."""
        self._file.seek(0)
        self._file.write(self._header())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
