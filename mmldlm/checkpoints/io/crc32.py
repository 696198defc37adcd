"""CRC-32 of a byte range from the CRCs of its pieces (zlib's crc32_combine, which Python does not
expose).
"""

from __future__ import annotations

import threading
import zlib
from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # of CRC-32, lowest power in the highest bit


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
        self._runs: dict[int, tuple[int, int]] = {}  # end -> (start, CRC) of contiguous pieces

    def add(self, start: int, data: memoryview | bytes, crc: int | None = None) -> int:
        """Add the bytes from position `start` on and return their CRC; `crc` is that CRC if it is
        known.
        """
        if crc is None:
            crc = zlib.crc32(data)  # outside the lock; zlib releases the GIL
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
