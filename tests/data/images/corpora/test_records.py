"""Lists of images: three forms give the same samples, and bad records are counted, never
guessed.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest

from mmldlm.data.images.corpora.records import list_json, list_jsonl
from mmldlm.errors import UserError


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


@pytest.mark.parametrize("content", ["{", '{"info": 1}', "3"])
def test_another_json_is_refused(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError):
        list_json(tmp_path / "x.json", tmp_path, Counter())
