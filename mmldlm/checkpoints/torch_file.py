"""The zip file behind torch.save: where each record lies, and reading it by ranges with its CRC checked on the way.

Layout (torch/csrc/jit/serialization.cc and torch/serialization.py): records are stored uncompressed under one top
folder named after the file; `data.pkl` describes the objects, `data/<key>` holds one storage each.

Two ways of reading. Proving (the converter): the CRC runs along from each record's start, so what lies before a range
is read too, and check_touched() proves every byte given out. Ranged (a rank that loads its share): only the bytes asked
for are read, and only a record read in order from its start to its end (padding aside) is compared with its CRC; the
whole file must have been checked before, by the manifest's checksums (manifest.verify), which one rank does for all.
"""

from __future__ import annotations

import errno
import io
import os
import resource
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.checkpoints.dtypes import DTYPES
from mmldlm.checkpoints.zero_pickle import RefusedPickle, TensorRef, read_pickle
from mmldlm.errors import UserError

# A chunk and what is worked out from it should stay in the processor's cache: 4 MiB took a third more CPU time.
CHUNK_BYTES = 1 << 20
# Flat weights are padded by a few elements a rank, which nobody asks for: reading over them keeps the CRC running.
PADDING_BYTES = 4096
# Descriptions of tensors are small; a larger one is a trick or not a checkpoint of weights.
MAX_PICKLE_BYTES = 512 << 20


def damaged(
    path: Path, found: str, fix: str = "copy the file again from where it was saved, or use an older checkpoint"
):
    """The error for a file that cannot be trusted."""
    return UserError(f"an intact checkpoint file {path}", found, fix)


def open_for_reading(path: Path) -> int:
    """A file descriptor; UserError naming the file where it cannot be opened."""
    try:
        try:
            return os.open(path, os.O_RDONLY)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            # A checkpoint of many ranks has more files than the usual soft limit of 1024 allows at once.
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise damaged(path, f"it cannot be opened: {error.strerror}") from error


@dataclass
class _Record:
    start: int  # of the payload, in bytes from the zip's start
    size: int
    crc: int
    # The CRC runs along with reading: `checked` bytes from the record's start are in `running`.
    checked: int = 0
    running: int = 0
    is_good: bool = False


