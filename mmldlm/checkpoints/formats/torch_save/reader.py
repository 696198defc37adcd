"""The zip file behind torch.save: where each record lies, and reading it by ranges with its CRC checked on the way.

Layout (torch/csrc/jit/serialization.cc and torch/serialization.py): records are stored uncompressed under one top
folder named after the file; `data.pkl` describes the objects, `data/<key>` holds one storage each.

Two ways of reading; in both the CRC runs along. Proving (the converter): check_touched() reads what is left of every
record of which any byte was given out, and so proves them. Ranged (a rank that loads its share): only the bytes asked
for are read, and only a record that was read whole (padding aside) is compared with its CRC; the whole file must have
been checked before, by the manifest's checksums (manifest.verify), which one rank does for all.
"""

from __future__ import annotations

import errno
import os
import resource
import struct
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.formats.dtypes import DTYPES
from mmldlm.checkpoints.formats.torch_save.unpickler import RefusedPickle, TensorRef, read_pickle
from mmldlm.checkpoints.formats.torch_save.zip_directory import BadZip, Entry, read_directory
from mmldlm.checkpoints.io.crc32 import RangedCrc32
from mmldlm.checkpoints.late_numpy import np
from mmldlm.errors import UserError

# A chunk and what is worked out from it should stay in the processor's cache: 4 MiB took a third more CPU time, 1 MiB
# half as much more of the kernel's.
CHUNK_BYTES = 1 << 19
# Flat weights are padded by a few elements a rank, which nobody asks for: reading over them keeps the CRC running.
PADDING_BYTES = 4096
# Of a file's head and tail, which hold all descriptions of a small one: DCP's files are hundreds of such back to back.
_NEAR_BYTES = 4096
# Descriptions of tensors are small; a larger one is a trick or not a checkpoint of weights.
MAX_PICKLE_BYTES = 512 << 20


def corrupt_file_error(
    path: Path, found: str, fix: str = "copy the file again from where it was saved, or use an older checkpoint"
):
    """The error for a file that cannot be trusted."""
    return UserError(f"an intact checkpoint file {path}", found, fix)


