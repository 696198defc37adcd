"""Writing a file that torch.load reads, piece by piece in any order and without torch; the counterpart of torch_file.

A pickle (pickle_writer), and one uncompressed zip record for each tensor, aligned to 64 bytes as torch aligns them, so
that torch.load(mmap=True) works. Sizes are known beforehand, so the place of every byte is; the CRC of a record is put
together from those of its pieces, which at the end must have covered it exactly.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.checkpoints.formats.dtypes import DTYPES
from mmldlm.checkpoints.formats.torch_save.pickler import PickleWriter, TensorSpec
from mmldlm.checkpoints.formats.torch_save.reader import CHUNK_BYTES, raise_file_limit
from mmldlm.checkpoints.io.crc32 import RangedCrc32
from mmldlm.checkpoints.io.parallel import WRITEBACK_BYTES, ahead, preallocate, start_writeback

_ALIGNMENT = 64
_PADDING = 0x4246  # the id that torch gives to the extra field with which it aligns
_ZIP64 = 0xFFFFFFFF  # sizes and places from here on stand in fields of 8 bytes


def write_torch(path: Path, value: Any) -> int:
    """Writes a value whose tensors all have their chunks; returns the bytes of the tensors.

    Raises:
        OSError: a failed write. TypeError: something in `value` that pickle_writer does not take.
    """
    file = TorchFileWriter(path, [TorchFileLayout(value, path.stem)])
    try:
        file.finish()
    finally:
        file.close()
    return file.tensor_bytes


@dataclass
class _Record:
    name: bytes
    nbytes: int
    header_at: int
    start: int  # of the payload, from the zip's start
    written: RangedCrc32 = field(default_factory=RangedCrc32)

    def crc(self) -> int:
        count, crc = self.written.value()
        assert count == self.nbytes, f"{self.name.decode()} has {count} of {self.nbytes} bytes"
        return crc


class TorchFileLayout:
    """Where everything lies in the zip file of one value, before any of it is written.

    Args:
        value: what torch.load will give. top: the zip's top folder; torch names it after the file.

    Attributes:
        tensors: those of `value`, each once. tensor_bytes: what they hold. size: of the zip.
    """

    def __init__(self, value: Any, top: str):
        pickled = PickleWriter()
        pickled.add(value)
        self.tensors = pickled.tensors
        self.tensor_bytes = sum(tensor.nbytes for tensor in self.tensors)
        self._records: list[_Record] = []
        self._end = 0
        small = [("data.pkl", pickled.finish()), ("byteorder", b"little"), ("version", b"3\n")]
        self.small = [(self._place(f"{top}/{name}", len(data)), data) for name, data in small]
        self.records = [self._place(f"{top}/data/{key}", tensor.nbytes) for key, tensor in enumerate(self.tensors)]
        self.size = self._end + len(self._directory([0] * len(self._records)))

    def _place(self, name: str, nbytes: int) -> _Record:
        record = _Record(name.encode(), nbytes, self._end, 0)
        record.start = self._end + len(_local_header(record, 0))
        self._records.append(record)
        self._end = record.start + nbytes
        return record

    def headers(self) -> list[tuple[int, bytes]]:
        """(place, bytes) of all that stands around the records, once they are written."""
        crcs = [record.crc() for record in self._records]
        found = [(record.header_at, _local_header(record, crc)) for record, crc in zip(self._records, crcs)]
        return [*found, (self._end, self._directory(crcs))]

    def _directory(self, crcs: list[int]) -> bytes:
        """The zip's central directory and what stands behind it."""
        entries = b"".join(_entry(record, crc) for record, crc in zip(self._records, crcs))
        count, at, size = len(self._records), self._end, len(entries)
        end64 = b""
        if at >= _ZIP64 or count >= 0xFFFF:
            end64 = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, size, at)
            end64 += struct.pack("<IIQI", 0x07064B50, 0, at + size, 1)
        few = min(count, 0xFFFF)
        end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, few, few, min(size, _ZIP64), min(at, _ZIP64), 0)
        return entries + end64 + end


