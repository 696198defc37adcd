"""Read and write the files of checkpoints: regular files alone, by ranges, in several threads.

* Descriptors: opened beyond the soft limit of open files, which a checkpoint of many ranks
  exceeds. What is read as a whole (manifests, indexes, configs) is opened by utils/input_files.
* Writing: a new file of known size, written at any position.
* Checksums: the CRC-32 of a byte range from the CRCs of its pieces (zlib's crc32_combine, which
  Python does not expose).
* Threads: they read, check and write chunks.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mmldlm.utils.input_files import check_kind, read_bytes, require_regular
from mmldlm.utils.resources import available_cpus, raise_open_files

# -- Descriptors ----------------------------------------------------------------------------------


class _Closable(Protocol):
    def close(self) -> None: ...


@contextlib.contextmanager
def closed_on_error(resource: _Closable) -> Iterator[None]:
    """Close a resource if the block raises."""
    try:
        yield
    except BaseException:
        resource.close()
        raise


def open_descriptor(path: Path, flags: int) -> int:
    """Open a file; raise the soft limit of open files to the hard limit if it is reached.

    A checkpoint of many ranks has more files than the usual soft limit of 1024.

    Raises:
        OSError: the file cannot be opened, or the hard limit is reached.
    """
    try:
        return os.open(path, flags, 0o644)
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.EMFILE or soft == hard:
            raise
        raise_open_files()
        return os.open(path, flags, 0o644)


def open_regular_descriptor(path: Path) -> int:
    """Open a regular file for reading, without waiting for anything.

    Raises:
        OSError: as of `utils.input_files.open_regular`.
    """
    # Opening may act on a device, so the kind of the file is checked first.
    require_regular(path)
    fd = open_descriptor(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # The file may have been replaced since.
        check_kind(path, os.fstat(fd).st_mode)
    except OSError:
        os.close(fd)
        raise
    return fd


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if there is no such file, or none that can be read."""
    try:
        value = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


# -- Writing --------------------------------------------------------------------------------------


class OutputFile:
    """Create `path`, which must not exist, with `size` bytes.

    Args:
        path: New file.
        size: Number of bytes; every byte must be written.

    Raises:
        OSError: the file exists, or may not be so large.
    """

    def __init__(self, path: Path, size: int):
        self._fd = open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with closed_on_error(self):
            os.truncate(self._fd, size)

    def write(self, data: bytes | memoryview, position: int) -> None:
        """Write bytes at `position`. Thread-safe for disjoint ranges."""
        view = memoryview(data)
        while view:
            count = os.pwrite(self._fd, view, position)
            view, position = view[count:], position + count

    def close(self) -> None:
        """Close the descriptor; the file is not flushed to the disk."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# -- Checksums ------------------------------------------------------------------------------------

# The polynomial of CRC-32, its lowest power in the highest bit.
_POLYNOMIAL = 0xEDB88320


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two concatenated byte strings from the CRC-32 of each and the length of
    the second.
    """
    return _multiply(_power(second_bytes), first) ^ second


def _multiply(a: int, b: int) -> int:
    """Return a * b modulo the polynomial."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return product


def _squares() -> list[int]:
    """Return x to the powers 1, 2, 4, 8, ... modulo the polynomial."""
    powers = [1 << 30]
    while len(powers) < 64:
        powers.append(_multiply(powers[-1], powers[-1]))
    return powers


_SQUARES = _squares()


@lru_cache(maxsize=4096)
def _power(num_bytes: int) -> int:
    """Return x to the power 8 * num_bytes, which shifts a CRC past that many bytes."""
    result = 1 << 31
    for bit in range(num_bytes.bit_length()):
        if num_bytes >> bit & 1:
            result = _multiply(_SQUARES[bit + 3], result)
    return result


class RangedCrc32:
    """CRC-32 of a byte range whose pieces are read or written in any order, by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # End -> (start, CRC) of contiguous pieces.
        self._runs: dict[int, tuple[int, int]] = {}

    def add(self, start: int, data: memoryview | bytes, crc: int | None = None) -> int:
        """Add the bytes from position `start` on and return their CRC; `crc` is that CRC if it is
        known.
        """
        if crc is None:
            # Outside the lock, because zlib releases the GIL.
            crc = zlib.crc32(data)
        with self._lock:
            first, previous = self._runs.pop(start, (start, 0))
            self._runs[start + len(data)] = (
                first,
                combine(previous, crc, len(data)) if previous else crc,
            )
        return crc

    def gaps(self, size: int) -> list[tuple[int, int]]:
        """Return [(start, end)] of the bytes of 0..size that were not added."""
        with self._lock:
            self._merge()
            gaps, position = [], 0
            for end, (start, _) in self._runs.items():
                if start > position:
                    gaps.append((position, start))
                position = end
            return gaps + ([(position, size)] if position < size else [])

    def value(self) -> tuple[int, int]:
        """Return (number of bytes, CRC) of the contiguous range that starts at byte 0."""
        with self._lock:
            self._merge()
            return next(
                ((end, crc) for end, (start, crc) in self._runs.items() if start == 0), (0, 0)
            )

    def _merge(self) -> None:
        """Join adjacent runs; of bytes that were added twice only the first run counts, as both
        are the same bytes.
        """
        joined: list[list[int]] = []
        for start, end, crc in sorted(
            (start, end, crc) for end, (start, crc) in self._runs.items()
        ):
            if joined and start == joined[-1][1]:
                joined[-1][1:] = end, combine(joined[-1][2], crc, end - start)
            elif not joined or start > joined[-1][1]:
                joined.append([start, end, crc])
        self._runs = {end: (start, crc) for start, end, crc in joined}


# -- Threads --------------------------------------------------------------------------------------

T = TypeVar("T")
# More threads only help a remote file system, and each of them holds several chunks.
_NUM_WORKERS = max(2, min(4, available_cpus()))


def run_in_threads(work: Callable[[T], None], items: Iterable[T]) -> None:
    """Call work(item) for every item, started in order, a few at a time.

    Reading, CRCs, numpy and writing release the GIL; one thread per chunk keeps the chunk in its
    processor's cache.

    Raises:
        BaseException: the first exception of `work` or `items`, after all threads have stopped.
    """
    lock, remaining = threading.Lock(), iter(items)
    errors: list[BaseException] = []
    end: Any = object()

    def loop() -> None:
        while not errors:
            try:
                with lock:
                    item = next(remaining, end)
                if item is end:
                    return
                work(item)
            except BaseException as error:
                # The calling thread raises it again.
                errors.append(error)

    threads = [
        threading.Thread(target=loop, name="worker", daemon=True) for _ in range(_NUM_WORKERS - 1)
    ]
    for thread in threads:
        thread.start()
    loop()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
