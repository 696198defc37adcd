"""Corpora: every text is read, bad files are named, prose is told from code."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections import Counter
from itertools import islice

import pytest

from mmldlm.data.corpora import corpus as corpora
from mmldlm.data.corpora import docstrings, hub_datasets, text_files
from mmldlm.data.corpora.corpus import open_corpus
from mmldlm.data.corpora.docstring_prose import prose_paragraphs
from mmldlm.data.corpora.docstrings import docstrings_of
from mmldlm.data.sentences import content_hash, normalize, split_sentences
from mmldlm.errors import UserError


def test_txt_gives_one_text_a_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffFirst line.\r\n\n  Second, with \u00fc.  \nThird".encode())
    corpus = open_corpus(path)
    assert list(corpus) == ["First line.", "Second, with \u00fc.", "Third"]
    assert list(corpus) == list(corpus) and corpus.counts["read"] == 3


def test_jsonl_reads_the_named_field(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"body": text, "id": 1}) + "\n" for text in ("One\ntext.", "  ", "Two.")))
    corpus = open_corpus(path, text_field="body")
    assert list(corpus) == ["One text.", "Two."]
    assert corpus.counts == {"read": 3, "drop_empty": 1}
    with pytest.raises(UserError, match="line 1 has body, id"):
        list(open_corpus(path))


def test_folder_is_read_in_order_and_split(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text("Last one.")
    (tmp_path / "a.txt").write_text("It runs\nover lines. Then it ends.\n\nA new paragraph")
    assert list(open_corpus(tmp_path)) == ["It runs over lines.", "Then it ends.", "A new paragraph", "Last one."]


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("missing.txt", None, "nothing there"),
        ("a.doc", b"x", "a.doc"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "line 2"),
        ("a.jsonl", b"[1]\n", "line 1 has list"),
        ("a.jsonl", b'{"text": "x"}\n{"text": null}\n', "line 2: text is null"),
        ("a.jsonl", b'{"text": 5}\n', "line 1: text is a number"),
        ("a.jsonl", b'{"text": {"body": "x"}}\n', "line 1: text is an object"),
        ("a.jsonl", b'{"body": "x"}\n', "line 1 has body"),
        ("a.txt", b"good\nbad \xff byte\n", "byte 0xff at column 5 of line 2"),
    ],
)
def test_bad_corpora_are_refused_with_the_place(tmp_path, name, content, found):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        list(open_corpus(path))
    assert found in error.value.found and error.value.fix and error.value.exit_code == 2


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
@pytest.mark.parametrize("part_bytes", [1, 7, 30, 1000])
def test_parts_of_a_file_hold_every_line_once(tmp_path, monkeypatch, kind, part_bytes):
    texts = ["One.", "Two is longer, with \u00fc.", "", "Four.", "x" * 40, "Six"]
    lines = texts if kind == "txt" else [json.dumps({"text": text}) for text in texts]
    path = tmp_path / f"a.{kind}"
    path.write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(text_files, "PART_BYTES", part_bytes)
    corpus = open_corpus(path)
    assert len(corpus.units) == -(-path.stat().st_size // part_bytes)
    assert list(corpus) == [text for text in texts if text]


def test_a_bad_line_of_a_later_part_has_its_number(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * 5 + "{\n")
    monkeypatch.setattr(text_files, "PART_BYTES", 20)
    with pytest.raises(UserError, match="line 6"):
        list(open_corpus(path))


def test_compressed_files_are_read_whole(tmp_path):
    texts = [f"Text number {number}." for number in range(50)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    assert list(open_corpus(tmp_path / "a.jsonl.gz")) == texts
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines)[:-20])
    with pytest.raises(UserError, match="complete compressed file"):
        list(open_corpus(tmp_path / "b.jsonl.gz"))
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(lines))
    assert list(open_corpus(tmp_path / "a.jsonl.zst")) == texts


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
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match="a parquet file"):
        open_corpus(tmp_path / "b.parquet")


def test_a_dataset_is_streamed_by_its_shards(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set").mkdir()
    for shard in range(3):
        lines = (json.dumps({"body": f"Text {shard} {number}.", "n": 1}) for number in range(4))
        (tmp_path / "set" / f"train-{shard}.jsonl").write_text("\n".join(lines))
    source, parts = hub_datasets.open_dataset("./set", "body")
    counts = Counter()
    assert source == "hub:./set:train" and len(parts) == 3
    found = [text for _, read in parts for text in read(counts)]
    assert found == [f"Text {shard} {number}." for shard in range(3) for number in range(4)] and counts["read"] == 12
    (part,) = hub_datasets.open_dataset("./set", "body", max_documents=5)[1]
    assert list(part[1](Counter())) == found[:5]
    with pytest.raises(UserError, match="fields body, n"):
        hub_datasets.open_dataset("./set")


def test_names_of_datasets():
    assert hub_datasets.parse("openwebtext").path == "Skylion007/openwebtext"
    spec = hub_datasets.parse("owner/name:config@validation")
    assert (spec.path, spec.name, spec.split) == ("owner/name", "config", "validation")


def test_the_first_documents_and_their_sentences(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("One here. Two there.\nThree. Four!\nFive.")
    corpus = open_corpus(path, max_documents=2, sentences=True)
    assert list(corpus) == ["One here.", "Two there.", "Three.", "Four!"]
    assert corpus.counts == {"read": 4, "documents": 2} and len(corpus.units) == 1


def test_a_folder_of_two_kinds_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("One.")
    (tmp_path / "b.jsonl").write_text('{"text": "Two."}')
    with pytest.raises(UserError, match="jsonl, txt"):
        open_corpus(tmp_path)
    (tmp_path / "a.txt").unlink()
    assert list(open_corpus(tmp_path)) == ["Two."]


def test_folder_without_texts_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        open_corpus(tmp_path)


@pytest.mark.parametrize(
    ("paragraph", "expected"),
    [
        ("One here. Two there! Three?", ["One here.", "Two there!", "Three?"]),
        ("Use a tool, e.g. Make or i.e. Ninja. Done.", ["Use a tool, e.g. Make or i.e. Ninja.", "Done."]),
        ("It is 3.14 or 2. 5 more follow.", ["It is 3.14 or 2.", "5 more follow."]),
        ('J. R. Smith wrote it. He said "Go." She went.', ["J. R. Smith wrote it.", 'He said "Go."', "She went."]),
        ("See Fig. 3 and foo.bar. no break here", ["See Fig. 3 and foo.bar. no break here"]),
        ("No end", ["No end"]),
        ("", []),
    ],
)
def test_split_sentences(paragraph, expected):
    assert split_sentences(paragraph) == expected


def test_splitting_loses_nothing():
    text = 'A b c. D (e.g. F) g! "H i." J? 4.5 k. L. M. N o p. Q'
    assert "".join("".join(split_sentences(text)).split()) == "".join(text.split())


def test_content_folds_case_space_punctuation_and_nothing_else():
    same = ["It's a  dog.", "it s a dog", "IT'S A DOG!", "\u201cIt\u2019s a dog\u201d"]
    assert len({normalize(text) for text in same}) == 1
    assert len({content_hash(text) for text in same}) == 1
    # Marks are letters' parts, digits and symbols are content, and punctuation alone stands for itself.
    different = ["\u0915\u093e", "\u0915\u0940", "a 1", "a 2", "a", "a + b", "a b", "...", "!!!"]
    assert len({normalize(text) for text in different}) == len(different)
    assert content_hash("a", "x") != content_hash("a", "y")


_DOC = """Return the widest shape that a caller may ask for.

