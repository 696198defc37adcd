"""Which corpora are of images, and which are of texts with a picture among them."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from mmldlm.data.corpora.image_lists import holds_images, list_json, list_jsonl
from mmldlm.errors import UserError


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


def test_three_forms_of_one_list(tmp_path):
    pairs = [("a.jpg", "A cat ."), ("a.jpg", "One cat"), ("b.jpg", "A dog")]
    ids = {"a.jpg": 17, "b.jpg": 4}
    coco = {
        "images": (
            [{"id": number, "file_name": name} for name, number in ids.items()]
            + [{"id": 9, "file_name": "c"}]
        ),
        "annotations": [{"image_id": ids[name], "caption": caption} for name, caption in pairs],
    }
    legacy = [
        {"image_path": name, "caption": caption, "image_id": ids[name]} for name, caption in pairs
    ]
    lines = [
        {"image": "a.jpg", "caption": ["A cat .", "One cat"]},
        {"image": "b.jpg", "text": "A dog"},
    ]
    (tmp_path / "coco.json").write_text(json.dumps(coco))
    (tmp_path / "legacy.json").write_text(json.dumps(legacy))
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name, listing in (
        ("coco.json", list_json),
        ("legacy.json", list_json),
        ("list.jsonl", list_jsonl),
    ):
        counts = Counter()
        samples = listing(tmp_path / name, tmp_path / "images", counts)
        assert [(s.image, s.caption) for s in samples] == pairs, name
        assert samples[0].group == samples[1].group != samples[2].group, (
            "captions of one image are one group"
        )
        assert samples[0].path == tmp_path / "images" / "a.jpg"
        assert counts == (
            {"read": 4, "drop_no_caption": 1} if name == "coco.json" else {"read": 3}
        )


def test_null_fields_count_as_absent_and_whole_floats_as_whole(tmp_path):
    lines = [
        {"image": "a.png", "caption": None, "text": "A cat", "group": 3.0},
        {"image": None, "image_path": "b.png", "text": "A dog", "group": None, "image_id": 3},
        {"image": "c.png", "text": "A cow", "group": 3.5},
    ]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, lines)))
    counts = Counter()
    samples = list_jsonl(tmp_path / "list.jsonl", tmp_path, counts)
    assert [(s.image, s.caption) for s in samples] == [("a.png", "A cat"), ("b.png", "A dog")]
    assert {sample.group for sample in samples} == {"group 3"}
    assert counts == {"read": 3, "drop_bad_record": 1}


def test_bad_records_are_counted(tmp_path):
    lines = [
        '{"image": "a.png", "caption": "x"}',
        "no json",
        '{"image": 3, "caption": "x"}',
        '{"image": "b.png"}',
        '{"image": "c.png", "caption": "\\ud800"}',
        "[1]",
        "",
    ]
    (tmp_path / "list.jsonl").write_text("\n".join(lines))
    counts = Counter()
    assert [s.image for s in list_jsonl(tmp_path / "list.jsonl", tmp_path, counts)] == ["a.png"]
    assert counts == {"read": 6, "drop_bad_record": 3, "drop_no_caption": 1, "drop_not_unicode": 1}


def test_absolute_paths_are_named_below_the_folder_even_through_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    paths = [tmp_path / "link" / "a" / "1.png", tmp_path / "real" / "b" / "1.png", "/else/1.png"]
    lines = [json.dumps({"image": str(path), "caption": "x"}) for path in paths]
    (tmp_path / "list.jsonl").write_text("\n".join(lines))
    samples = list_jsonl(tmp_path / "list.jsonl", tmp_path / "link", Counter())
    assert [sample.image for sample in samples] == ["a/1.png", "b/1.png", "1.png"]
    assert [str(sample.path) for sample in samples] == list(map(str, paths))


@pytest.mark.parametrize("content", ["{", '{"info": 1}', "3"])
def test_another_json_is_refused(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError):
        list_json(tmp_path / "x.json", tmp_path, Counter())
