"""Read files of texts: lines, JSON lines and parquet, plain or compressed, in parts for different ranks.

Memory is bounded by one text, even for compressed files: longer lines are left out and counted.
"""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mmldlm.data.sentences import MAX_TEXT_BYTES, TOO_LARGE
from mmldlm.errors import UserError
from mmldlm.utils.formatting import first_line
from mmldlm.utils.input_files import open_regular, require_regular

KINDS = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz", ".txt.zst", ".jsonl.zst", ".parquet")
PART_BYTES = 32 << 20
_EXTRA = "pip install 'mmldlm[data]'"


def kind_of(path: Path) -> str | None:
    """Return `txt`, `jsonl` or `parquet` by a file's name; None for others."""
    suffixes = "".join(path.suffixes[-2:]) if path.suffix in (".gz", ".zst") else path.suffix
    return suffixes.split(".")[1] if suffixes in KINDS else None


def file_units(path: Path, kind: str, text_field: str) -> list[FileUnit]:
    """Cut a .txt or .jsonl file into byte ranges, each with the lines that begin in it; a compressed file is one."""
    if path.suffix in (".gz", ".zst"):
        return [FileUnit(path, kind, 0, None, text_field)]
    size = path.stat().st_size
    starts = range(0, max(size, 1), PART_BYTES)
    return [FileUnit(path, kind, start, min(start + PART_BYTES, size), text_field) for start in starts]


@dataclass(frozen=True)
class FileUnit:
    """The lines that begin in the bytes [start, end) of a file; `end` None means the complete file."""

    path: Path
    kind: str
    start: int
    end: int | None
    text_field: str = "text"

    def read(self, counts: Counter) -> Iterator[str]:
        """Yield the texts and count them."""
        return self._read_txt(counts) if self.kind == "txt" else self._read_jsonl(counts)

    def lines(self, counts: Counter) -> Iterator[tuple[int, str]]:
        """Yield (first byte, stripped text) of every line; a carriage return alone also ends a line.

        Lines above MAX_TEXT_BYTES are left out, counted and reported on standard error.

        Raises:
            UserError: the file is not UTF-8, cannot be decompressed, or has such a line with carriage returns in it.
        """
        with _open_bytes(self.path) as file:
            position = self.start
            if self.start:
                file.seek(self.start - 1)
                position += _skip_line(file) - 1  # the line before belongs to another part
            while self.end is None or position < self.end:
                try:
                    raw = file.readline(MAX_TEXT_BYTES + 1)
                    num_skipped = _skip_line(file) if len(raw) > MAX_TEXT_BYTES and not raw.endswith(b"\n") else 0
                except Exception as error:  # each decompressor has its own types
                    raise self._error("a complete compressed file", str(error), "copy the file again") from error
                if not raw:
                    return
                if len(raw) > MAX_TEXT_BYTES:
                    self._leave_out(position, raw, len(raw) + num_skipped, counts)
                else:
                    yield from ((position, part.strip()) for part in self._decoded(raw, position).strip().split("\r"))
                position += len(raw) + num_skipped

    def _decoded(self, raw: bytes, position: int) -> str:
        try:
            return raw.decode("utf-8-sig" if position == 0 else "utf-8")
        except UnicodeDecodeError as error:
            found = f"byte 0x{raw[error.start]:02x} at column {error.start + 1} of line {self._line_number(position)}"
            raise self._error("UTF-8 text", found, "convert the file to UTF-8 (for instance with iconv)") from None

    def _leave_out(self, position: int, raw: bytes, length: int, counts: Counter) -> None:
        """Count a line that is too long; carriage returns in it mean that it is many lines."""
        line = f"line {self._line_number(position)} of {length:,} bytes"
        if b"\r" in raw[:-2]:
            fix = f"convert it: tr '\\r' '\\n' < {self.path.name} > NEW"
            raise self._error("lines that end in \\n", f"{line} in which lines end in \\r", fix)
        print(f"warning: {self.path}: {line} left out (at most {MAX_TEXT_BYTES:,})", file=sys.stderr, flush=True)
        counts["read"] += 1
        counts[TOO_LARGE] += 1

    def _line_number(self, position: int) -> int:
        """Return the number, from 1, of the line that begins at a byte."""
        number, left = 1, position
        with _open_bytes(self.path) as file:
            while left and (block := file.read(min(left, 1 << 20))):
                number, left = number + block.count(b"\n"), left - len(block)
        return number

    def _error(self, expected: str, found: str, fix: str) -> UserError:
        return UserError(f"{expected} in {self.path}", found, fix)

    def _read_txt(self, counts: Counter) -> Iterator[str]:
        for _, line in self.lines(counts):
            if line:
                counts["read"] += 1
                yield line

    def _read_jsonl(self, counts: Counter) -> Iterator[str]:
        for position, line in self.lines(counts):
            if not line:
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                found = f"line {self._line_number(position)}: {error}"
                raise self._error("one JSON object per line", found, "repair or remove that line") from None
            text = record.get(self.text_field) if isinstance(record, dict) else None
            if isinstance(record, dict) and self.text_field in record and not isinstance(text, str):
                raise self._error(
                    f"a string in field '{self.text_field}' of every line",
                    f"line {self._line_number(position)}: {self.text_field} is {_kind_of(text)}",
                    "repair or remove that line, or name another field with --text-field",
                )
            if not isinstance(text, str):
                known = ", ".join(sorted(record)) if isinstance(record, dict) else type(record).__name__
                raise self._error(
                    f"a string in field '{self.text_field}' of every line",
                    f"line {self._line_number(position)} has {known or 'no field'}",
                    "name the field with --text-field, or repair that line",
                )
            yield from clean(text, counts)


