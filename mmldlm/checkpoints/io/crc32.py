"""The CRC-32 of a whole from those of its parts, as zlib's crc32_combine has it, which Python does not give."""

from __future__ import annotations

import ctypes
import threading
import zlib
from collections.abc import Callable
from functools import lru_cache

from mmldlm.checkpoints.finite import address_of

_POLYNOMIAL = 0xEDB88320  # of CRC-32, lowest power in the highest bit


_LARGE = 4096  # bytes from which a call into another library is worth its while


def _find_fast() -> Callable[[int, int | bytes, int], int] | None:
    """libdeflate's CRC-32, three times as fast as zlib's, where the system has that library; it must give zlib's."""
    try:
        function = ctypes.CDLL("libdeflate.so.0").libdeflate_crc32
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_uint32
    probe = bytes(range(256)) * (_LARGE // 256)
    return function if function(0, probe, len(probe)) == zlib.crc32(probe) else None


_fast = _find_fast()


def crc32(data: memoryview | bytes) -> int:
    """CRC-32 of some bytes. Lets go of Python's lock."""
    if _fast is None or len(data) < _LARGE:
        return zlib.crc32(data)
    if isinstance(data, bytes):
        return _fast(0, data, len(data))
    return zlib.crc32(data) if data.readonly else _fast(0, address_of(data), len(data))


def combine(first: int, second: int, second_bytes: int) -> int:
    """CRC-32 of a text followed by another of `second_bytes` bytes, from the CRC-32 of each."""
    return _times(_power(second_bytes), first) ^ second


def _times(a: int, b: int) -> int:
    """a * b modulo the polynomial."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return product


def _squares() -> list[int]:
    """x to the powers 1, 2, 4, 8, ... modulo the polynomial."""
    found = [1 << 30]
    while len(found) < 64:
        found.append(_times(found[-1], found[-1]))
    return found


_SQUARES = _squares()


@lru_cache(maxsize=4096)
def _power(num_bytes: int) -> int:
    """x to the power 8 * num_bytes: what moves a CRC past so many bytes."""
    result = 1 << 31
    for bit in range(num_bytes.bit_length()):
        if num_bytes >> bit & 1:
            result = _times(_SQUARES[bit + 3], result)
    return result


class RangedCrc32:
    """The CRC-32 of a range of bytes that is read or written in pieces, in any order and by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[int, tuple[int, int]] = {}  # end -> (start, CRC) of what came in order

    def add(self, start: int, data: memoryview | bytes, crc: int | None = None) -> int:
        """Counts in bytes that belong from `start` on; `crc` is theirs, where it is known. Returns it."""
        if crc is None:
            crc = crc32(data)  # the lock is free meanwhile, and so is Python's
        with self._lock:
            first, before = self._runs.pop(start, (start, 0))
            self._runs[start + len(data)] = (first, combine(before, crc, len(data)) if before else crc)
        return crc

    def gaps(self, size: int) -> list[tuple[int, int]]:
        """[(first, end)] of the bytes of 0..size that are not counted; see value()."""
        with self._lock:
            self._merge()
            found, at = [], 0
            for end, (start, _) in self._runs.items():
                if start > at:
                    found.append((at, start))
                at = end
            return found + ([(at, size)] if at < size else [])

    def value(self) -> tuple[int, int]:
        """(number of bytes, CRC) of what came from byte 0 on without a gap."""
        with self._lock:
            self._merge()
            return next(((end, crc) for end, (start, crc) in self._runs.items() if start == 0), (0, 0))

    def _merge(self) -> None:
        """Joins what lies end to end. Of bytes that came twice the later count is dropped: both were the same bytes."""
        joined: list[list[int]] = []
        for start, end, crc in sorted((start, end, crc) for end, (start, crc) in self._runs.items()):
            if joined and start == joined[-1][1]:
                joined[-1][1:] = end, combine(joined[-1][2], crc, end - start)
            elif not joined or start > joined[-1][1]:
                joined.append([start, end, crc])
        self._runs = {end: (start, crc) for start, end, crc in joined}
