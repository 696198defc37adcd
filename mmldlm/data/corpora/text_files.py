"""Read files of texts: lines and JSON lines, plain or compressed, in parts for different ranks.

Memory is bounded by one text, even for compressed files: longer lines are left out and counted.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mmldlm.data.sentences import MAX_TEXT_BYTES, TOO_LARGE, fold_spaces
from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_os_error
from mmldlm.utils.input_files import open_regular

KINDS = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")
_COMPRESSED = (".gz", ".zst")
NAMED_KINDS = f"{', '.join(KINDS)} (all but the last also {' and '.join(_COMPRESSED)})"
PART_BYTES = 32 << 20
# Counter of the texts with NUL characters, such as those of UTF-16 or of binary files.
NOT_TEXT = "drop_not_text"
# Bytes given to a decompressor at once; at most 32 MiB come out of them.
_FEED = 1 << 10
# The largest that `zstd` writes, with --long=31; a frame takes as much memory as its content.
_MAX_WINDOW = 1 << 31
EXTRA = "pip install 'mmldlm[data]'"
IMAGE_SUFFIXES = (
    ".png",
    ".jpg",
    ".jpeg",
    ".jpe",
    ".jfif",
    ".webp",
    ".gif",
    ".bmp",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
)
# Suffixes of images that Pillow does not read.
_NOT_READ = (".heic", ".heif", ".avif", ".jp2", ".jxl", ".svg", ".tga", ".dng")
# Fields that always name an image.
IMAGE_FIELDS = ("image", "image_path")
# Fields that records of texts have, too; they count where the value ends like the name of an
# image.
_PERHAPS = (
    "file_name",
    "filename",
    "filepath",
    "file_path",
    "file",
    "path",
    "img",
    "img_path",
    "image_file",
    "image_name",
)


class ReadUnit(NamedTuple):
    """A part of a corpus that one rank reads.

    Attributes:
        name: Name that identifies the texts, as far as they are distinguishable without reading
            them.
        read: Function that yields the texts and updates the given counters.
    """

    name: str
    read: Callable[[Counter], Iterator[str]]


def kind_of(path: Path) -> str | None:
    """Return `txt`, `jsonl`, `csv`, `tsv` or `parquet` by a file's name, in upper or lower case;
    None for others.
    """
    suffix, inner = path.suffix.lower(), Path(path.stem).suffix.lower()
    if suffix in _COMPRESSED:
        suffix = inner if inner != ".parquet" else ""
    return suffix[1:] if suffix in KINDS else None


def file_units(path: Path, kind: str, text_field: str) -> list[FileUnit]:
    """Cut a .txt or .jsonl file into byte ranges, each with the lines that begin in it; a
    compressed file is one.
    """
    if path.suffix.lower() in _COMPRESSED:
        return [FileUnit(path, kind, 0, None, text_field)]
    size = path.stat().st_size
    return [
        FileUnit(path, kind, start, min(start + PART_BYTES, size), text_field)
        for start in range(0, max(size, 1), PART_BYTES)
    ]


@dataclass(frozen=True)
class FileUnit:
    """The lines that begin in the bytes [start, end) of a file; `end` None means the complete
    file.

    Attributes:
        errors: Error handler of bytes.decode; `strict`: a file that is not UTF-8 is an error.
    """

    path: Path
    kind: str
    start: int
    end: int | None
    text_field: str = "text"
    errors: str = "strict"

    def read(self, counts: Counter) -> Iterator[str]:
        """Yield the texts and count them."""
        return self._read_txt(counts) if self.kind == "txt" else self._read_jsonl(counts)

    def lines(self, counts: Counter) -> Iterator[tuple[int, str]]:
        """Yield (first byte, stripped text) of every line; a carriage return alone also ends a
        line.

        A byte order mark at the start of a line is not part of it: files with one may have been
        joined.

        Lines above MAX_TEXT_BYTES are left out, counted and reported on standard error.

        Raises:
            UserError: the file is not UTF-8, cannot be decompressed, or has such a line with
                carriage returns in it.
        """
        with open_bytes(self.path) as file:
            position = self.start
            if self.start:
                file.seek(self.start - 1)
                # The line before belongs to another part.
                position += _skip_line(file) - 1
            while self.end is None or position < self.end:
                raw, num_skipped = read_line(file, self.path)
                if not raw:
                    return
                if len(raw) > MAX_TEXT_BYTES:
                    self._leave_out(position, raw, len(raw) + num_skipped, counts)
                else:
                    parts = self._decoded(raw, position).strip().split("\r")
                    yield from (
                        (position, part.strip().lstrip("\ufeff").lstrip()) for part in parts
                    )
                position += len(raw) + num_skipped

    def records(self, counts: Counter, keep_bad: bool = False) -> Iterator[tuple[int, Any]]:
        """Yield (first byte, value) of every line of JSON; lines of white space are no records.

        Args:
            keep_bad: Whether to yield None for a line that is not JSON, if it is not the first
                one.

        Raises:
            UserError: a line is not JSON.
        """
        is_first = self.start == 0
        for position, line in self.lines(counts):
            if not line:
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not keep_bad or is_first:
                    found = f"line {self._line_number(position)}: {str(error)[:200]}"
                    fix = "repair or remove that line"
                    raise self._error("one JSON object per line", found, fix) from None
                value = None
            is_first = False
            yield position, value

    def _decoded(self, raw: bytes, position: int) -> str:
        try:
            return raw.decode("utf-8", self.errors)
        except UnicodeDecodeError as error:
            raise not_utf8(self.path, error, self._line_number(position)) from None

    def _leave_out(self, position: int, raw: bytes, length: int, counts: Counter) -> None:
        """Count a line that is too long; carriage returns in it mean that it is many lines."""
        line = f"line {self._line_number(position)} of {length:,} bytes"
        if b"\r" in raw[:-2]:
            raise ends_in_returns(self.path, line)
        print(
            f"warning: {self.path}: {line} left out (at most {MAX_TEXT_BYTES:,})",
            file=sys.stderr,
            flush=True,
        )
        counts["read"] += 1
        counts[TOO_LARGE] += 1

    def _line_number(self, position: int) -> int:
        """Return the number, from 1, of the line that begins at a byte."""
        number, left = 1, position
        with open_bytes(self.path) as file:
            while left and (block := file.read(min(left, 1 << 20))):
                number, left = number + block.count(b"\n"), left - len(block)
        return number

    def _error(self, expected: str, found: str, fix: str) -> UserError:
        return UserError(f"{expected} in {self.path}", found, fix)

    def _read_txt(self, counts: Counter) -> Iterator[str]:
        for _, line in self.lines(counts):
            if line:
                yield from clean(line, counts, fold=False)

    def _read_jsonl(self, counts: Counter) -> Iterator[str]:
        for position, record in self.records(counts):
            expected = f"a string in field '{self.text_field}' of every line"
            if not isinstance(record, dict) or self.text_field not in record:
                keys = sorted(record) if isinstance(record, dict) else [type(record).__name__]
                raise self._error(
                    expected,
                    f"line {self._line_number(position)} has {', '.join(keys) or 'no field'}",
                    "name the field with --text-field, or repair that line",
                )
            text = record[self.text_field]
            if not isinstance(text, str | None):
                raise self._error(
                    expected,
                    f"line {self._line_number(position)} has {json.dumps(text)[:80]}",
                    "repair or remove that line, or name another field with --text-field",
                )
            yield from clean(text or "", counts)


def not_utf8(path: Path, error: UnicodeDecodeError, line_number: int) -> UserError:
    """Return the error for a line that is not UTF-8."""
    byte = error.object[error.start]
    return UserError(
        f"UTF-8 text in {path}",
        f"byte 0x{byte:02x} at column {error.start + 1} of line {line_number}",
        "convert the file to UTF-8 (for instance with iconv)",
    )


def ends_in_returns(path: Path, line: str) -> UserError:
    """Return the error for a line that is many, each of which ends in a carriage return alone."""
    return UserError(
        f"lines that end in \\n in {path}",
        f"{line} in which lines end in \\r",
        f"convert it: tr '\\r' '\\n' < {path.name} > NEW",
    )


def clean(text: str, counts: Counter, fold: bool = True) -> Iterator[str]:
    """Yield a text, its white space folded (not that of a line); count empty, binary and too large
    texts.
    """
    counts["read"] += 1
    text = fold_spaces(text) if fold else text
    if not text or len(text) > MAX_TEXT_BYTES:
        counts[TOO_LARGE if text else "drop_empty"] += 1
    elif "\0" in text:
        counts[NOT_TEXT] += 1
    else:
        yield text


def read_line(file: BinaryIO, path: Path) -> tuple[bytes, int]:
    """Read a line, at most MAX_TEXT_BYTES + 1 bytes of it; return it, and the number of bytes of
    its rest, which are skipped.

    Raises:
        UserError: the file cannot be decompressed.
        OSError: it cannot be read.
    """
    try:
        raw = file.readline(MAX_TEXT_BYTES + 1)
        is_cut = len(raw) > MAX_TEXT_BYTES and not raw.endswith(b"\n")
        return raw, _skip_line(file) if is_cut else 0
    except Exception as error:
        # Each decompressor raises its own types; only the system's errors have a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(
            f"a complete compressed file in {path}", str(error), "copy the file again"
        ) from error


def _skip_line(file: BinaryIO) -> int:
    """Skip to the end of a line in bounded memory; return the number of bytes."""
    length = 0
    while raw := file.readline(1 << 20):
        length += len(raw)
        if raw.endswith(b"\n"):
            break
    return length


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed by its suffix.

    Raises:
        UserError: it is not readable, now or while it is read, or the package that decompresses it
            is missing.
    """
    suffix = path.suffix.lower()
    try:
        with open_regular(path) as file:
            if suffix not in _COMPRESSED:
                yield file
                return
            if not file.read(1):
                raise UserError(
                    f"a complete compressed file in {path}", "an empty file", "copy the file again"
                )
            file.seek(0)
            if suffix == ".gz":
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield unpacked  # type: ignore[misc]
                return
            yield io.BufferedReader(_ZstdFile(file, path), 1 << 20)
    except OSError as error:
        raise UserError(
            f"a readable file {path}",
            describe_os_error(error),
            "check the path, and the disk or server that it lies on",
        ) from None


