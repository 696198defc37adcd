"""Parse the directory of a zip file, alone or inside a larger file, that fills its bytes from the
first to the last.

The standard library's zipfile accepts bytes before and after the archive: of two joined files, or
of a tar of several, it returns the last one. It also takes half a millisecond per archive, and a
DCP file holds hundreds back to back.

Format: PKWARE's APPNOTE.TXT, 4.3: end record, zip64 end record and locator, central directory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

_END, _END64, _LOCATOR, _ENTRY = 0x06054B50, 0x06064B50, 0x07064B50, 0x02014B50
_TAIL_BYTES = 4096  # they hold the complete directory of a small zip
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
        size: bytes of the zip.
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
    _, disk, first_disk, here, count, length, at, _ = struct.unpack("<IHHHHIIH", tail[-22:])
    if disk or first_disk or here != count:
        raise BadZip("a zip file in several parts")
    limit, locator_at = end_at, end_at - 20
    locator = read(locator_at, 20) if locator_at >= 0 else b""
    if locator[:4] == struct.pack("<I", _LOCATOR):  # torch always writes one
        limit = struct.unpack("<IIQI", locator)[2]
        # Exactly before its locator: of two joined files with equal layouts, the place that the
        # second names is in the first.
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
    found, at = [], 0
    for _ in range(count):
        if at + 46 > len(data):
            raise BadZip("a directory that ends in an entry")
        fields = struct.unpack("<IHHHHHHIIIHHHHHII", data[at : at + 46])
        (
            signature,
            _,
            _,
            flags,
            method,
            _,
            _,
            crc,
            stored,
            size,
            len_name,
            len_extra,
            len_comment,
            disk,
        ) = fields[:14]
        header_offset = fields[16]
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
        found.append(ZipEntry(name, crc, stored, size, header_offset, method, flags))
    if at != len(data):
        raise BadZip(f"{len(data) - at} bytes of the directory belong to no entry")
    return found


def _widen(extra: bytes, *values: int) -> list[int]:
    """Return the values, those beyond 32 bits from the zip64 extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack("<HH", extra[at : at + 4])
        if kind == 1:
            field, found = extra[at + 4 : at + 4 + length], []
            for value in values:
                if value == _FULL32:
                    if len(field) < 8:
                        raise BadZip("a zip64 field that is too short")
                    value, field = struct.unpack("<Q", field[:8])[0], field[8:]
                found.append(value)
            return found
        at += 4 + length
    return list(values)
