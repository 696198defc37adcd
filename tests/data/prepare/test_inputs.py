"""Identities of what is read: content counts, time does not."""

from __future__ import annotations

import os

import pytest

from mmldlm.data.corpora.text_corpus import UNKNOWN_VERSION
from mmldlm.data.prepare import inputs
from mmldlm.data.prepare.inputs import (
    FileIdentities,
    check_same_encoder,
    check_unchanged,
    diff_inputs,
    file_inputs,
    with_known_versions,
)
from mmldlm.errors import UserError


def test_content_counts_and_time_does_not(tmp_path, monkeypatch):
    path, kept = tmp_path / "a.txt", tmp_path / "kept.json"
    path.write_text("one")
    first = FileIdentities(kept)
    found = first.of({"a": path, "gone": tmp_path / "b"})
    assert found["a"].startswith("3 bytes, sha256 ")
    assert found["gone"] == "No such file or directory"
    first.save()
    os.utime(path, (1, 1))
    assert FileIdentities(kept).of({"a": path}) == {"a": found["a"]}
    path.write_text("two")
    assert FileIdentities(kept).of({"a": path}) != {"a": found["a"]}
    monkeypatch.setattr(inputs, "sha256_of", None)  # what is known is not read again
    path.write_text("one")
    os.utime(path, ns=(1, first._known[str(path)][1]))
    assert FileIdentities(kept).of({"a": path}) == {"a": found["a"]}


def test_of_large_files_parts_and_the_time_count(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "_WHOLE_BYTES", 10)
    monkeypatch.setattr(inputs, "_SAMPLE_BYTES", 2)
    path = tmp_path / "a.txt"
    seen = set()
    for content, time in (
        (b"0123456789ab", 1),
        (b"x123456789ab", 1),
        (b"012345x789ab", 1),
        (b"0123456789ax", 1),
        (b"0123456789ab", 2),
    ):
        path.write_bytes(content)
        os.utime(path, (time, time))
        seen.update(FileIdentities(tmp_path / "none").of({"a": path}).values())
    assert len(seen) == 5


def test_files_of_one_name_are_distinguished(tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "c.txt").write_text(folder)
    named = [("c.txt", tmp_path / folder / "c.txt") for folder in "aba"]
    found = file_inputs(named, FileIdentities(tmp_path / "none"))
    assert list(found) == ["file c.txt", "file c.txt (2)"] and len(set(found.values())) == 2
    (tmp_path / "b" / "c.txt").write_text("x")
    with pytest.raises(UserError, match=r"file c.txt \(2\) was "):
        check_unchanged(named, found, FileIdentities(tmp_path / "none"))


def test_differences_are_named():
    assert diff_inputs({"a": "1", "b": "2"}, {"a": "1", "c": "3"}) == [
        "b was 2, now not there; c was not there, now 3"
    ]
    assert diff_inputs({"a": "1"}, {"a": "1"}) == [] and "not recorded" in diff_inputs(None, {})[0]
    check_same_encoder({"encoder e": "fp32"}, {"encoder e": "fp32", "file a": "1"}, 1)
    with pytest.raises(UserError, match="on rank 1 .*encoder e was fp32, now bf16"):
        check_same_encoder({"encoder e": "bf16"}, {"encoder e": "fp32"}, 1)


def test_a_dataset_of_an_unknown_version_is_not_another_one():
    """A preparation that was started with a network is resumed without one, and the reverse."""
    known, unknown, other = (
        {"a": "1", "dataset hub:x": version}
        for version in ("commit 0", UNKNOWN_VERSION, "commit 9")
    )
    assert (
        with_known_versions(unknown, known) == known
        and with_known_versions(known, unknown) == unknown
    )
    assert with_known_versions(other, known) == other and with_known_versions(known, None) == known
