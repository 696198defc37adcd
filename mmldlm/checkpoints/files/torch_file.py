"""Read the zip file behind torch.save by ranges, verifying CRCs, without torch.

Layout (torch/csrc/jit/serialization.cc and torch/serialization.py): records are stored
uncompressed under one top folder named after the file. `data.pkl` describes the objects,
`data/<key>` holds one storage each.

Two modes; both compute CRCs while reading:

* Complete (converter): verify_read_records() reads the rest of every record that was touched, and
  so verifies it.
* Random access (a rank that loads its shards): only the requested bytes are read. A record that
  was read from end to end, except for padding, is compared with its CRC. The file must have been
  verified against the manifest before.

The directory of the zip is parsed here (PKWARE's APPNOTE.TXT, 4.3: end record, zip64 end record
and locator, central directory), alone or inside a larger file, and must fill its bytes from the
first to the last. The standard library's zipfile accepts bytes before and after the archive: of
two joined files, or of a tar of several, it returns the last one. It also takes half a millisecond
per archive, and a DCP file holds hundreds back to back.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmldlm.checkpoints.files.dtypes import DTYPES, negate
from mmldlm.checkpoints.files.file_io import RangedCrc32, closed_on_error, open_regular_descriptor
from mmldlm.checkpoints.files.file_kinds import (
    HEAD_BYTES,
    OLD_TORCH,
    TORCH_ZIP,
    FileKind,
    kind_by_bytes,
    kind_by_records,
)
from mmldlm.checkpoints.files.unpickler import RefusedPickle, TensorRef, read_pickle
from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_os_error

# A chunk and its cast copy should fit the processor's cache; smaller chunks cost more system
# calls.
CHUNK_BYTES = 1 << 19
# Flat weights are padded by a few elements per rank; reading over them keeps the CRC contiguous.
PADDING_BYTES = 4096
# Descriptions of tensors are small; a larger one is an attack or not a checkpoint of weights.
MAX_PICKLE_BYTES = 512 << 20
# Types of the tensors that stand for one number, such as a step count.
NUMBERS = ("float32", "float64", "int64", "int32")
SAME_SAVE_HINT = "restore all files from the same save"


def corrupt_file_error(
    path: Path,
    found: str,
    fix: str = "copy the file again from where it was saved, or use an older checkpoint",
) -> UserError:
    """Return the error for a file that is damaged or inconsistent."""
    return UserError(f"an intact checkpoint file {path}", found, fix)


def open_for_reading(path: Path) -> int:
    """Return a file descriptor.

    Raises:
        UserError: it cannot be opened, or is a folder, FIFO, socket or device.
    """
    try:
        return open_regular_descriptor(path)
    except OSError as error:
        raise corrupt_file_error(
            path, f"it cannot be opened: {describe_os_error(error)}"
        ) from error


def read_exactly(path: Path, fd: int, view: memoryview, position: int) -> None:
    """Fill `view` with the bytes from `position` of an open file.

    Raises:
        UserError: the file ends before; the error names `path`.
    """
    while view:
        count = os.preadv(fd, [view], position)
        if count == 0:
            raise corrupt_file_error(
                path, f"the file ends at byte {position} while it is being read"
            )
        view, position = view[count:], position + count


class _Record:
    __slots__ = ("start", "size", "crc", "read", "is_touched", "is_verified")

    def __init__(self, start: int, size: int, crc: int):
        # The position of the payload, in bytes from the start of the zip.
        self.start = start
        self.size, self.crc = size, crc
        self.read = RangedCrc32()
        self.is_touched = self.is_verified = False


class TorchFile:
    """One file written by torch.save. Use as a context manager or call close().

    Pickled, it is its path alone: another process opens it where it reads its first tensor.

    Args:
        path: File, named in errors.
        random_access: Whether to read only what is requested (see the module docstring).
        window: (first byte, number of bytes) of the zip inside a larger file, which is read when
            something of it is requested, through the descriptor of a subclass; None for the
            complete file.

    Attributes:
        foreign_objects: Classes of other programs that load() met; their objects were not built.

    Raises (at construction and while reading):
        UserError: not a zip file of torch, truncated, compressed, wrong byte order, a CRC
            mismatch.
    """

    def __init__(
        self,
        path: Path | str,
        random_access: bool = False,
        window: tuple[int, int] | None = None,
    ):
        self.path = Path(path)
        self.random_access = random_access
        self.foreign_objects: set[str] = set()
        self._owns_fd, self._fd = window is None, -1
        self._records: dict[str, _Record] | None = None
        if window is not None:
            self._base, self.file_size = window
            return
        self._fd = self._descriptor()
        self._base, self.file_size = 0, os.fstat(self._fd).st_size
        self._open()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_fd": -1, "_records": None}

    @property
    def records(self) -> dict[str, _Record]:
        """Name -> record of the zip."""
        if self._records is None:
            self._fd = self._descriptor()
            self._open()
        assert self._records is not None
        return self._records

    def _descriptor(self) -> int:
        return open_for_reading(self.path)

    def _open(self) -> None:
        with closed_on_error(self):
            size, end = os.fstat(self._fd).st_size, self._base + self.file_size
            # In another process, the complete file may be another one.
            if size < end or (self._owns_fd and size > end):
                raise corrupt_file_error(
                    self.path, f"it ends at byte {size}, an item of it at {end}"
                )
            self._index()

    def _index(self) -> None:
        try:
            entries = read_directory(self.file_size, self._pread)
        except (BadZip, OSError, OverflowError, struct.error) as error:
            kind = kind_by_bytes(self._pread(0, HEAD_BYTES))
            self._check_kind(kind if kind is not TORCH_ZIP else None)
            found = (
                f"not one complete zip file ({self.file_size} bytes; {error}): truncated,"
                " overwritten, or joined"
            )
            raise corrupt_file_error(self.path, found) from error
        self._check_kind(kind_by_records([entry.name for entry in entries]))
        records: dict[str, _Record] = {}
        tops = set()
        for entry in entries:
            top, _, name = entry.name.partition("/")
            tops.add(top)
            if name in records:
                raise corrupt_file_error(self.path, f"record {entry.name} is in it twice")
            if entry.method or entry.flags & 0x1 or entry.stored != entry.size:
                found = f"record {entry.name} is compressed or encrypted, torch never writes that"
                raise corrupt_file_error(self.path, found)
            records[name] = _Record(self._payload_start(entry), entry.size, entry.crc)
        if len(tops) != 1 or "data.pkl" not in records:
            found = "a zip file that torch.save did not write (no data.pkl under one top folder)"
            raise corrupt_file_error(self.path, found)
        self.top = tops.pop()
        self._records = records
        if "byteorder" in records and self._byteorder() != b"little":
            raise corrupt_file_error(
                self.path, "tensors in big-endian byte order", "save on a little-endian machine"
            )

    def _check_kind(self, kind: FileKind | None) -> None:
        if kind is None:
            return
        fix = kind.fix
        if kind is OLD_TORCH and self.path.name.endswith("_states.pt"):
            fix = (
                "write every file again under its own name, if you trust it:"
                " torch.save(torch.load(FILE, weights_only=False), FILE); or save with"
                ' "checkpoint": {"checkpoint_serialization": true} in the DeepSpeed config'
            )
        raise UserError(f"a file written by torch.save at {self.path}", kind.found, fix)

    def _byteorder(self) -> bytes:
        # A record of any size may have that name.
        if self.records["byteorder"].size > len(b"little"):
            return b""
        return self.read_record("byteorder")

    def _payload_start(self, entry: ZipEntry) -> int:
        # The directory does not record the length of the local header's extra field, which torch
        # pads to align.
        header = self._pread(entry.header_offset, 30) if entry.header_offset >= 0 else b""
        if len(header) != 30 or header[:4] != b"PK\x03\x04":
            raise corrupt_file_error(
                self.path, f"no local header where record {entry.name} should start"
            )
        name_length, extra_length = struct.unpack("<HH", header[26:30])
        start = entry.header_offset + 30 + name_length + extra_length
        if start + entry.size > self.file_size:
            raise corrupt_file_error(
                self.path, f"record {entry.name} runs past the end of the file"
            )
        return start

    def close(self) -> None:
        """Close the descriptor, if this object opened it."""
        if self._fd >= 0 and self._owns_fd:
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- reading ----------------------------------------------------------------------------------

    def _pread(self, position: int, count: int) -> bytes:
        """Return up to `count` bytes of the zip."""
        return os.pread(self._fd, count, self._base + position)

    def read_into(self, name: str, start: int, view: memoryview) -> int | None:
        """Fill `view` with the record's bytes from `start`; return their CRC-32 if it was
        computed. Thread-safe.
        """
        record = self.records[name]
        end = start + len(view)
        if start < 0 or end > record.size:
            found = (
                f"a tensor needs bytes {start}..{end} of record {name}, which has {record.size}"
            )
            raise corrupt_file_error(self.path, found)
        read_exactly(self.path, self._fd, view, self._base + record.start + start)
        if not record.is_verified and view:
            record.is_touched = True
            return record.read.add(start, view)
        return None

    def _read_remaining(self, name: str, gaps: list[tuple[int, int]]) -> None:
        """Read, for the CRC alone, the bytes that were not requested."""
        record = self.records[name]
        buffer = bytearray(min(CHUNK_BYTES, max((end - start for start, end in gaps), default=0)))
        for start, end in gaps:
            for low in range(start, end, CHUNK_BYTES):
                view = memoryview(buffer)[: min(CHUNK_BYTES, end - low)]
                read_exactly(self.path, self._fd, view, self._base + record.start + low)
                record.read.add(low, view)

    def check_record(self, name: str) -> None:
        """Read the rest of a record and compare its CRC.

        Raises:
            UserError: the CRC differs.
        """
        record = self.records[name]
        if record.is_verified:
            return
        self._read_remaining(name, record.read.gaps(record.size))
        _, crc = record.read.value()
        if crc != record.crc and not any(other.crc for other in self.records.values()):
            found = "no checksums: it was saved after torch.serialization.set_crc32_options(False)"
            raise UserError(
                f"a file with checksums at {self.path}",
                found,
                "save it again with set_crc32_options(True)",
            )
        if crc != record.crc:
            raise corrupt_file_error(
                self.path,
                f"record {name} ({record.size} bytes) has CRC {crc:08x}, the file says"
                f" {record.crc:08x}: its bytes changed after it was saved",
            )
        record.is_verified = True

    def verify_read_records(self) -> None:
        """Verify the CRC of every record that was read; with random access, only of records that
        were read completely (except for padding).
        """
        for name, record in (self._records or {}).items():
            if record.is_touched and not record.is_verified:
                gaps = record.read.gaps(record.size) if self.random_access else []
                if sum(end - start for start, end in gaps) <= PADDING_BYTES * (1 + len(gaps)):
                    self.check_record(name)

    def read_record(self, name: str) -> bytes:
        """Return a complete record, verified."""
        buffer = bytearray(self.records[name].size)
        self.read_into(name, 0, memoryview(buffer))
        self.check_record(name)
        return bytes(buffer)

    def load(self) -> Any:
        """Return the saved object with tensors as TensorRef (see unpickler).

        Raises:
            UserError: the description is damaged, too long, or asks for anything but tensors and
                plain values.
        """
        size = self.records["data.pkl"].size
        if size > MAX_PICKLE_BYTES:
            raise corrupt_file_error(
                self.path, f"a description of tensors of {size} bytes, far too long"
            )
        try:
            return read_pickle(self.read_record("data.pkl"), self.foreign_objects)
        except RefusedPickle as error:
            raise UserError(
                f"only tensors and plain values in {self.path}",
                f"{error}; nothing was executed",
                "use a checkpoint from a source you trust; if it is yours, save that object"
                " outside the checkpoint",
            ) from error

    def load_dict(self) -> dict:
        """Return load(), which must be a dict.

        Raises:
            UserError: as load(), or the object is not a dict.
        """
        value = self.load()
        if not isinstance(value, dict):
            raise corrupt_file_error(self.path, f"a {type(value).__name__} instead of a dict")
        return value

    # -- tensors ----------------------------------------------------------------------------------

    def check_ref(self, ref: TensorRef, what: str) -> None:
        """Raise UserError if a tensor's description does not fit the record of its storage."""
        record = self.records.get(f"data/{ref.key}")
        if record is None:
            raise corrupt_file_error(
                self.path, f"the storage of {what} (record data/{ref.key}) is not in the file"
            )
        itemsize = DTYPES[ref.dtype].itemsize
        needed = (ref.offset + ref.extent) * itemsize
        if needed > record.size or ref.storage_elements * itemsize > record.size:
            found = (
                f"{what} needs {needed} bytes of record data/{ref.key}, which has {record.size}"
            )
            raise corrupt_file_error(self.path, found)
        # An expanded tensor has strides of 0: it claims more elements than its storage has.
        if ref.numel * itemsize > max(64 << 20, 2 * ref.extent * itemsize):
            found = f"{what} claims {ref.numel} elements over a storage range of {ref.extent}"
            raise corrupt_file_error(self.path, found)

    def position_of(self, ref: TensorRef, start: int = 0) -> int:
        """Return the position of element `start` of a tensor, in bytes from the start of
        the file.
        """
        offset = (ref.offset + start) * DTYPES[ref.dtype].itemsize
        return self._base + self.records[f"data/{ref.key}"].start + offset

    def read_elements_into(self, ref: TensorRef, start: int, view: memoryview) -> int | None:
        """Fill `view` with the bytes of the elements from `start` of a contiguous tensor.

        Returns:
            Their CRC-32 if it was computed.
        """
        if not view:
            return None
        if ref.negated or ref.conjugated:
            fix = "save .resolve_conj().resolve_neg() of it"
            raise UserError(
                f"numbers as they are stored in {self.path}",
                "a negative or conjugate view of a tensor",
                fix,
            )
        return self.read_into(
            f"data/{ref.key}", (ref.offset + start) * DTYPES[ref.dtype].itemsize, view
        )

    def read_elements(self, ref: TensorRef, start: int, count: int) -> np.ndarray:
        """Return elements [start, start + count) of a contiguous tensor, flat, as
        DTYPES[ref.dtype].raw.
        """
        out = np.empty(count, DTYPES[ref.dtype].raw)
        self.read_elements_into(ref, start, out.view(np.uint8).data)
        return out

    def read_number(self, ref: TensorRef) -> float | int | None:
        """Return the number in a tensor of one element; None for any other tensor."""
        if ref.numel != 1 or ref.dtype not in NUMBERS:
            return None
        self.check_ref(ref, "a number")
        return self.read_elements(ref, 0, 1)[0].item()

    def read_strided(self, ref: TensorRef, what: str) -> np.ndarray:
        """Return a complete tensor that is stored in another form (a transpose, an expand, a
        negative view), flat.
        """
        self.check_ref(ref, what)
        itemsize = DTYPES[ref.dtype].itemsize
        span = self.read_elements(
            TensorRef(ref.dtype, (ref.extent,), (1,), ref.key, ref.offset, 0), 0, ref.extent
        )
        strides = tuple(stride * itemsize for stride in ref.stride)
        values = np.lib.stride_tricks.as_strided(
            span, ref.shape, strides, writeable=False
        ).flatten()
        if ref.conjugated:
            values = np.conjugate(values)
        return negate(values, ref.dtype) if ref.negated else values