def raise_file_limit(error: OSError) -> None:
    """Raises `error` again unless it says that too many files are open; then allows as many as the system does.

    A checkpoint of many ranks has more files than the usual soft limit of 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if error.errno != errno.EMFILE or soft == hard:
        raise error
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_for_reading(path: Path) -> int:
    """A file descriptor; UserError naming the file where it cannot be opened."""
    try:
        try:
            return os.open(path, os.O_RDONLY)
        except OSError as error:
            raise_file_limit(error)
            return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise corrupt_file_error(path, f"it cannot be opened: {error.strerror}") from error


class _Record:
    __slots__ = ("start", "size", "crc", "read", "is_touched", "is_good")

    def __init__(self, start: int, size: int, crc: int):
        self.start = start  # of the payload, in bytes from the zip's start
        self.size, self.crc = size, crc
        self.read = RangedCrc32()  # the CRC runs along with reading
        self.is_touched = self.is_good = False


class TorchFile:
    """One file written by torch.save, opened without torch. Use as a context manager or call close().

    Args:
        path: the file; the name that errors give.
        is_ranged: read only what is asked for, without its CRC (see the module's text).
        window: (first byte, number of bytes) of the zip inside a larger file (an item of DCP); None for all of it.
        fd: an open descriptor of `path`, which the caller closes; None to open and close one here.

    Raises (at construction and while reading):
        UserError: not a zip file of torch, truncated, compressed, wrong byte order, a CRC that disagrees.
    """

    def __init__(
        self,
        path: Path | str,
        is_ranged: bool = False,
        window: tuple[int, int] | None = None,
        fd: int | None = None,
    ):
        self.path = path if isinstance(path, Path) else Path(path)
        self.is_ranged = is_ranged
        self._owns_fd = fd is None
        self._near: list[tuple[int, bytes]] = []  # (first byte, bytes) read already, until load() is done
        self._fd = open_for_reading(self.path) if fd is None else fd
        try:
            size = os.fstat(self._fd).st_size
            self._base, self.file_size = window or (0, size)
            if self._base + self.file_size > size:
                raise corrupt_file_error(
                    self.path, f"it ends at byte {size}, an item of it at {self._base + self.file_size}"
                )
            self._index()
        except BaseException:
            self.close()
            raise

    def _index(self) -> None:
        try:
            self._near.append((0, self._read_at(0, min(_NEAR_BYTES, self.file_size))))
            entries = read_directory(self.file_size, self._read_at)
        except (BadZip, OSError) as error:
            if self._starts_with(b"\x80"):
                raise corrupt_file_error(
                    self.path,
                    "torch's old format (not a zip file), whose bytes carry no checksums",
                    'save with "checkpoint": {"checkpoint_serialization": true} in the DeepSpeed config',
                ) from error
            raise corrupt_file_error(
                self.path, f"no zip file of {self.file_size} bytes ({error}): cut off or overwritten"
            ) from error
        self.records: dict[str, _Record] = {}
        tops = set()
        for entry in entries:
            top, _, name = entry.name.partition("/")
            tops.add(top)
            if name in self.records:
                raise corrupt_file_error(self.path, f"record {entry.name} stands in it twice")
            if entry.method or entry.flags & 0x1 or entry.stored != entry.size:
                raise corrupt_file_error(
                    self.path, f"record {entry.name} is compressed or encrypted, torch never writes that"
                )
            self.records[name] = _Record(self._payload_start(entry), entry.size, entry.crc)
        if len(tops) != 1 or "data.pkl" not in self.records:
            raise corrupt_file_error(
                self.path, "a zip file that torch.save did not write (no data.pkl under one top folder)"
            )
        self.top = tops.pop()
        if "byteorder" in self.records and self.read_record("byteorder") != b"little":
            raise corrupt_file_error(self.path, "tensors in big-endian byte order", "save on a little-endian machine")

    def _starts_with(self, prefix: bytes) -> bool:
        return os.pread(self._fd, len(prefix), self._base) == prefix

    def _read_at(self, position: int, count: int) -> bytes:
        """Bytes of the zip's directory and headers, fewer at its end."""
        data = self._find_near(position, count)
        if data is None:
            data = os.pread(self._fd, count, self._base + position)
            if position and count >= _NEAR_BYTES:
                self._near.append((position, data))
        return data

    def _find_near(self, position: int, count: int) -> bytes | None:
        for start, data in self._near:
            if start <= position and position + count <= start + len(data):
                return data[position - start : position - start + count]
        return None

    def _payload_start(self, entry: Entry) -> int:
        # The central directory does not say how long the local header's extra field is; torch pads there to align.
        header = self._read_at(entry.header_at, 30)
        if len(header) != 30 or header[:4] != b"PK\x03\x04":
            raise corrupt_file_error(self.path, f"no local header where record {entry.name} should start")
        name_length, extra_length = struct.unpack("<HH", header[26:30])
        start = entry.header_at + 30 + name_length + extra_length
        if start + entry.size > self.file_size:
            raise corrupt_file_error(self.path, f"record {entry.name} runs past the end of the file")
        return start

    def close(self) -> None:
        if self._fd >= 0 and self._owns_fd:
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- reading ------------------------------------------------------------------------------------------------

    def _pread_into(self, view: memoryview, position: int) -> None:
        if self._near and (data := self._find_near(position, len(view))) is not None:
            view[:] = data
            return
        done = 0
        while done < len(view):
            got = os.preadv(self._fd, [view[done:]], self._base + position + done)
            if got == 0:
                raise corrupt_file_error(self.path, f"the file ends at byte {position + done} while it is being read")
            done += got

    def read_into(self, name: str, start: int, view: memoryview) -> int | None:
        """Fills `view` with the record's bytes from `start`; their CRC-32, where it was worked out.

        Several threads may read at once.
        """
        record = self.records[name]
        end = start + len(view)
        if start < 0 or end > record.size:
            raise corrupt_file_error(
                self.path, f"a tensor needs bytes {start}..{end} of record {name}, which has {record.size}"
            )
        self._pread_into(view, record.start + start)
        if not record.is_good and view:
            record.is_touched = True
            return record.read.add(start, view)
        return None

    def _read_gaps(self, name: str, gaps: list[tuple[int, int]]) -> None:
        """Reads, for the CRC alone, what nobody asked for."""
        record = self.records[name]
        buffer = bytearray(min(CHUNK_BYTES, max((end - start for start, end in gaps), default=0)))
        for start, end in gaps:
            for low in range(start, end, CHUNK_BYTES):
                view = memoryview(buffer)[: min(CHUNK_BYTES, end - low)]
                self._pread_into(view, record.start + low)
                record.read.add(low, view)

    def check_record(self, name: str) -> None:
        """Reads what is left of a record and compares its CRC."""
        record = self.records[name]
        if record.is_good:
            return
        self._read_gaps(name, record.read.gaps(record.size))
        _, crc = record.read.value()
        if crc != record.crc:
            raise corrupt_file_error(
                self.path,
                f"record {name} ({record.size} bytes) has CRC {crc:08x}, the file says {record.crc:08x}: "
                "its bytes changed after it was saved",
            )
        record.is_good = True

    def check_touched(self) -> None:
        """check_record for every record of which any byte was read: after this the bytes given out are proven.

        In ranged mode only the records of which nothing but padding was left unread; the rest is the manifest's.
        """
        for name, record in self.records.items():
            if record.is_touched and not record.is_good:
                gaps = record.read.gaps(record.size) if self.is_ranged else []
                if sum(end - start for start, end in gaps) <= PADDING_BYTES * (1 + len(gaps)):
                    self.check_record(name)

    def read_record(self, name: str) -> bytes:
        """A whole record, checked."""
        buffer = bytearray(self.records[name].size)
        self.read_into(name, 0, memoryview(buffer))
        self.check_record(name)
        return bytes(buffer)

    def load(self) -> Any:
        """The saved object, tensors as TensorRef (see zero_pickle)."""
        if self.records["data.pkl"].size > MAX_PICKLE_BYTES:
            raise corrupt_file_error(
                self.path, f"a description of {self.records['data.pkl'].size} bytes, far too long for one"
            )
        try:
            description = self.read_record("data.pkl")
            self._near = []
            return read_pickle(description)
        except RefusedPickle as error:
            raise UserError(
                f"{self.path} to hold tensors and plain values only",
                f"{error}; nothing was executed",
                "use a checkpoint from a source you trust; if it is yours, save that object outside the checkpoint",
            ) from error

    def check_ref(self, ref: TensorRef, what: str) -> None:
        """Raises UserError where a tensor's description does not fit its storage's record."""
        record = self.records.get(f"data/{ref.key}")
        if record is None:
            raise corrupt_file_error(self.path, f"the storage of {what} (record data/{ref.key}) is not in the file")
        itemsize = DTYPES[ref.dtype].itemsize
        if (ref.offset + ref.extent) * itemsize > record.size or ref.storage_elements * itemsize > record.size:
            raise corrupt_file_error(
                self.path,
                f"{what} needs {(ref.offset + ref.extent) * itemsize} bytes of record data/{ref.key}, "
                f"which has {record.size}",
            )

    def position_of(self, ref: TensorRef, start: int = 0) -> int:
        """Where element `start` of a tensor lies, in bytes from the file's start."""
        offset = (ref.offset + start) * DTYPES[ref.dtype].itemsize
        return self._base + self.records[f"data/{ref.key}"].start + offset

    def check_ref_crc(self, ref: TensorRef) -> None:
        """check_record of the record that a tensor lies in."""
        self.check_record(f"data/{ref.key}")

    def read_elements_into(self, ref: TensorRef, start: int, view: memoryview) -> int | None:
        """Fills `view` with the bytes of the elements from `start` of a contiguous tensor.

        Returns their CRC-32, where it was worked out.
        """
        if not view:
            return None
        return self.read_into(f"data/{ref.key}", (ref.offset + start) * DTYPES[ref.dtype].itemsize, view)

    def read_elements(self, ref: TensorRef, start: int, count: int) -> np.ndarray:
        """Elements [start, start + count) of a contiguous tensor, flat, as DTYPES[ref.dtype].raw."""
        out = np.empty(count, DTYPES[ref.dtype].raw)
        self.read_elements_into(ref, start, memoryview(out.view(np.uint8)))
        return out

    def read_strided(self, ref: TensorRef, what: str) -> np.ndarray:
        """A whole tensor that is not contiguous (a saved transpose or expand), flat in row-major order."""
        self.check_ref(ref, what)
        itemsize = DTYPES[ref.dtype].itemsize
        if ref.numel * itemsize > max(64 << 20, 2 * ref.extent * itemsize):
            raise corrupt_file_error(
                self.path, f"{what} claims {ref.numel} elements over a storage range of {ref.extent}"
            )
        span = self.read_elements(TensorRef(ref.dtype, (ref.extent,), (1,), ref.key, ref.offset, 0), 0, ref.extent)
        strides = tuple(stride * itemsize for stride in ref.stride)
        return np.lib.stride_tricks.as_strided(span, ref.shape, strides, writeable=False).flatten()
