"""Write a file for torch.load, in pieces and any order, without torch; the counterpart of reader.

A pickle, and one uncompressed zip record per tensor, aligned to 64 bytes as by torch, so that
torch.load(mmap=True) works. All sizes, and so all positions, are known before writing; the CRC of
a record is combined from its pieces.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.checkpoints.formats.dtypes import DTYPES
from mmldlm.checkpoints.formats.torch_save.pickler import PickleWriter, TensorSpec
from mmldlm.checkpoints.formats.torch_save.reader import CHUNK_BYTES
from mmldlm.checkpoints.io.crc32 import RangedCrc32
from mmldlm.checkpoints.io.output_file import OutputFile
from mmldlm.utils.prefetch import prefetch

_ALIGNMENT = 64
_PADDING = 0x4246  # the id that torch gives to the extra field with which it aligns
_ZIP64 = 0xFFFFFFFF  # sizes and positions from here on need fields of 8 bytes
_PREFETCH_DEPTH = 8  # chunks


def write_torch(path: Path, value: Any) -> int:
    """Write a value whose tensors all have their chunks; return the bytes of the tensors.

    Raises:
        OSError: a failed write.
        TypeError: something in `value` that PickleWriter does not support.
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
    header_offset: int
    start: int  # of the payload, from the start of the zip
    written: RangedCrc32 = field(default_factory=RangedCrc32)

    def crc(self) -> int:
        count, crc = self.written.value()
        assert count == self.nbytes, f"{self.name.decode()} has {count} of {self.nbytes} bytes"
        return crc


class TorchFileLayout:
    """Positions of everything in the zip file of one value, computed before writing.

    Args:
        value: what torch.load will return.
        top: the zip's top folder; torch names it after the file.

    Attributes:
        tensors: those of `value`, each once.
        tensor_bytes: their bytes.
        size: bytes of the zip.
    """

    def __init__(self, value: Any, top: str):
        pickled = PickleWriter()
        pickled.add(value)
        self.tensors = pickled.tensors
        self.tensor_bytes = sum(tensor.nbytes for tensor in self.tensors)
        self._records: list[_Record] = []
        self._end = 0
        small = [("data.pkl", pickled.finish()), ("byteorder", b"little"), ("version", b"3\n")]
        self.small = [(self._add_record(f"{top}/{name}", len(data)), data) for name, data in small]
        self.records = [
            self._add_record(f"{top}/data/{key}", tensor.nbytes)
            for key, tensor in enumerate(self.tensors)
        ]
        self.size = self._end + len(self._directory([0] * len(self._records)))

    def _add_record(self, name: str, nbytes: int) -> _Record:
        record = _Record(name.encode(), nbytes, self._end, 0)
        record.start = self._end + len(_local_header(record, 0))
        self._records.append(record)
        self._end = record.start + nbytes
        return record

    def headers(self) -> list[tuple[int, bytes]]:
        """Return (position, bytes) of everything around the records, which must be complete."""
        crcs = [record.crc() for record in self._records]
        found = [
            (record.header_offset, _local_header(record, crc))
            for record, crc in zip(self._records, crcs)
        ]
        return [*found, (self._end, self._directory(crcs))]

    def _directory(self, crcs: list[int]) -> bytes:
        """Return the zip's central directory and the end records."""
        entries = b"".join(_entry(record, crc) for record, crc in zip(self._records, crcs))
        count, at, size = len(self._records), self._end, len(entries)
        end64 = b""
        if at >= _ZIP64 or count >= 0xFFFF:
            end64 = struct.pack(
                "<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, size, at
            )
            end64 += struct.pack("<IIQI", 0x07064B50, 0, at + size, 1)
        few = min(count, 0xFFFF)
        end = struct.pack(
            "<IHHHHIIH", 0x06054B50, 0, 0, few, few, min(size, _ZIP64), min(at, _ZIP64), 0
        )
        return entries + end64 + end