# -- The directory of a zip file ------------------------------------------------------------------

_END, _END64, _LOCATOR, _ENTRY = 0x06054B50, 0x06064B50, 0x07064B50, 0x02014B50
# These bytes hold the complete directory of a small zip.
_TAIL_BYTES = 4096
_FULL32 = 0xFFFFFFFF


class ZipEntry(NamedTuple):
    """One record of a zip directory: name, CRC-32, stored and unpacked size, position of its local
    header.
    """

    name: str
    crc: int
    stored: int
    size: int
    header_offset: int
    method: int
    flags: int


class BadZip(ValueError):
    """Not a zip file, or a damaged directory."""


def read_directory(size: int, read: Callable[[int, int], bytes]) -> list[ZipEntry]:
    """Return the entries of a zip file.

    Args:
        size: Size of the zip in bytes.
        read: (first byte, number) -> bytes; fewer at the end.

    Raises:
        BadZip: not a zip file, truncated, bytes before or after it, or an inconsistent directory.
    """
    tail_at = max(0, size - _TAIL_BYTES)
    tail = read(tail_at, size - tail_at)
    end_at = size - 22
    # torch writes no comment, so the end record is the end of the file.
    if size < 22 or tail[-22:-18] != struct.pack("<I", _END) or tail[-2:] != b"\0\0":
        raise BadZip("no end record in its last 22 bytes")
    _, disk, first_disk, count_here, count, length, at, _ = struct.unpack("<IHHHHIIH", tail[-22:])
    if disk or first_disk or count_here != count:
        raise BadZip("a zip file in several parts")
    limit, locator_at = end_at, end_at - 20
    locator = read(locator_at, 20) if locator_at >= 0 else b""
    if locator[:4] == struct.pack("<I", _LOCATOR):
        # torch always writes a locator.
        limit = struct.unpack("<IIQI", locator)[2]
        # The record must end exactly at its locator: of two joined files with equal layouts, the
        # position that the second names lies in the first.
        record = read(limit, 56) if limit + 56 == locator_at else b""
        if len(record) != 56 or record[:4] != struct.pack("<I", _END64):
            raise BadZip("no zip64 end record where its locator points")
        count, length, at = struct.unpack("<IQHHIIQQQQ", record)[7:]
    if at + length != limit:
        raise BadZip(f"a directory of bytes {at}..{at + length}, which should end at {limit}")
    inside = at >= tail_at
    data = tail[at - tail_at : at - tail_at + length] if inside else read(at, length)
    if len(data) != length:
        raise BadZip("a truncated directory")
    entries = _entries(data, count)
    first = min((entry.header_offset for entry in entries), default=0)
    if first:
        raise BadZip(f"{first} bytes before its first record")
    return entries


