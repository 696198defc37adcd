"""Hugging Face datasets as corpora."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from mmldlm.data.corpora import text_corpus as hub_datasets
from mmldlm.errors import UserError


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
    assert (
        found == [f"Text {shard} {number}." for shard in range(3) for number in range(4)]
        and counts["read"] == 12
    )
    (part,) = hub_datasets.open_dataset("./set", "body", max_documents=5)[1]
    assert list(part[1](Counter())) == found[:5]
    with pytest.raises(UserError, match="fields body, n"):
        hub_datasets.open_dataset("./set")


def test_names_of_datasets():
    assert hub_datasets.parse_dataset("openwebtext").path == "Skylion007/openwebtext"
    spec = hub_datasets.parse_dataset("owner/name:config@validation")
    assert (spec.path, spec.name, spec.split) == ("owner/name", "config", "validation")
