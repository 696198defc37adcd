"""Write a file for torch.load, in pieces and any order, without torch; the counterpart of
torch_file and unpickler.

A pickle of protocol 2, and one uncompressed zip record per tensor, aligned to 64 bytes as by
torch, so that torch.load(mmap=True) works. All sizes, and so all positions, are known before
writing; the CRC of a record is combined from its pieces.

Plain values and tensors satisfy weights_only=True. The few objects of classes that DeepSpeed or
torch require are written by name; no class is imported.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.checkpoints.files.dtypes import DTYPES, row_major
from mmldlm.checkpoints.files.file_io import RangedCrc32
from mmldlm.checkpoints.files.tensor_writer import TensorFileWriter, TensorSpec
from mmldlm.checkpoints.files.unpickler import STORAGES

# -- The pickle -----------------------------------------------------------------------------------

_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items()}


def scalar(value: float) -> TensorSpec:
    """Return a 0-d float32 tensor, as torch's AdamW keeps its step count."""
    return TensorSpec("float32", (), [np.array([value], np.float32)])


class TorchSize(tuple):
    """A torch.Size."""


@dataclass(frozen=True)
class GlobalRef:
    """A global by its name: torch.float32, a class."""

    module: str
    name: str


@dataclass(frozen=True)
class ObjectSpec:
    """An object of a class.

    Attributes:
        type: Class of the object.
        args: Arguments of class(*args); None for an instance that is not initialized.
        state: State that is set after the object was built.
    """

    type: GlobalRef
    args: tuple | None = None
    state: Any = None


class PickleWriter:
    """Build one pickle.

    Attributes:
        tensors: Tensors in the file, in the order of their record numbers 0, 1, 2, ...
    """

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self.tensors: list[TensorSpec] = []
        self._keys: dict[TensorSpec, int] = {}
        # Place of each class and string in the memo: a description of many tensors repeats them.
        self._memo: dict[GlobalRef | str, int] = {}

    def finish(self) -> bytes:
        """Return the pickle."""
        return bytes(self.out + b".")

    def add(self, value: Any) -> None:
        """Append a value.

        Raises:
            TypeError: a value of an unsupported type.
        """
        if isinstance(value, TensorSpec):
            self._tensor(value)
        elif value is None or isinstance(value, bool):
            self.out += {None: b"N", True: b"\x88", False: b"\x89"}[value]
        elif isinstance(value, int):
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.out += b"\x8a" + bytes([len(data)]) + data
        elif isinstance(value, float):
            self.out += b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            self._once(value, b"X" + struct.pack("<I", len(value.encode())) + value.encode())
        elif isinstance(value, dict):
            self.out += b"}("
            for key, item in value.items():
                self.add(key)
                self.add(item)
            self.out += b"u"
        elif isinstance(value, list):
            self._items(b"](", value, b"e")
        elif isinstance(value, TorchSize):
            self._global(GlobalRef("torch", "Size"))
            self._items(b"((", value, b"ttR")
        elif isinstance(value, tuple):
            self._items(b"(", value, b"t")
        elif isinstance(value, GlobalRef):
            self._global(value)
        elif isinstance(value, ObjectSpec):
            self._object(value)
        else:
            raise TypeError(f"a {type(value).__name__} in a file for torch")

    def _items(self, before: bytes, items: Iterable[Any], after: bytes) -> None:
        self.out += before
        for item in items:
            self.add(item)
        self.out += after

    def _global(self, value: GlobalRef) -> None:
        self._once(value, f"c{value.module}\n{value.name}\n".encode())

    def _once(self, value: GlobalRef | str, data: bytes) -> None:
        """Append the data of a value, or a reference to it if it was appended before."""
        if value in self._memo:
            self.out += b"j" + struct.pack("<I", self._memo[value])
        else:
            self._memo[value] = len(self._memo)
            self.out += data + b"r" + struct.pack("<I", self._memo[value])

    def _object(self, value: ObjectSpec) -> None:
        self._global(value.type)
        if value.args is None:
            self.out += b")\x81"
        else:
            self._items(b"(", value.args, b"tR")
        if value.state is not None:
            self.add(value.state)
            self.out += b"b"

    def _tensor(self, tensor: TensorSpec) -> None:
        """Append _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks).

        Types without a storage class of their own are bytes in an UntypedStorage:
        _rebuild_tensor_v3(..., dtype).
        """
        key = self._keys.setdefault(tensor, len(self.tensors))
        if key == len(self.tensors):
            self.tensors.append(tensor)
        is_typed = tensor.dtype in _STORAGE_OF
        self._global(
            GlobalRef("torch._utils", "_rebuild_tensor_v2" if is_typed else "_rebuild_tensor_v3")
        )
        self.out += b"(("
        self.add("storage")
        untyped = GlobalRef("torch.storage", "UntypedStorage")
        self._global(GlobalRef("torch", _STORAGE_OF[tensor.dtype]) if is_typed else untyped)
        count = tensor.numel if is_typed else tensor.nbytes
        for item in (str(key), "cpu", count):
            self.add(item)
        self.out += b"tQ"
        for value in (0, tensor.shape, row_major(tensor.shape), False):
            self.add(value)
        self._global(GlobalRef("collections", "OrderedDict"))
        self.out += b")R"
        if not is_typed:
            self._global(GlobalRef("torch", tensor.dtype))
        self.out += b"tR"