class _ZstdFile(io.RawIOBase):
    """The content of all frames of a Zstandard file; an end inside of a frame, or bytes behind the
    last, are errors.

    Raises:
        UserError: the package zstandard is missing.
    """

    def __init__(self, file: BinaryIO, path: Path):
        try:
            import zstandard
        except ImportError:
            raise UserError(
                f"the package zstandard, to read {path}", "it is not installed", EXTRA
            ) from None
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        self._file, self._new_frame = file, decompressor.decompressobj
        # The frame that has not ended yet, if there is one.
        self._frame: Any = None
        self._raw, self._content = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            raw, self._raw = self._raw or self._file.read(_FEED), b""
            if not raw and self._frame is not None:
                raise EOFError("the file ends before its last frame does")
            if not raw:
                return 0
            self._frame = self._frame or self._new_frame()
            self._content = memoryview(self._frame.decompress(raw))
            if self._frame.eof:
                self._raw, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._content))
        buffer[:count], self._content = self._content[:count], self._content[count:]
        return count


def image_of(record: Any) -> Any:
    """Return the image that a record names, a path in a valid one; None for a record without an
    image.
    """
    if not isinstance(record, dict):
        return None
    for key in IMAGE_FIELDS:
        if record.get(key) is not None:
            return record[key]
    for key in _PERHAPS:
        value = record.get(key)
        if isinstance(value, str) and value.lower().endswith(IMAGE_SUFFIXES + _NOT_READ):
            return value
    return None
