"""Corpora: every text is read, and bad files are named."""

from __future__ import annotations

import json

import pytest

from mmldlm.data.corpora import text_corpus as corpora
from mmldlm.data.corpora.text_corpus import open_corpus
from mmldlm.errors import UserError


def test_txt_gives_one_text_a_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffFirst line.\r\n\n  Second, with \u00fc.  \nThird".encode())
    corpus = open_corpus(path)
    assert list(corpus) == ["First line.", "Second, with \u00fc.", "Third"]
    assert list(corpus) == list(corpus) and corpus.counts["read"] == 3


def test_jsonl_reads_the_named_field(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(
            json.dumps({"body": text, "id": 1}) + "\n"
            for text in ("One\ntext.", "  ", None, "Two.")
        )
    )
    corpus = open_corpus(path, text_field="body")
    assert list(corpus) == ["One text.", "Two."]
    assert corpus.counts == {"read": 4, "drop_empty": 2}
    with pytest.raises(UserError, match="line 1 has body, id"):
        list(open_corpus(path))


def test_folder_is_read_in_order_and_split(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.txt").write_text("Last one.")
    (tmp_path / "a.txt").write_text("It runs\nover lines. Then it ends.\n\nA new paragraph")
    assert list(open_corpus(tmp_path)) == [
        "It runs over lines.",
        "Then it ends.",
        "A new paragraph",
        "Last one.",
    ]


def test_binary_sentences_of_a_folder_are_counted(tmp_path):
    (tmp_path / "a.txt").write_text("It runs. It\0stops. It ends.")
    corpus = open_corpus(tmp_path)
    assert list(corpus) == ["It runs.", "It ends."]
    assert corpus.counts["read"] == 3 and corpus.counts["drop_not_text"] == 1


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("missing.txt", None, "nothing there"),
        ("a.doc", b"x", "a.doc"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "line 2"),
        ("a.jsonl", b"[1]\n", "line 1 has list"),
        ("a.jsonl", b'{"text": 5}\n', "line 1 has 5"),
        ("a.jsonl", b'{"text": {"body": "x"}}\n', 'line 1 has {"body": "x"}'),
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


def test_documents_of_any_size_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "MAX_TEXT_BYTES", 100)
    (tmp_path / "a.txt").write_text("Short one.\n\n" + "A long line.\n" * 20 + "\nThe end.\n")
    corpus = open_corpus(tmp_path)
    assert list(corpus) == ["Short one.", "The end."] and corpus.counts["drop_over_16_MiB"] == 1
    corpus = open_corpus(tmp_path, whole_files=True)
    assert list(corpus) == [] and corpus.counts == {"files": 1, "read": 1, "drop_over_16_MiB": 1}