def _entries(data: bytes, count: int) -> list[ZipEntry]:
    entries, at = [], 0
    for _ in range(count):
        if at + 46 > len(data):
            raise BadZip("a directory that ends in an entry")
        # Versions, times and attributes are skipped.
        fields = struct.unpack("<I4xHH4xIIIHHHH6xI", data[at : at + 46])
        signature, flags, method, crc, stored, size, *lengths, disk, header_offset = fields
        len_name, len_extra, len_comment = lengths
        if signature != _ENTRY or disk not in (0, 0xFFFF):
            raise BadZip(f"no entry at byte {at} of the directory")
        at += 46
        try:
            name = data[at : at + len_name].decode("utf-8" if flags & 0x800 else "cp437")
        except UnicodeDecodeError as error:
            raise BadZip("a record name that is not text") from error
        extra = data[at + len_name : at + len_name + len_extra]
        if _FULL32 in (stored, size, header_offset):
            size, stored, header_offset = _widen(extra, size, stored, header_offset)
        at += len_name + len_extra + len_comment
        entries.append(ZipEntry(name, crc, stored, size, header_offset, method, flags))
    if at != len(data):
        raise BadZip(f"{len(data) - at} bytes of the directory belong to no entry")
    return entries


def _widen(extra: bytes, *values: int) -> list[int]:
    """Return the values, those beyond 32 bits from the zip64 extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack("<HH", extra[at : at + 4])
        if kind == 1:
            field, widened = extra[at + 4 : at + 4 + length], []
            for value in values:
                if value == _FULL32:
                    if len(field) < 8:
                        raise BadZip("a zip64 field that is too short")
                    value, field = struct.unpack("<Q", field[:8])[0], field[8:]
                widened.append(value)
            return widened
        at += 4 + length
    return list(values)
