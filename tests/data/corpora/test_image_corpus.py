"""Folders of images with captions: pairs by name, everything else counted."""

from __future__ import annotations

from collections import Counter

import pytest
from PIL import Image

from mmldlm.data.corpora.image_corpus import list_folder
from mmldlm.errors import UserError
from mmldlm.utils.input_files import LeftOut


def test_pairs_and_counts(tmp_path):
    (tmp_path / "more").mkdir()
    for name in ("a.png", "more/a.jpg", "b.PNG", "lone.png", "empty.png", "bad.png"):
        Image.new("L", (4, 4)).save(tmp_path / name)
    captions = {
        "a.txt": "a  red\ncat ",
        "more/a.txt": "another",
        "b.txt": "b",
        "empty.txt": " \n",
        "nothing.txt": "x",
    }
    for name, caption in captions.items():
        (tmp_path / name).write_text(caption)
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xff")
    counts = Counter()
    samples = list_folder(tmp_path, counts, LeftOut())
    assert [(s.image, s.caption) for s in samples] == [
        ("a.png", "a red cat"),
        ("b.PNG", "b"),
        ("more/a.jpg", "another"),
    ]
    assert counts == {"read": 7, "drop_no_image": 1, "drop_no_caption": 2, "drop_not_unicode": 1}


@pytest.mark.parametrize("name", ["only.png", "only.txt", None])
def test_no_pair_at_all_is_an_error_that_says_what_lies_there(tmp_path, name):
    if name == "only.png":
        Image.new("L", (4, 4)).save(tmp_path / name)
    elif name:
        (tmp_path / name).write_text("a caption")
    with pytest.raises(UserError, match=name or "0 images and 0 .txt"):
        list_folder(tmp_path, Counter(), LeftOut())
