"""Tables: every record is read, its fields as they were written, and bad tables are named."""

from __future__ import annotations

import csv
import gzip
from collections import Counter

import pytest

from mmldlm.data.corpora import tables
from mmldlm.data.corpora.image_lists import holds_images, list_table
from mmldlm.data.corpora.text_corpus import open_corpus
from mmldlm.errors import UserError

TEXTS = ["One, two; three.", 'He said "yes".', "Two\nlines.", "", "Tab\there.", "  ", "\u00fc"]


def write_table(path, separator, names=("id", "text"), line_end="\r\n", mark=""):
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(mark)
        writer = csv.writer(file, delimiter=separator, lineterminator=line_end)
        writer.writerow(names)
        writer.writerows((str(i), text) for i, text in enumerate(TEXTS))
    return path


@pytest.mark.parametrize(
    ("name", "separator"), [("a.csv", ","), ("a.csv", ";"), ("a.csv", "\t"), ("a.TSV", "\t")]
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_column_is_a_corpus(tmp_path, name, separator, mark):
    """Separators, quotation marks and line ends within fields, a byte order mark, empty cells."""
    path = write_table(tmp_path / name, separator, names=("text", "id"), mark=mark)
    path.write_bytes(path.read_bytes().replace(b"text", b"no", 1).replace(b"id", b"text", 1))
    corpus = open_corpus(path)
    assert list(corpus) == [*(" ".join(text.split()) for text in TEXTS if text.strip())]
    assert corpus.counts == {"read": 7, "drop_empty": 2}
    assert list(corpus) == list(corpus), "it can be read again"


def test_empty_lines_are_no_records_but_empty_cells_are_counted(tmp_path):
    (tmp_path / "a.csv").write_text('\ntext\nOne.\n\n""\nTwo.\n')
    corpus = open_corpus(tmp_path / "a.csv")
    assert list(corpus) == ["One.", "Two."] and corpus.counts == {"read": 3, "drop_empty": 1}


def test_a_compressed_table_and_a_folder_of_tables(tmp_path):
    plain = write_table(tmp_path / "a.csv", ",")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(plain.read_bytes()))
    assert list(open_corpus(tmp_path / "b.csv.gz")) == list(open_corpus(plain))
    assert list(open_corpus(tmp_path)) == 2 * list(open_corpus(plain))
    assert open_corpus(tmp_path).source == f"csv:{tmp_path.name}"
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(plain.read_bytes())[:-9])
    with pytest.raises(UserError, match="a complete compressed file"):
        list(open_corpus(tmp_path / "b.csv.gz"))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "an empty file"),
        (b"\n\n", "an empty file"),
        (b"id,body\n1,x\n", "columns id, body"),
        (b"text,text\n1,x\n", "columns text, text"),
        (b"A sentence without a header.\n", "columns A sentence without a header."),
        (b"id,text\r1,x\r2,y\r", "line 1 in which lines end in \\r"),
        (b"id,text\n1,x\n2,y,z\n", "line 3: 3 fields, where the first one has 2"),
        (b'id,text\n1,"x\ny"\n2\n', "line 4: 1 fields, where the first one has 2"),
        (b'id,text\n1,"x" y\n', "line 2: ',' expected after '\"'"),
        (b'id,text\n1,"x\n2,y\n', "line 3: unexpected end of data"),
        (b"id,text\n1,caf\xe9\n", "byte 0xe9 at column 6 of line 2"),
        ("id,text\n1,x\n".encode("utf-16"), "byte 0xff at column 1 of line 1"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
    ],
)
def test_bad_tables_are_refused_with_the_place(tmp_path, content, found):
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        list(open_corpus(path))
    assert found in error.value.found and "a.csv" in error.value.expected, str(error.value)


@pytest.mark.parametrize("fields", ['"{}\n{}', '"",' * 40 + "{}{}", '"\n",' * 40 + "{}{}"])
def test_the_memory_of_a_record_is_bounded(tmp_path, monkeypatch, fields):
    """An open quotation mark takes the rest of a file into one field."""
    monkeypatch.setattr(tables, "MAX_TEXT_BYTES", 100)
    (tmp_path / "a.csv").write_text("id,text\n1,x\n" + fields.format("y" * 60, "z" * 60) + "\n")
    with pytest.raises(UserError, match="more than 100 bytes|larger than field limit"):
        list(open_corpus(tmp_path / "a.csv"))


def test_a_table_of_images_is_no_corpus_of_texts(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("text\tpath\n" + "A cat.\t\n" + "A dog.\tdeep/a.png\n")
    assert holds_images(path)
    with pytest.raises(UserError, match="--text-field"):
        open_corpus(path)
    assert list(open_corpus(path, text_field="text")) == ["A cat.", "A dog."]
    counts: Counter = Counter()
    (sample,) = list_table(path, tmp_path, counts)
    assert sample.image == "deep/a.png" and counts == {"read": 2, "drop_bad_record": 1}


def test_parquet_by_row_groups(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    texts = [f"Text  {number}." for number in range(10)] + [None]
    parquet.write_table(arrow.table({"body": texts, "id": range(11)}), path, row_group_size=4)
    corpus = open_corpus(path, text_field="body")
    assert len(corpus.units) == 3 and list(corpus) == [f"Text {number}." for number in range(10)]
    assert corpus.counts == {"read": 11, "drop_empty": 1}
    with pytest.raises(UserError, match="columns body, id"):
        open_corpus(path)
    with pytest.raises(UserError, match="of int64"):
        open_corpus(path, text_field="id")
    raw = bytearray(path.read_bytes())
    raw[4:60] = bytes(56)
    (tmp_path / "damaged.parquet").write_bytes(raw)
    with pytest.raises(UserError, match="a parquet file at .*damaged.parquet"):
        list(open_corpus(tmp_path / "damaged.parquet", text_field="body"))
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match="a parquet file"):
        open_corpus(tmp_path / "b.parquet")
