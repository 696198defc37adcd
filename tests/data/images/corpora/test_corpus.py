"""Which corpora are of images, and which are of texts with a picture among them."""

from __future__ import annotations

import pytest

from mmldlm.data.images.corpora.corpus import holds_images


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("a.png a.txt b.txt c.txt", True),
        ("a.png b.png", True),
        ("a.png b.png x.txt y.txt", True),  # names that do not fit: opened as images, and refused
        ("a.png x.txt y.txt", False),
        ("0.tar 1.tar", True),
        ("backup.tar a.parquet b.parquet", False),
        ("a.jsonl.gz b.txt logo.jpg", False),
        ("readme.md", False),
        ("", False),
    ],
)
def test_a_folder_is_what_most_of_its_files_are(tmp_path, files, expected):
    for name in files.split():
        (tmp_path / name).touch()
    assert holds_images(tmp_path) is expected


def test_names_and_files(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"image": "a.png", "text": "a"}')
    (tmp_path / "b.jsonl").write_text('{"text": "a"}')
    assert holds_images(tmp_path / "a.jsonl") and not holds_images(tmp_path / "b.jsonl")
    assert all(map(holds_images, ("glyphs", "emoji", "shards/*.tar"))) and not holds_images(
        "docstrings"
    )
