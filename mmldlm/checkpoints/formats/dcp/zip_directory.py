"""Parse the directory of an uncompressed zip file inside a larger file.

A DCP file holds hundreds of small zips back to back, and the standard library's zipfile takes half a millisecond each.

Format: PKWARE's APPNOTE.TXT, 4.3: end record, zip64 end record and locator, central directory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from mmldlm.checkpoints.formats.torch_save.reader import ZipEntry

_END, _END64, _LOCATOR, _ENTRY = 0x06054B50, 0x06064B50, 0x07064B50, 0x02014B50
_TAIL = 22 + 20 + 56  # the end record without a comment, and before it what zip64 adds
_MAX_COMMENT = 0xFFFF
_FULL32 = 0xFFFFFFFF


class BadZip(ValueError):
    """Not a zip file, or a damaged directory."""


def read_directory(size: int, read: Callable[[int, int], bytes]) -> list[ZipEntry]:
    """Return the entries of a zip file.

    Args:
        size: bytes of the zip.
        read: (first byte, number) -> bytes; fewer at the end.

    Raises:
        BadZip: not a zip file, truncated, or an inconsistent directory.
    """
    end_at, tail_at, tail = _find_end(size, read)
    fields = struct.unpack("<IHHHHIIH", tail[end_at - tail_at : end_at - tail_at + 22])
    _, disk, first_disk, here, count, length, at, _ = fields
    if disk or first_disk or here != count:
        raise BadZip("a zip file in several parts")
    limit, locator_at = end_at, end_at - 20
    locator = read(locator_at, 20) if locator_at >= 0 else b""
    if locator[:4] == struct.pack("<I", _LOCATOR):  # torch always writes one
        limit = struct.unpack("<IIQI", locator)[2]
        record = read(limit, 56) if limit + 56 <= locator_at else b""
        if len(record) != 56 or record[:4] != struct.pack("<I", _END64):
            raise BadZip("no zip64 end record where its locator points")
        count, length, at = struct.unpack("<IQHHIIQQQQ", record)[7:]
    if at + length != limit:
        raise BadZip(f"a directory of bytes {at}..{at + length}, which should end at {limit}")
    inside = at >= tail_at
    data = tail[at - tail_at : at - tail_at + length] if inside else read(at, length)
    if len(data) != length:
        raise BadZip("a truncated directory")
    return _entries(data, count)


def _find_end(size: int, read: Callable[[int, int], bytes]) -> tuple[int, int, bytes]:
    """Return the position of the end record, and the position and bytes of the tail that was read."""
    # 4 KiB hold the complete directory of a small zip; the second attempt allows for a comment.
    for span in (4096, _TAIL + _MAX_COMMENT):
        tail_at = max(0, size - span)
        tail = read(tail_at, size - tail_at)
        position = len(tail)
        while (position := tail.rfind(struct.pack("<I", _END), 0, position)) >= 0:
            record = tail[position : position + 22]
            if len(record) == 22 and position + 22 + struct.unpack("<H", record[20:])[0] == len(tail):
                return tail_at + position, tail_at, tail
    raise BadZip("no end record")


def _entries(data: bytes, count: int) -> list[ZipEntry]:
    found, at = [], 0
    for _ in range(count):
        if at + 46 > len(data):
            raise BadZip("a directory that ends in an entry")
        fields = struct.unpack("<IHHHHHHIIIHHHHHII", data[at : at + 46])
        (signature, _, _, flags, method, _, _, crc, stored, size, len_name, len_extra, len_comment, disk) = fields[:14]
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
