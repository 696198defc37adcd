"""Read the zip file behind torch.save by ranges, verifying CRCs, without torch.

Layout (torch/csrc/jit/serialization.cc and torch/serialization.py): records are stored
uncompressed under one top folder named after the file. `data.pkl` describes the objects,
`data/<key>` holds one storage each.

Two modes; both compute CRCs while reading:

* Complete (converter): verify_read_records() reads the rest of every record that was touched, and
  so verifies it.
* Random access (a rank that loads its share): only the requested bytes are read. A record that was
  read from end to end, padding aside, is compared with its CRC. The file must have been verified
  against the manifest before.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.checkpoints.formats.dtypes import DTYPES, negate
from mmldlm.checkpoints.formats.file_kinds import FileKind, kind_by_bytes, kind_by_records
from mmldlm.checkpoints.formats.torch_save.unpickler import RefusedPickle, TensorRef, read_pickle
from mmldlm.checkpoints.formats.torch_save.zip_directory import BadZip, ZipEntry, read_directory
from mmldlm.checkpoints.io.crc32 import RangedCrc32
from mmldlm.checkpoints.io.open_files import open_regular_descriptor
from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_os_error

# A chunk and its cast copy should fit the processor's cache; smaller chunks cost more system
# calls.
CHUNK_BYTES = 1 << 19
# Flat weights are padded by a few elements per rank; reading over them keeps the CRC contiguous.
PADDING_BYTES = 4096
# Descriptions of tensors are small; a larger one is an attack or not a checkpoint of weights.
MAX_PICKLE_BYTES = 512 << 20
SAME_SAVE_HINT = "restore all files from the same save"
_ZIP_ERRORS = (BadZip, OSError, OverflowError, struct.error)


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


class _Record:
    __slots__ = ("start", "size", "crc", "read", "is_touched", "is_verified")

    def __init__(self, start: int, size: int, crc: int):
        self.start = start  # of the payload, in bytes from the start of the zip
        self.size, self.crc = size, crc
        self.read = RangedCrc32()
        self.is_touched = self.is_verified = False


class TorchFile:
    """One file written by torch.save. Use as a context manager or call close().

    Args:
        path: the file, named in errors.
        random_access: read only what is requested (see the module docstring).
        fd: an open descriptor of `path` that the caller closes; None to open and close one here.
        window: (first byte, number of bytes) of the zip inside a larger file; None for the
            complete file.

    Attributes:
        foreign_objects: classes of other programs that load() met; their objects were not built.

    Raises (at construction and while reading):
        UserError: not a zip file of torch, truncated, compressed, wrong byte order, a CRC
            mismatch.
    """

    def __init__(
        self,
        path: Path | str,
        random_access: bool = False,
        fd: int | None = None,
        window: tuple[int, int] | None = None,
    ):
        self.path = Path(path)
        self.random_access = random_access
        self.foreign_objects: set[str] = set()
        self._owns_fd = fd is None
        self._fd = open_for_reading(self.path) if fd is None else fd
        try:
            size = os.fstat(self._fd).st_size
            self._base, self.file_size = window or (0, size)
            if self._base + self.file_size > size:
                found = f"it ends at byte {size}, an item of it at {self._base + self.file_size}"
                raise corrupt_file_error(self.path, found)
            self._index()
        except BaseException:
            self.close()
            raise

    def _index(self) -> None:
        try:
            entries = self._read_directory()
        except _ZIP_ERRORS as error:
            self._check_kind(kind_by_bytes(self._pread(0, 512)))
            found = (
                f"not one complete zip file ({self.file_size} bytes; {error}): truncated,"
                " overwritten, or joined"
            )
            raise corrupt_file_error(self.path, found) from error
        self._check_kind(kind_by_records([entry.name for entry in entries]))
        self.records: dict[str, _Record] = {}
        tops = set()
        for entry in entries:
            top, _, name = entry.name.partition("/")
            tops.add(top)
            if name in self.records:
                raise corrupt_file_error(self.path, f"record {entry.name} is in it twice")
            if entry.method or entry.flags & 0x1 or entry.stored != entry.size:
                found = f"record {entry.name} is compressed or encrypted, torch never writes that"
                raise corrupt_file_error(self.path, found)
            self.records[name] = _Record(self._payload_start(entry), entry.size, entry.crc)
        if len(tops) != 1 or "data.pkl" not in self.records:
            found = "a zip file that torch.save did not write (no data.pkl under one top folder)"
            raise corrupt_file_error(self.path, found)
        self.top = tops.pop()
        if "byteorder" in self.records and self._byteorder() != b"little":
            raise corrupt_file_error(
                self.path, "tensors in big-endian byte order", "save on a little-endian machine"
            )

    def _check_kind(self, kind: FileKind | None) -> None:
        if kind is None:
            return
        fix = kind.fix
        if self.path.name.endswith("_states.pt"):
            fix = (
                'save with "checkpoint": {"checkpoint_serialization": true} in the DeepSpeed'
                " config"
            )
        raise UserError(f"a file written by torch.save at {self.path}", kind.found, fix)

    def _read_directory(self) -> list[ZipEntry]:
        return read_directory(self.file_size, self._pread)

    def _byteorder(self) -> bytes:
        if self.records["byteorder"].size > len(
            b"little"
        ):  # a record of any size may have that name
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

    # -- reading
    # ---------------------------------------------------------------------------------------------

    def _pread(self, position: int, count: int) -> bytes:
        """Return up to `count` bytes of the zip."""
        return os.pread(self._fd, count, self._base + position)

    def _pread_into(self, view: memoryview, position: int) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], self._base + position + done)
            if count == 0:
                raise corrupt_file_error(
                    self.path, f"the file ends at byte {position + done} while it is being read"
                )
            done += count

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
        self._pread_into(view, record.start + start)
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
                self._pread_into(view, record.start + low)
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
        """Call check_record for every record of which any byte was read.

        With random access, only for the records of which nothing but padding is unread.
        """
        for name, record in self.records.items():
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

    # -- tensors
    # ---------------------------------------------------------------------------------------------

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
        if ref.numel * itemsize > max(
            64 << 20, 2 * ref.extent * itemsize
        ):  # expanded: strides of 0
            found = f"{what} claims {ref.numel} elements over a storage range of {ref.extent}"
            raise corrupt_file_error(self.path, found)

    def position_of(self, ref: TensorRef, start: int = 0) -> int:
        """Return the position of element `start` of a tensor, in bytes from the start of
        the file.
        """
        offset = (ref.offset + start) * DTYPES[ref.dtype].itemsize
        return self._base + self.records[f"data/{ref.key}"].start + offset

    def check_ref_crc(self, ref: TensorRef) -> None:
        """Call check_record for the record that stores a tensor."""
        self.check_record(f"data/{ref.key}")

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
        self.read_elements_into(ref, start, memoryview(out.view(np.uint8)))
        return out

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
