"""Check the lengths in a pickle against its size, before anything is built from them.

The pickle machine of C reserves memory for a length or a memo index before it looks for the bytes:
`LONG_BINPUT 2**31` alone, five bytes, fills 32 GiB.
"""

from __future__ import annotations

import pickletools
from array import array

_MAX_MEMO_GAP = 1024  # picklers number their memo 0, 1, 2, ...
_LINE, _LINES, _UNKNOWN = (
    -1,
    -2,
    -3,
)  # an argument up to the end of a line, two of them, no such opcode
_PREFIX = {  # bytes of the length that precedes an argument
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


def _tables() -> tuple[array, bytes]:
    """Return, per opcode, the bytes of its argument, and the bytes of the length before it."""
    sizes, prefixes = array("b", [_UNKNOWN] * 256), bytearray(256)
    for opcode in pickletools.opcodes:
        code, argument = ord(opcode.code), opcode.arg
        if argument is None:
            sizes[code] = 0
        elif argument.n >= 0:
            sizes[code] = argument.n
        elif argument.n == pickletools.UP_TO_NEWLINE:
            sizes[code] = _LINES if argument.name == "stringnl_noescape_pair" else _LINE
        else:
            sizes[code], prefixes[code] = 0, _PREFIX[argument.n]
    return sizes, bytes(prefixes)


_SIZES, _PREFIXES = _tables()
_STOP, _PUT, _BINPUT, _LONG_BINPUT, _MEMOIZE = b".pqr\x94"


def check_lengths(data: bytes) -> None:
    """Check that every argument of the opcodes lies in `data`, and that the memo has no gaps.

    Raises:
        ValueError: it does not; the pickle is damaged or hostile.
    """
    position, end, num_memos = 0, len(data), 0
    sizes, prefixes = _SIZES, _PREFIXES
    while position < end:
        code = data[position]
        size = sizes[code]
        start = position + 1
        if prefix := prefixes[code]:
            position = start + prefix + int.from_bytes(data[start : start + prefix], "little")
        elif size >= 0:
            position = start + size
        elif size == _UNKNOWN:
            raise ValueError(f"no opcode {code:#x} at byte {position}")
        else:
            for _ in range(-size):
                start = data.find(b"\n", start) + 1 or end + 1
            position = start
        if position > end:
            raise ValueError(f"an argument up to byte {position} of {end}")
        if code == _BINPUT or code == _MEMOIZE:
            num_memos += 1
        elif code == _LONG_BINPUT or code == _PUT:
            num_memos += 1
            argument = data[position - 4 : position] if code == _LONG_BINPUT else b""
            index = int.from_bytes(argument, "little") if argument else _decimal(data, position)
            if index > num_memos + _MAX_MEMO_GAP:
                raise ValueError(f"entry {index} of a memo of {num_memos}")
        elif code == _STOP:
            return
    raise ValueError("no end")


def _decimal(data: bytes, end: int) -> int:
    """Return the number in the line that ends before `end`, the argument of PUT."""
    text = data[max(0, end - 21) : end - 1].rpartition(b"p")[2]
    if not text.isdigit():
        raise ValueError(f"a memo index {text!r}")
    return int(text)