class TorchFileWriter:
    """One file of one zip, or of several back to back (DCP). It is created at the first write.

    Tensors with chunks and the zeros of `padding` are written when it is created, all others by
    write(). The file is not flushed to the disk.

    Args:
        path: the new file.
        layouts: of its zips.
        padding: (tensor, first element, number of elements) of zeros.

    Raises (from write and finish):
        OSError: no space for the complete file, or a failed write.
    """

    def __init__(
        self,
        path: Path,
        layouts: list[TorchFileLayout],
        padding: Sequence[tuple[TensorSpec, int, int]] = (),
    ):
        self.path, self._layouts, self._padding = path, layouts, padding
        self.bases = [
            sum(layout.size for layout in layouts[:number]) for number in range(len(layouts))
        ]
        self.size = sum(layout.size for layout in layouts)
        self.tensor_bytes = sum(layout.tensor_bytes for layout in layouts)
        self._missing = self.tensor_bytes
        # By the id of the tensor, which the layouts keep alive.
        self._record_of = {
            id(tensor): (record, base)
            for layout, base in zip(layouts, self.bases)
            for tensor, record in zip(layout.tensors, layout.records)
        }
        self._file: OutputFile | None = None
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

    def _write(
        self, tensor: TensorSpec, offset: int, values: np.ndarray, crc: int | None = None
    ) -> int:
        record, base = self._record_of[id(tensor)]
        view = memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        self._put(record, base, offset, view, crc)
        with self._lock:
            self._missing -= len(view)
            is_full = bool(view) and self._missing == 0
        if is_full:
            self._finish()
        return len(view)

    def finish(self) -> None:
        """Write a file without tensors; check that all tensors of any other file are complete."""
        if self._is_done:
            return
        self._open()
        if not self._is_done:
            assert not self._missing, f"{self._missing} bytes of {self.path} were never written"
            self._finish()

    def _finish(self) -> None:
        """Write the headers and the directory."""
        for layout, base in zip(self._layouts, self.bases):
            for position, data in layout.headers():
                self._file.write(data, base + position)
        self._is_done = True
        self.close()

    def close(self) -> None:
        """Close the file, complete or not."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        with self._lock:
            if self._file is not None or self._is_done:
                return
            self._create()
        # The first thread fills in what is known; others may write their own bytes meanwhile.
        for layout in self._layouts:
            for tensor in layout.tensors:
                if tensor.chunks is not None:
                    self._write_chunks(tensor)
        for tensor, first, count in self._padding:
            raw = DTYPES[tensor.dtype].raw
            self._write(tensor, first * DTYPES[tensor.dtype].itemsize, np.zeros(count, raw))

    def _write_chunks(self, tensor: TensorSpec) -> None:
        is_large = tensor.nbytes > 2 * CHUNK_BYTES
        offset = 0
        for chunk in prefetch(tensor.chunks, _PREFETCH_DEPTH) if is_large else tensor.chunks:
            offset += self._write(tensor, offset, chunk)

    def _create(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = OutputFile(self.path, self.size, fsync=False)
        for layout, base in zip(self._layouts, self.bases):
            for record, data in layout.small:
                self._put(record, base, 0, memoryview(data))

    def _put(
        self, record: _Record, base: int, offset: int, data: memoryview, crc: int | None = None
    ) -> None:
        end = offset + len(data)
        assert end <= record.nbytes, f"bytes {offset}..{end} of {record.name.decode()}"
        if data:
            record.written.add(offset, data, crc)
            self._file.write(data, base + record.start + offset)


def _local_header(record: _Record, crc: int) -> bytes:
    large = record.nbytes >= _ZIP64
    extra = struct.pack("<HHQQ", 1, 16, record.nbytes, record.nbytes) if large else b""
    before = record.header_offset + 30 + len(record.name) + len(extra) + 4
    padding = -before % _ALIGNMENT
    extra += struct.pack("<HH", _PADDING, padding) + b"Z" * padding
    size = min(record.nbytes, _ZIP64)
    fields = (
        0x04034B50,
        45 if large else 20,
        _flags(record),
        0,
        0,
        0,
        crc,
        size,
        size,
        len(record.name),
        len(extra),
    )
    return struct.pack("<IHHHHHIIIHH", *fields) + record.name + extra


def _entry(record: _Record, crc: int) -> bytes:
    large, far = record.nbytes >= _ZIP64, record.header_offset >= _ZIP64
    wide = ([record.nbytes] * 2 if large else []) + ([record.header_offset] if far else [])
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size, at, version = (
        min(record.nbytes, _ZIP64),
        min(record.header_offset, _ZIP64),
        45 if wide else 20,
    )
    fields = (
        0x02014B50,
        version,
        version,
        _flags(record),
        0,
        0,
        0,
        crc,
        size,
        size,
        len(record.name),
        len(extra),
    )
    return struct.pack("<IHHHHHHIIIHHHHHII", *fields, 0, 0, 0, 0, at) + record.name + extra


def _flags(record: _Record) -> int:
    return 0 if record.name.isascii() else 0x800  # names in UTF-8
