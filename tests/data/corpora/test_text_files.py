"""Files of texts in parts, with bounded memory."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import tracemalloc

import pytest

from mmldlm.data.corpora import text_files
from mmldlm.data.corpora.text_corpus import open_corpus
from mmldlm.errors import UserError


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


def test_many_lines_without_a_newline_are_not_one_long_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"A line of its own.\r" * 1_000_000)
    with pytest.raises(UserError, match=r"tr '\\r' '\\n' < a.txt"):
        list(open_corpus(path))


def test_json_of_brackets_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "One."}\n' + "[" * 200_000 + "\n")
    with pytest.raises(UserError, match="line 2"):
        list(open_corpus(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("suffix", [".txt.gz", ".TXT.ZST"])
def test_a_compressed_file_is_complete_or_an_error(tmp_path, suffix):
    compress = (
        gzip.compress if suffix.endswith("gz") else pytest.importorskip("zstandard").compress
    )
    raw, path = compress(b"One.\nTwo.\n" * 5000), tmp_path / f"a{suffix}"
    path.write_bytes(raw + compress(b"Three."))
    assert list(open_corpus(path)) == ["One.", "Two."] * 5000 + ["Three."]
    for content in (
        raw[: len(raw) // 2],
        raw[:-1],
        raw[:3],
        b"",
        raw + b"other bytes",
        raw + raw[:-1],
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match="complete compressed file"):
            list(open_corpus(path))


def test_a_long_window_is_no_damage(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    settings = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    frame = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    (tmp_path / "a.txt.zst").write_bytes(frame.compress(b"One.\nTwo.\n") + frame.flush())
    assert list(open_corpus(tmp_path / "a.txt.zst")) == ["One.", "Two."]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.csv"])
def test_an_error_of_the_disk_is_no_damage_of_the_file(tmp_path, monkeypatch, name):
    raw = b"text\nOne.\nTwo.\n"
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    corpus = open_corpus(tmp_path / name)

    class Broken(io.BytesIO):
        def read(self, size=-1):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        read1 = readline = read

    monkeypatch.setattr(text_files, "open_regular", lambda path: Broken())
    with pytest.raises(UserError, match=f"a readable file .*{name}(.|\n)*Stale"):
        list(corpus)


def test_joined_files_leave_no_byte_order_marks(tmp_path):
    mark = "\ufeff"
    (tmp_path / "a.TXT").write_text(f"{mark}One.\n{mark} Two.\r{mark}Three.\n", encoding="utf-8")
    assert list(open_corpus(tmp_path / "a.TXT")) == ["One.", "Two.", "Three."]
    lines = [f'{mark}{{"text": "One."}}', "", f'{{"text": "{mark}Two."}}', '{"text": "a\\u0000b"}']
    (tmp_path / "a.JSONL").write_text("\n".join(lines), encoding="utf-8")
    corpus = open_corpus(tmp_path / "a.JSONL")
    assert list(corpus) == ["One.", "Two."] and corpus.counts == {"read": 3, "drop_not_text": 1}


@pytest.mark.parametrize("key", ["image", "image_path", "file_name", "path", "img"])
def test_a_list_of_images_is_no_corpus_of_texts(tmp_path, key):
    lines = [{"text": "without one"}, {key: "deep/a.JPG", "text": "a cat"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for path in (tmp_path / "a.jsonl", tmp_path):
        with pytest.raises(UserError, match="records that name images"):
            open_corpus(path)
    assert list(open_corpus(tmp_path, text_field="text")) == ["without one", "a cat"]
    (tmp_path / "a.jsonl").write_text(json.dumps({"path": "src/a.py", "text": "of a program"}))
    assert list(open_corpus(tmp_path)) == ["of a program"]