# -- The zip file ---------------------------------------------------------------------------------

_ALIGNMENT = 64
# Identifier of the extra field with which torch aligns records.
_PADDING = 0x4246
# Sizes and positions from this value on need fields of 8 bytes.
_ZIP64 = 0xFFFFFFFF


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
    # First byte of the payload, from the start of the zip.
    start: int
    written: RangedCrc32 = field(default_factory=RangedCrc32)

    def crc(self) -> int:
        count, crc = self.written.value()
        assert count == self.nbytes, f"{self.name.decode()} has {count} of {self.nbytes} bytes"
        return crc


class TorchFileLayout:
    """Positions of everything in the zip file of one value, computed before writing.

    Args:
        value: Value that torch.load will return.
        top: Top folder of the zip; torch names it after the file.

    Attributes:
        tensors: Tensors of `value`, each once.
        tensor_bytes: Number of bytes of these tensors.
        size: Size of the zip in bytes.
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
        headers = [
            (record.header_offset, _local_header(record, crc))
            for record, crc in zip(self._records, crcs)
        ]
        return [*headers, (self._end, self._directory(crcs))]

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


class TorchFileWriter(TensorFileWriter):
    """One file of one zip, or of several back to back (DCP); see TensorFileWriter.

    Tensors with chunks and the zeros of `padding` are written when it is created, all others by
    write().

    Args:
        path: New file.
        layouts: Layouts of its zips.
        padding: (tensor, first element, number of elements) of zeros.
    """

    def __init__(
        self,
        path: Path,
        layouts: list[TorchFileLayout],
        padding: Sequence[tuple[TensorSpec, int, int]] = (),
    ):
        super().__init__(
            path,
            sum(layout.size for layout in layouts),
            sum(layout.tensor_bytes for layout in layouts),
        )
        self._layouts, self._padding = layouts, padding
        ends = itertools.accumulate((layout.size for layout in layouts), initial=0)
        self.bases = list(ends)[:-1]
        self._record_of = {
            tensor: (record, base)
            for layout, base in zip(layouts, self.bases)
            for tensor, record in zip(layout.tensors, layout.records)
        }

    def _write_head(self) -> None:
        for layout, base in zip(self._layouts, self.bases):
            for record, data in layout.small:
                self._put_record(record, base, 0, memoryview(data))

    def _write_known(self) -> None:
        for tensor in self._record_of:
            offset = 0
            for chunk in tensor.chunks or ():
                offset += self._write(tensor, offset, chunk)
        for tensor, first, count in self._padding:
            raw = DTYPES[tensor.dtype].raw
            self._write(tensor, first * DTYPES[tensor.dtype].itemsize, np.zeros(count, raw))

    def _write_tail(self) -> None:
        for layout, base in zip(self._layouts, self.bases):
            for position, data in layout.headers():
                self._file.write(data, base + position)

    def _put(self, tensor: TensorSpec, offset: int, data: memoryview, crc: int | None) -> None:
        record, base = self._record_of[tensor]
        self._put_record(record, base, offset, data, crc)

    def _put_record(
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
    size, lengths = min(record.nbytes, _ZIP64), (len(record.name), len(extra))
    version = 45 if large else 20
    # Method, time and date are zeros.
    fields = (0x04034B50, version, _flags(record), crc, size, size, *lengths)
    return struct.pack("<IHH6xIIIHH", *fields) + record.name + extra


def _entry(record: _Record, crc: int) -> bytes:
    large, far = record.nbytes >= _ZIP64, record.header_offset >= _ZIP64
    wide = ([record.nbytes] * 2 if large else []) + ([record.header_offset] if far else [])
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    size, at = min(record.nbytes, _ZIP64), min(record.header_offset, _ZIP64)
    version, lengths = 45 if wide else 20, (len(record.name), len(extra))
    # Method, time, date, comment, disk and attributes are zeros.
    fields = (0x02014B50, version, version, _flags(record), crc, size, size, *lengths, at)
    return struct.pack("<IHHH6xIIIHH10xI", *fields) + record.name + extra


def _flags(record: _Record) -> int:
    # This flag marks names in UTF-8.
    return 0 if record.name.isascii() else 0x800