This goes over :class:`~package.Thing` and ``values``
in *one* pass, see [1]_.

Args:
    size (`int`, *optional*, defaults to 3):
        The number of rows that are kept in memory.
    name: Some **bold** name of the file to read.
        It goes on here.

Parameters
----------
x : int
    The place of the first row in the table.

Example::

    The code is not prose but it looks like it.

>>> The(doctest) is not prose.
The output of it is not prose either.

.. note:: It warns about the things to come.

.. code-block:: python

    Nothing = "The code is not prose."

```
The fenced block is no prose at all.
```

:param y: The other place of the first row.
:type y: int

| The table | is |
"""


def test_prose_paragraphs_leaves_code_and_markup_out():
    assert prose_paragraphs(_DOC) == [
        "Return the widest shape that a caller may ask for.",
        "This goes over Thing and values in one pass, see.",
        "The number of rows that are kept in memory.",
        "Some bold name of the file to read. It goes on here.",
        "The place of the first row in the table.",
        "It warns about the things to come.",
        "The other place of the first row.",
    ]


@pytest.mark.parametrize(
    ("sentence", "reason"),
    [
        ("The cat sleeps near the warm window.", None),
        ("Return the value of file_name as a string.", None),
        ("Too short here.", "length"),
        ("the cat sleeps near the window.", "form"),
        ("The cat sleeps near the window", "form"),
        ("The cat x = y sleeps near the window.", "symbols"),
        ("The cat (sleeps near the window.", "brackets"),
        ("The idea is discussed at length in, and then in the other book.", "gap"),
        ("Cats sleep very near windows.", "no_stop_word"),
        ("The file_name and the other_name are the same.", "identifiers"),
        ("Cat Window Sleep Near The Foo Bar Baz.", "not_words"),
    ],
)
def test_reject_reason(sentence, reason):
    assert docstrings.reject_reason(sentence) == reason


def test_docstrings_are_found_without_running_the_source():
    source = b'"""Module."""\nraise SystemExit\nif x:\n  class A:\n    "A."\n    def f(self):\n      """F."""\n'
    assert docstrings_of(source) == ["Module.", "A.", "F."]
    assert docstrings_of(b"def broken(:") is None
    assert docstrings_of(b"x = 1\0") is None


def test_docstring_corpus_is_repeatable_and_counts_what_it_leaves(tmp_path, monkeypatch):
    good = tmp_path / "a.py"
    good.write_text('"""The cat sleeps near the warm window.\n\nNot prose."""\n')
    (tmp_path / "b.py").write_text(
        '"""The cat sleeps near the warm window. A cat sleeps near their warm windows."""\n'
        'def f():\n    """The dog sleeps near the window."""'
    )
    (tmp_path / "c.py").write_text('"""Broken.""" def')
    files = [tmp_path / name for name in ("a.py", "b.py", "c.py", "missing.py")]
    monkeypatch.setattr(docstrings, "source_files", lambda: files)
    corpus = open_corpus("docstrings")
    assert list(corpus) == list(corpus) == ["The cat sleeps near the warm window.", "The dog sleeps near the window."]
    assert corpus.counts == {
        "files": 4,
        "files_unreadable": 2,
        "read": 5,
        "drop_length": 1,
        "drop_repeated": 1,
        "drop_near_repeat": 1,
    }


def test_docstring_corpus_skips_tests_and_ourselves():
    parts = {part for path in docstrings.source_files() for part in path.parts[-3:-1]}
    assert not parts & {"test", "tests", "mmldlm", "__pycache__"}


def test_docstring_corpus_of_this_environment():
    texts = list(islice(open_corpus("docstrings"), 500))
    assert len(set(texts)) == 500
    assert all(text[0].isupper() and text[-1] in ".!?" and 5 <= len(text.split()) <= 40 for text in texts)


def test_a_folders_files_may_be_texts_themselves(tmp_path):
    (tmp_path / "a.txt").write_text("One sentence. Two\nsentences.\n\nA paragraph.\n")
    (tmp_path / "b.txt").write_text(" \n")
    corpus = open_corpus(tmp_path, whole_files=True)
    assert list(corpus) == ["One sentence. Two sentences. A paragraph."] and corpus.has_documents
    assert dict(corpus.counts) == {"files": 2, "read": 2, "drop_empty": 1}
    with pytest.raises(UserError, match="whole-files"):
        open_corpus(tmp_path / "a.txt", whole_files=True)


@pytest.mark.parametrize("name", ["corpus.csv", "{folder}/corpus", "notes.tx"])
def test_a_mistyped_path_is_no_dataset(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(UserError, match="nothing there"):
        open_corpus(name.format(folder=tmp_path.name))


def test_carriage_returns_alone_end_lines(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfOne here.\rTwo there.\r\rThree.\r")
    corpus = open_corpus(tmp_path / "a.txt")
    assert list(corpus) == ["One here.", "Two there.", "Three."] and corpus.counts["read"] == 3
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "One."}\r{"text": "Two."}\r')
    assert list(open_corpus(tmp_path / "b.jsonl")) == ["One.", "Two."]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "c.txt").write_bytes(b"One sentence\rgoes on.\r\rAnother.\r")
    assert list(open_corpus(tmp_path / "folder")) == ["One sentence goes on.", "Another."]


def test_a_line_of_any_length_takes_no_more_memory_than_a_text(tmp_path, capsys):
    path = tmp_path / "a.txt.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"First.\n")
        for _ in range(48):
            file.write(b"endless " * (1 << 17))
        file.write(b"\nLast.\n")
    corpus = open_corpus(path)
    tracemalloc.start()
    assert list(corpus) == ["First.", "Last."]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 << 20 and corpus.counts == {"read": 3, "drop_over_16_MiB": 1}
    assert f"{path}: line 2 of 50,331,649 bytes left out" in capsys.readouterr().err


def test_parts_of_a_file_agree_on_a_line_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "PART_BYTES", 1000)
    monkeypatch.setattr(text_files, "MAX_TEXT_BYTES", 2000)
    path = tmp_path / "a.txt"
    path.write_text(f"One.\n{'x' * 4500}\nTwo.\n{'y' * 1500}\nThree.")
    corpus = open_corpus(path)
    assert len(corpus.units) == 7 and list(corpus) == ["One.", "Two.", "y" * 1500, "Three."]
    assert corpus.counts == {"read": 5, "drop_over_16_MiB": 1}


def test_many_lines_without_a_newline_are_told_from_one(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"A line of its own.\r" * 1_000_000)
    with pytest.raises(UserError, match=r"tr '\\r' '\\n' < a.txt"):
        list(open_corpus(path))


def test_documents_of_any_size_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "MAX_TEXT_BYTES", 100)
    (tmp_path / "a.txt").write_text("Short one.\n\n" + "A long line.\n" * 20 + "\nThe end.\n")
    corpus = open_corpus(tmp_path)
    assert list(corpus) == ["Short one.", "The end."] and corpus.counts["drop_over_16_MiB"] == 1
    corpus = open_corpus(tmp_path, whole_files=True)
    assert list(corpus) == [] and corpus.counts == {"files": 1, "read": 1, "drop_over_16_MiB": 1}


def test_json_of_brackets_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "One."}\n' + "[" * 200_000 + "\n")
    with pytest.raises(UserError, match="line 2"):
        list(open_corpus(tmp_path / "a.jsonl"))
