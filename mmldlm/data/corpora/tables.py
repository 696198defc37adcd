"""Read tables: .csv and .tsv, whose first record names the columns, and parquet.

Memory is bounded by one record, even for compressed files.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mmldlm.data.corpora.text_files import (
    EXTRA,
    IMAGE_FIELDS,
    ReadUnit,
    clean,
    ends_in_returns,
    kind_of,
    not_utf8,
    open_bytes,
    read_line,
)
from mmldlm.data.sentences import MAX_TEXT_BYTES
from mmldlm.errors import UserError
from mmldlm.utils.formatting import first_line, join_some, printable
from mmldlm.utils.input_files import refuse_pointer, require_regular
from mmldlm.utils.resources import require_memory

TABLES = ("csv", "tsv")
# Separators of a .csv: a spreadsheet writes semicolons where the comma is a decimal mark.
_SEPARATORS = ",;\t"
_MAX_NAMED = 20
_QUOTES = (
    "put a field with separators, line ends or quotation marks between quotation marks, and"
    " double those within, as spreadsheets and pandas do; or write the table as .jsonl"
)


def read_rows(path: Path) -> Iterator[list[str]]:
    """Yield the records of a .csv or .tsv, first the names of its columns; all are of one length.

    The separator of a .csv is that of `,`, `;` and tab that cuts its first line into most columns.
    Empty lines are no records, as pandas reads and writes them: an empty cell of a table of one
    column is `""`.

    Raises:
        UserError: it is not readable, not UTF-8, has no record, or one with another number of
            fields, with misplaced quotation marks or above MAX_TEXT_BYTES; or its lines end in
            carriage returns alone.
    """
    refuse_pointer(path)
    csv.field_size_limit(MAX_TEXT_BYTES)
    width = None
    with open_bytes(path) as file:
        lines = _Lines(file, path)
        try:
            first = next((line for line in lines if line.strip()), "")
            separator = "\t" if kind_of(path) == "tsv" else _separator_of(first)
            for row in csv.reader(chain([first], lines), delimiter=separator, strict=True):
                lines.record_bytes = 0
                if not row:
                    continue
                width = width or len(row)
                if len(row) != width:
                    raise csv.Error(f"{len(row)} fields, where the first one has {width}")
                yield row
        except csv.Error as error:
            if lines.has_returns:
                raise ends_in_returns(path, f"line {lines.number}") from None
            raise UserError(
                f"records of one number of fields in {path}",
                f"the record that ends at line {lines.number}: {error}",
                _QUOTES,
            ) from None
    if width is None:
        fix = "write the names of the columns into the first line"
        raise UserError(f"a table in {path}", "an empty file", fix)


def _separator_of(line: str) -> str:
    """Return the separator that cuts a line into most fields; the comma for a line of one."""
    return max(_SEPARATORS, key=lambda each: len(next(csv.reader([line], delimiter=each))))


class _Lines:
    """The lines of a table as text, of which the csv module takes as many as a record has.

    Attributes:
        number: Number of the last line, from 1.
        record_bytes: Bytes of the current record; its reader sets them to 0 after each.
        has_returns: Whether the last line has carriage returns before its end.
    """

    def __init__(self, file: BinaryIO, path: Path):
        self._file, self._path = file, path
        self.number = self.record_bytes = 0
        self.has_returns = False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        raw, num_skipped = read_line(self._file, self._path)
        if not raw:
            raise StopIteration
        self.number += 1
        self.has_returns = b"\r" in raw[:-2]
        self.record_bytes += len(raw) + num_skipped
        if self.record_bytes > MAX_TEXT_BYTES:
            raise csv.Error(f"more than {MAX_TEXT_BYTES:,} bytes; is a quotation mark open?")
        try:
            return raw.decode("utf-8-sig" if self.number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise not_utf8(self._path, error, self.number) from None


def read_records(path: Path) -> Iterator[dict[str, str]]:
    """Yield column -> field of the records of a .csv or .tsv.

    Raises:
        UserError: as of `read_rows`.
    """
    rows = read_rows(path)
    names = next(rows)
    for row in rows:
        yield dict(zip(names, row))


def column_reader(path: Path, text_field: str) -> Callable[[Counter], Iterator[str]]:
    """Return the function that reads the texts of a column of a .csv or .tsv and counts them.

    Raises:
        UserError: the table has no such column, or several; or as of `read_rows`.
    """
    names = next(read_rows(path))
    if names.count(text_field) != 1:
        known = join_some((printable(name[:80]) for name in names), limit=_MAX_NAMED)
        raise UserError(
            f"one column '{text_field}' in {path}, whose first line names the columns",
            f"columns {known}",
            "name the column of the texts with --text-field",
        )

    def read(counts: Counter) -> Iterator[str]:
        for row in islice(read_rows(path), 1, None):
            yield from clean(row[names.index(text_field)], counts)

    return read


def parquet_units(path: Path, text_field: str | None) -> list[ReadUnit]:
    """Return a unit for every row group of a parquet file.

    Args:
        text_field: Column of texts (default: `text`, of a file without a column of images).

    Raises:
        UserError: pyarrow is not installed, the file is not parquet, it is one of images with
            captions, or the column of strings is missing.
    """
    arrow, file = _open_parquet(path)
    schema = file.schema_arrow
    names = schema.names
    images = image_column(names, [_holds_files(column.type, arrow) for column in schema])
    if text_field is None and images is not None:
        raise found_images(f"a corpus of texts in {path}", "column", images)
    text_field = text_field or "text"
    kind = schema.field(text_field).type if text_field in names else None
    if kind is not None and arrow.types.is_dictionary(kind):
        # Categories of pandas are dictionaries of strings.
        kind = kind.value_type
    tests = ("is_string", "is_large_string", "is_string_view")
    if kind is None or not any(getattr(arrow.types, test)(kind) for test in tests):
        raise UserError(
            f"a column '{text_field}' of strings in {path}",
            (
                f"columns {', '.join(names)}"
                if kind is None
                else f"a column '{text_field}' of {kind}"
            ),
            "name the column with --text-field",
        )

    def read(group: int, counts: Counter) -> Iterator[str]:
        for values in _parquet_column(path, text_field, row_groups=[group]):
            for text in values.to_pylist():
                yield from clean(text or "", counts)

    size = path.stat().st_size
    return [
        ReadUnit(f"{size}:{group}", partial(read, group)) for group in range(file.num_row_groups)
    ]


def read_vectors(path: Path, column: str | None = None) -> list[np.ndarray | None]:
    """Read a column of vectors of a parquet file, each a list of float numbers [D]; None for a
    null.

    Args:
        column: Its name (default: the only one of this kind).

    Raises:
        UserError: as of `parquet_units`, or there is no such column, or several.
    """
    arrow, file = _open_parquet(path)
    known = [field.name for field in file.schema_arrow if _holds_vectors(field.type, arrow)]
    chosen = known[0] if column is None and len(known) == 1 else column
    if chosen is None or chosen not in known:
        raise UserError(
            f"a column {'' if column is None else repr(column) + ' '}of lists of float numbers in"
            f" {path}",
            f"{len(known)} such columns{': ' * bool(known)}{join_some(map(printable, known))}",
            "name the column of the latents with --latents-field",
        )
    require_memory(
        sum(
            part.column(number).total_uncompressed_size
            for part in map(file.metadata.row_group, range(file.num_row_groups))
            for number in range(part.num_columns)
            if part.column(number).path_in_schema.split(".")[0] == chosen
        ),
        f"the column {chosen} of {path}, which is read whole",
        "write it as a .npy file, which is mapped, and give that with --latents",
    )
    vectors: list[np.ndarray | None] = []
    for values in _parquet_column(path, chosen):
        vectors += values.to_numpy(zero_copy_only=False).tolist()
    return vectors


def _parquet_column(path: Path, column: str, **options: Any) -> Iterator[Any]:
    """Yield the arrays of a column of a parquet file.

    Raises:
        UserError: its pages are damaged.
    """
    arrow, file = _open_parquet(path)
    try:
        with file:
            for batch in file.iter_batches(1024, columns=[column], **options):
                batch.validate(full=True)
                yield batch.column(0)
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, error) from None


def _open_parquet(path: Path) -> tuple[Any, Any]:
    """Return the package pyarrow and an opened parquet file.

    Raises:
        UserError: pyarrow is not installed, or the file is not parquet.
    """
    refuse_pointer(path)
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(
            f"the package pyarrow, to read {path}", "it is not installed", EXTRA
        ) from None
    try:
        require_regular(path)
        return arrow, parquet.ParquetFile(path)
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"a parquet file at {path}", first_line(error), "copy or convert it again")


def _holds_vectors(kind: Any, arrow: Any) -> bool:
    names = ("is_list", "is_large_list", "is_fixed_size_list")
    is_list = any(getattr(arrow.types, name)(kind) for name in names)
    return is_list and arrow.types.is_floating(kind.value_type)


def _holds_files(kind: Any, arrow: Any) -> bool:
    """Whether a column holds {bytes, path}, as datasets of images do."""
    return arrow.types.is_struct(kind) and {"bytes", "path"} <= {
        kind.field(i).name for i in range(kind.num_fields)
    }


def image_column(names: list[str], is_picture: list[bool]) -> str | None:
    """Return the column of a table that holds or names images; None for a table of texts.

    Args:
        names: Names of the columns.
        is_picture: Whether each column holds the bytes of files, as datasets of images do.
    """
    return next(
        (name for name, holds in zip(names, is_picture) if holds or name in IMAGE_FIELDS), None
    )


def found_images(expected: str, kind: str, name: str) -> UserError:
    """Return the error for a table of images that was given as one of texts.

    Args:
        kind: `field` or `column`.
        name: Name of the field or column of images.
    """
    return UserError(
        expected,
        f"a {kind} '{name}' of images",
        f"name the {kind} of its captions with --text-field to prepare them as texts; for images"
        " write them to files, with a .jsonl of {image, caption}",
    )