class _Window(io.RawIOBase):
    """`size` bytes of an open file from `base`, as a file of their own; reads move no shared position."""

    def __init__(self, fd: int, base: int, size: int):
        self._fd, self._base, self._size, self._at = fd, base, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if at < 0:
            raise ValueError(f"a position before the start ({at})")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._at))
        got = os.preadv(self._fd, [memoryview(buffer)[:count]], self._base + self._at) if count else 0
        self._at += got
        return got


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
        self.path = Path(path)
        self.is_ranged = is_ranged
        self._owns_fd = fd is None
        self._fd = open_for_reading(self.path) if fd is None else fd
        try:
            size = os.fstat(self._fd).st_size
            self._base, self.file_size = window or (0, size)
            if self._base + self.file_size > size:
                raise damaged(self.path, f"it ends at byte {size}, an item of it at {self._base + self.file_size}")
            self._index()
        except BaseException:
            self.close()
            raise

    def _index(self) -> None:
        try:
            stream = io.BufferedReader(_Window(self._fd, self._base, self.file_size))
            with stream, zipfile.ZipFile(stream) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, struct.error, NotImplementedError) as error:
            if self._starts_with(b"\x80"):
                raise damaged(
                    self.path,
                    "torch's old format (not a zip file), whose bytes carry no checksums",
                    'save with "checkpoint": {"checkpoint_serialization": true} in the DeepSpeed config',
                ) from error
            raise damaged(
                self.path, f"no zip file of {self.file_size} bytes ({error}): cut off or overwritten"
            ) from error
        self.records: dict[str, _Record] = {}
        tops = set()
        for info in infos:
            top, _, name = info.filename.partition("/")
            tops.add(top)
            if name in self.records:
                raise damaged(self.path, f"record {info.filename} stands in it twice")
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 0x1:
                raise damaged(self.path, f"record {info.filename} is compressed or encrypted, torch never writes that")
            self.records[name] = _Record(self._payload_start(info), info.file_size, info.CRC)
        if len(tops) != 1 or "data.pkl" not in self.records:
            raise damaged(self.path, "a zip file that torch.save did not write (no data.pkl under one top folder)")
        self.top = tops.pop()
        if "byteorder" in self.records and self.read_record("byteorder") != b"little":
            raise damaged(self.path, "tensors in big-endian byte order", "save on a little-endian machine")

    def _starts_with(self, prefix: bytes) -> bool:
        return os.pread(self._fd, len(prefix), self._base) == prefix

    def _payload_start(self, info: zipfile.ZipInfo) -> int:
        # The central directory does not say how long the local header's extra field is; torch pads there to align.
        header = os.pread(self._fd, 30, self._base + info.header_offset)
        if len(header) != 30 or header[:4] != b"PK\x03\x04":
            raise damaged(self.path, f"no local header where record {info.filename} should start")
        name_length, extra_length = struct.unpack("<HH", header[26:30])
        start = info.header_offset + 30 + name_length + extra_length
        if start + info.file_size > self.file_size:
            raise damaged(self.path, f"record {info.filename} runs past the end of the file")
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
        done = 0
        while done < len(view):
            got = os.preadv(self._fd, [view[done:]], self._base + position + done)
            if got == 0:
                raise damaged(self.path, f"the file ends at byte {position + done} while it is being read")
            done += got

    def read_into(self, name: str, start: int, view: memoryview) -> None:
        """Fills `view` with the record's bytes from `start`; what lies before is read too, once, for the CRC.

        In ranged mode what lies before is left alone, and the CRC runs along only as far as reading is in order.
        """
        record = self.records[name]
        end = start + len(view)
        if start < 0 or end > record.size:
            raise damaged(self.path, f"a tensor needs bytes {start}..{end} of record {name}, which has {record.size}")
        if start > record.checked:
            if self.is_ranged and start - record.checked > PADDING_BYTES:
                self._pread_into(view, record.start + start)
                return
            self._run_crc(name, start)
        self._pread_into(view, record.start + start)
        if end > record.checked:
            record.running = zlib.crc32(view[record.checked - start :], record.running)
            record.checked = end
        if record.checked == record.size and not record.is_good:
            self._compare_crc(name)

    def _run_crc(self, name: str, until: int) -> None:
        record = self.records[name]
        buffer = bytearray(min(CHUNK_BYTES, max(until - record.checked, 0)))
        while record.checked < until:
            view = memoryview(buffer)[: min(len(buffer), until - record.checked)]
            self._pread_into(view, record.start + record.checked)
            record.running = zlib.crc32(view, record.running)
            record.checked += len(view)

    def _compare_crc(self, name: str) -> None:
        record = self.records[name]
        if record.running != record.crc:
            raise damaged(
                self.path,
                f"record {name} ({record.size} bytes) has CRC {record.running:08x}, the file says {record.crc:08x}: "
                "its bytes changed after it was saved",
            )
        record.is_good = True

    def check_record(self, name: str) -> None:
        """Reads what is left of a record and compares its CRC."""
        record = self.records[name]
        if not record.is_good:
            self._run_crc(name, record.size)
            self._compare_crc(name)

    def check_touched(self) -> None:
        """check_record for every record of which any byte was read: after this the bytes given out are proven.

        In ranged mode only the records of which nothing but padding was left unread; the rest is the manifest's.
        """
        for name, record in self.records.items():
            if record.checked and not (self.is_ranged and record.size - record.checked > PADDING_BYTES):
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
            raise damaged(self.path, f"a description of {self.records['data.pkl'].size} bytes, far too long for one")
        try:
            return read_pickle(self.read_record("data.pkl"))
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
            raise damaged(self.path, f"the storage of {what} (record data/{ref.key}) is not in the file")
        itemsize = DTYPES[ref.dtype].itemsize
        if (ref.offset + ref.extent) * itemsize > record.size or ref.storage_elements * itemsize > record.size:
            raise damaged(
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

    def read_elements_into(self, ref: TensorRef, start: int, out: np.ndarray) -> None:
        """Fills `out` (flat, DTYPES[ref.dtype].raw) with the elements from `start` of a contiguous tensor."""
        if out.size:
            view = memoryview(out.view(np.uint8))
            self.read_into(f"data/{ref.key}", (ref.offset + start) * DTYPES[ref.dtype].itemsize, view)

    def read_elements(self, ref: TensorRef, start: int, count: int) -> np.ndarray:
        """Elements [start, start + count) of a contiguous tensor, flat, as DTYPES[ref.dtype].raw."""
        out = np.empty(count, DTYPES[ref.dtype].raw)
        self.read_elements_into(ref, start, out)
        return out

    def read_strided(self, ref: TensorRef, what: str) -> np.ndarray:
        """A whole tensor that is not contiguous (a saved transpose or expand), flat in row-major order."""
        self.check_ref(ref, what)
        itemsize = DTYPES[ref.dtype].itemsize
        if ref.numel * itemsize > max(64 << 20, 2 * ref.extent * itemsize):
            raise damaged(self.path, f"{what} claims {ref.numel} elements over a storage range of {ref.extent}")
        span = self.read_elements(TensorRef(ref.dtype, (ref.extent,), (1,), ref.key, ref.offset, 0), 0, ref.extent)
        strides = tuple(stride * itemsize for stride in ref.stride)
        return np.lib.stride_tricks.as_strided(span, ref.shape, strides, writeable=False).flatten()
