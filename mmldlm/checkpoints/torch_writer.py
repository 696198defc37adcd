"""Writing a file that torch.load reads, chunk by chunk and without torch; the counterpart of torch_file.

A pickle of protocol 2 that holds plain values and tensors, and one uncompressed zip record for each tensor, aligned to
64 bytes as torch aligns them, so that torch.load(mmap=True) works and weights_only=True is enough.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.checkpoints.dtypes import DTYPES
from mmldlm.checkpoints.overlap import ahead, start_writeback
from mmldlm.checkpoints.torch_file import CHUNK_BYTES
from mmldlm.checkpoints.zero_files import numel
from mmldlm.checkpoints.zero_pickle import STORAGES

_ALIGNMENT = 64
_PADDING = 0x4246  # the id that torch gives to the extra field with which it aligns
_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items()}


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write: `chunks` gives its elements in order, flat, as DTYPES[dtype].raw."""

    dtype: str
    shape: tuple[int, ...]
    chunks: Iterable[np.ndarray]


def write_torch(path: Path, value: Any) -> int:
    """Writes dicts, lists, tuples, str, int, float, bool, None and NewTensor; returns the bytes of the tensors.

    Raises:
        OSError: a failed write. TypeError: anything else in `value`.
    """
    pickled = _Pickle()
    pickled.add(value)
    written = 0
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
        records = [("data.pkl", bytes(pickled.finish())), ("byteorder", b"little"), ("version", b"3\n")]
        for name, data in records:
            archive.writestr(_entry(archive, f"{path.stem}/{name}", len(data)), data)
        for key, tensor in enumerate(pickled.tensors):
            entry = _entry(archive, f"{path.stem}/data/{key}", pickled.sizes[key])
            with archive.open(entry, "w") as record:
                is_large = pickled.sizes[key] > 2 * CHUNK_BYTES
                for chunk in ahead(tensor.chunks) if is_large else tensor.chunks:
                    record.write(memoryview(np.ascontiguousarray(chunk)).cast("B") if chunk.size else b"")
            assert entry.file_size == pickled.sizes[key], f"{entry.filename} has {entry.file_size} bytes"
            written += entry.file_size
        assert archive.fp is not None
        start_writeback(archive.fp.fileno())
    return written


def _entry(archive: zipfile.ZipFile, name: str, size: int) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.file_size = size
    assert archive.fp is not None
    # zipfile itself adds a 20-byte field to the header of a record that may pass 2 GiB.
    header = 30 + len(name.encode()) + 4 + (20 if size * 1.05 > zipfile.ZIP64_LIMIT else 0)
    padding = -(archive.fp.tell() + header) % _ALIGNMENT
    entry.extra = struct.pack("<HH", _PADDING, padding) + b"Z" * padding
    return entry


class _Pickle:
    """Builds the pickle; `tensors` and `sizes` (bytes) list the records that it names 0, 1, 2, ..."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self.tensors: list[NewTensor] = []
        self.sizes: list[int] = []

    def finish(self) -> bytearray:
        return self.out + b"."

    def add(self, value: Any) -> None:
        if isinstance(value, NewTensor):
            self._tensor(value)
        elif value is None or isinstance(value, bool):
            self.out += {None: b"N", True: b"\x88", False: b"\x89"}[value]
        elif isinstance(value, int):
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.out += b"\x8a" + bytes([len(data)]) + data
        elif isinstance(value, float):
            self.out += b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            self.out += b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        elif isinstance(value, dict):
            self.out += b"}("
            for key, item in value.items():
                self.add(key)
                self.add(item)
            self.out += b"u"
        elif isinstance(value, list):
            self.out += b"]("
            for item in value:
                self.add(item)
            self.out += b"e"
        elif isinstance(value, tuple):
            self.out += b"("
            for item in value:
                self.add(item)
            self.out += b"t"
        else:
            raise TypeError(f"a {type(value).__name__} in a file for torch")

    def _global(self, module: str, name: str) -> None:
        self.out += f"c{module}\n{name}\n".encode()

    def _tensor(self, tensor: NewTensor) -> None:
        """_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks)."""
        stride = tuple(max(numel(tensor.shape[axis + 1 :]), 1) for axis in range(len(tensor.shape)))
        self._global("torch._utils", "_rebuild_tensor_v2")
        self.out += b"(("
        self.add("storage")
        self._global("torch", _STORAGE_OF[tensor.dtype])
        for item in (str(len(self.tensors)), "cpu", numel(tensor.shape)):
            self.add(item)
        self.out += b"tQ"
        for item in (0, tensor.shape, stride, False):
            self.add(item)
        self._global("collections", "OrderedDict")
        self.out += b")RtR"
        self.tensors.append(tensor)
        self.sizes.append(numel(tensor.shape) * DTYPES[tensor.dtype].itemsize)
