"""Files of tensors that are written in pieces, in any order and by several threads, while their
sizes and positions are known before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.checkpoints.files.dtypes import nbytes, numel
from mmldlm.checkpoints.files.file_io import OutputFile


@dataclass(frozen=True, eq=False)
class TensorSpec:
    """A tensor to write. One that occurs in several places is stored once, and torch.load ties
    them.

    Attributes:
        dtype: Name of the dtype in torch.
        shape: Shape of the tensor.
        chunks: Elements in order, flat, as DTYPES[dtype].raw; None if they are written later.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: Iterable[np.ndarray] | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return numel(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return nbytes(self.shape, self.dtype)


class TensorFileWriter:
    """A new file of tensors. It is created at the first write and closed after the last; it is not
    flushed to the disk.

    Subclasses know where a tensor lies (`_put`), and what else is in the file (`_write_head`,
    `_write_known`, `_write_tail`).

    Args:
        path: New file.
        size: Number of bytes of the complete file.
        tensor_bytes: Number of bytes of its tensors.

    Raises (from write and finish):
        OSError: the file exists, the disk has no space for all of it, or a write failed.
    """

    def __init__(self, path: Path, size: int, tensor_bytes: int):
        self.path, self.size, self.tensor_bytes = path, size, tensor_bytes
        self._missing = tensor_bytes
        self._file: Any = None  # OutputFile from the first write to the last
        self._is_done = False
        self._lock = threading.Lock()

    def write(
        self, tensor: TensorSpec, offset: int, values: np.ndarray, crc: int | None = None
    ) -> int:
        """Write consecutive elements of a tensor from its byte `offset` on; return their bytes.
        Thread-safe.

        The thread that writes the last bytes finishes the file.

        Args:
            crc: CRC-32 of the values if it is known.
        """
        self._open()
        return self._write(tensor, offset, values, crc)

    def finish(self) -> None:
        """Write a file without tensors; check that all tensors of any other file are complete."""
        if self._is_done:
            return
        self._open()
        if not self._is_done:
            assert not self._missing, f"{self._missing} bytes of {self.path} were never written"
            self._finish()

    def close(self) -> None:
        """Close the file, complete or not."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        with self._lock:
            if self._file is not None or self._is_done:
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = OutputFile(self.path, self.size)
            self._write_head()
        # Other threads may write their own bytes in the meantime.
        self._write_known()

    def _write(
        self, tensor: TensorSpec, offset: int, values: np.ndarray, crc: int | None = None
    ) -> int:
        view = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        self._put(tensor, offset, view, crc)
        with self._lock:
            self._missing -= len(view)
            is_full = bool(view) and self._missing == 0
        if is_full:
            self._finish()
        return len(view)

    def _finish(self) -> None:
        self._write_tail()
        self._is_done = True
        self.close()

    def _put(self, tensor: TensorSpec, offset: int, data: memoryview, crc: int | None) -> None:
        raise NotImplementedError

    def _write_head(self) -> None:
        """Write what stands before all tensors; the first thread does, while others wait."""

    def _write_known(self) -> None:
        """Write the tensors whose elements are known from the start."""

    def _write_tail(self) -> None:
        """Write what depends on the bytes of all tensors."""