def _kind_of(value: object) -> str:
    """Return JSON's name of a value that is not a string."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true or false"
    return {int: "a number", float: "a number", list: "a list"}.get(type(value), "an object")


def clean(text: str, counts: Counter) -> Iterator[str]:
    """Yield a record's text with its white space folded; count empty and too large texts."""
    counts["read"] += 1
    text = " ".join(text.split())
    if not text or len(text) > MAX_TEXT_BYTES:
        counts[TOO_LARGE if text else "drop_empty"] += 1
    else:
        yield text


def _skip_line(file: io.BufferedIOBase) -> int:
    """Skip to the end of a line in bounded memory; return the number of bytes."""
    length = 0
    while raw := file.readline(1 << 20):
        length += len(raw)
        if raw.endswith(b"\n"):
            break
    return length


def _open_bytes(path: Path) -> io.BufferedIOBase:
    require_regular(path)
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise UserError(f"the package zstandard, to read {path}", "it is not installed", _EXTRA) from None
        return io.BufferedReader(zstandard.open(path, "rb"), 1 << 20)
    return open_regular(path)  # type: ignore[return-value]


def parquet_units(path: Path, text_field: str) -> list[tuple[str, Callable[[Counter], Iterator[str]]]]:
    """Return the (name, reader) of every row group of a parquet file.

    Raises:
        UserError: pyarrow is not installed, the file is not parquet, or the column of strings is missing.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"the package pyarrow, to read {path}", "it is not installed", _EXTRA) from None
    try:
        require_regular(path)
        file = parquet.ParquetFile(path)
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"a parquet file at {path}", first_line(error), "copy or convert it again") from None
    names = file.schema_arrow.names
    kind = file.schema_arrow.field(text_field).type if text_field in names else None
    if kind is None or not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        raise UserError(
            f"a column '{text_field}' of strings in {path}",
            f"columns {', '.join(names)}" if kind is None else f"a column '{text_field}' of {kind}",
            "name the column with --text-field",
        )

    def read(group: int, counts: Counter) -> Iterator[str]:
        with parquet.ParquetFile(path) as opened:
            for batch in opened.iter_batches(1024, row_groups=[group], columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    yield from clean(text or "", counts)

    size = path.stat().st_size
    return [
        (f"{size}:{group}", lambda counts, group=group: read(group, counts)) for group in range(file.num_row_groups)
    ]