class TorchFileWriter:
    """One file of one zip, or of several back to back (DCP's). It is created at the first write.

    Tensors with chunks are written when it is created, and so is `padding`: (tensor, first element, number of elements)
    that are zero. All else waits for write().

    Raises (from write and finish):
        OSError: no space for the whole file (reserved at once where the file system can), or a failed write.
    """

    def __init__(self, path: Path, layouts: list[TorchFileLayout], padding: Sequence[tuple[TensorSpec, int, int]] = ()):
        self.path, self._layouts, self._padding = path, layouts, padding
        self.is_flushed = True  # who wrote it will flush it to the disk, which may begin early
        self.bases = [sum(layout.size for layout in layouts[:number]) for number in range(len(layouts))]
        self.size = sum(layout.size for layout in layouts)
        self.tensor_bytes = sum(layout.tensor_bytes for layout in layouts)
        self._missing = self.tensor_bytes
        # Tensors go by their ids; the layouts keep them alive.
        self._places = {
            id(tensor): (record, base)
            for layout, base in zip(layouts, self.bases)
            for tensor, record in zip(layout.tensors, layout.records)
        }
        self._fd = -1
        self._unsent = 0
        self._is_done = False
        self._lock = threading.Lock()

    def write(self, tensor: TensorSpec, at: int, values: np.ndarray, crc: int | None = None) -> int:
        """Writes consecutive elements of a tensor, from byte `at` of it on; returns their bytes.

        `crc` is their CRC-32, where it is known. Several threads may write at once; the one that writes the last bytes
        finishes the file.
        """
        self._open()
        return self._write(tensor, at, values, crc)

    def _write(self, tensor: TensorSpec, at: int, values: np.ndarray, crc: int | None = None) -> int:
        record, base = self._places[id(tensor)]
        view = memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        self._put(record, base, at, view, crc)
        with self._lock:
            self._missing -= len(view)
            is_full = bool(view) and self._missing == 0
        if is_full:
            self._finish()
        return len(view)

    def finish(self) -> None:
        """Writes a file without tensors; of others it sees that every byte of every tensor has been written."""
        if self._is_done:
            return
        self._open()
        if not self._is_done:
            assert not self._missing, f"{self._missing} bytes of {self.path} were never written"
            self._finish()

    def _finish(self) -> None:
        """Writes the headers and the directory."""
        for layout, base in zip(self._layouts, self.bases):
            for at, data in layout.headers():
                self._pwrite(memoryview(data), base + at)
        if self.is_flushed:
            start_writeback(self._fd)
        self._is_done = True
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        with self._lock:
            if self._fd >= 0 or self._is_done:
                return
            self._create()
        # Whoever comes first fills in what is known already; others may write their own bytes meanwhile.
        for layout in self._layouts:
            for tensor in layout.tensors:
                if tensor.chunks is not None:
                    at = 0
                    for chunk in ahead(tensor.chunks) if tensor.nbytes > 2 * CHUNK_BYTES else tensor.chunks:
                        at += self._write(tensor, at, chunk)
        for tensor, first, count in self._padding:
            raw = DTYPES[tensor.dtype].raw
            self._write(tensor, first * DTYPES[tensor.dtype].itemsize, np.zeros(count, raw))

    def _create(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = _create(self.path)
        preallocate(self._fd, self.size)
        for layout, base in zip(self._layouts, self.bases):
            for record, data in layout.small:
                self._put(record, base, 0, memoryview(data))

    def _put(self, record: _Record, base: int, at: int, data: memoryview, crc: int | None = None) -> None:
        assert at + len(data) <= record.nbytes, f"bytes {at}..{at + len(data)} of {record.name.decode()}"
        if data:
            record.written.add(at, data, crc)
            self._pwrite(data, base + record.start + at)

    def _pwrite(self, view: memoryview, position: int) -> None:
        self._unsent += len(view)
        while view:
            done = os.pwrite(self._fd, view, position)
            view, position = view[done:], position + done
        if self.is_flushed and self._unsent >= WRITEBACK_BYTES:
            start_writeback(self._fd)
            self._unsent = 0


def _local_header(record: _Record, crc: int) -> bytes:
    large = record.nbytes >= _ZIP64
    extra = struct.pack("<HHQQ", 1, 16, record.nbytes, record.nbytes) if large else b""
    before = record.header_at + 30 + len(record.name) + len(extra) + 4
    padding = -before % _ALIGNMENT
    extra += struct.pack("<HH", _PADDING, padding) + b"Z" * padding
    size = min(record.nbytes, _ZIP64)
    fields = (0x04034B50, 45 if large else 20, _flags(record), 0, 0, 0, crc, size, size, len(record.name), len(extra))
    return struct.pack("<IHHHHHIIIHH", *fields) + record.name + extra


def _entry(record: _Record, crc: int) -> bytes:
    large, far = record.nbytes >= _ZIP64, record.header_at >= _ZIP64
    wide = ([record.nbytes] * 2 if large else []) + ([record.header_at] if far else [])
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size, at, version = min(record.nbytes, _ZIP64), min(record.header_at, _ZIP64), 45 if wide else 20
    fields = (0x02014B50, version, version, _flags(record), 0, 0, 0, crc, size, size, len(record.name), len(extra))
    return struct.pack("<IHHHHHHIIIHHHHHII", *fields, 0, 0, 0, 0, at) + record.name + extra


def _flags(record: _Record) -> int:
    return 0 if record.name.isascii() else 0x800  # names in UTF-8


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags, 0o644)
    except OSError as error:
        raise_file_limit(error)
        return os.open(path, flags, 0o644)
