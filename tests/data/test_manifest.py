"""The advice of errors about a store must not cost users the store: the right corpus, the right
path.
"""

from __future__ import annotations

import json
import shlex

import pytest

from mmldlm.cli import main
from mmldlm.data.manifest import rebuild_hint
from mmldlm.data.prepare.options import PrepareOptions
from mmldlm.data.store import Store
from mmldlm.errors import UserError


def _truncated(root, **options):
    (root / "train").mkdir(parents=True)
    (root / "train" / "text.npy").write_bytes(b"")
    manifest = {
        "format": "mmldlm-store",
        "version": 1,
        "latent_dim": 2,
        "latent_stats": {},
        "tokenizer": {},
        "splits": {"train": {}},
        "files": {"train/text.npy": {"bytes": 10}},
        "options": options,
    }
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root


def test_a_damaged_store_is_rebuilt_from_its_own_corpus(tmp_path):
    options = PrepareOptions(
        "", corpus="novels.jsonl", text_field="body", max_tokens=30, keep_duplicates=True
    )
    root = _truncated(tmp_path / "my store", **options.identity())
    with pytest.raises(UserError) as error:
        Store(root)
    words = shlex.split(error.value.fix.partition("with: ")[2].partition(" (")[0])
    assert words[:3] == ["mmldlm", "prepare", "novels.jsonl"]
    assert {
        "--text-field=body",
        "--max-tokens=30",
        "--keep-duplicates",
        "--force",
        str(root),
    } <= set(words)
    assert "give their paths" in error.value.fix


def test_the_default_corpus_is_named_only_where_it_was_the_corpus(tmp_path):
    assert "mmldlm prepare docstrings " in rebuild_hint(
        tmp_path, {"options": PrepareOptions("").identity()}
    )
    assert "mmldlm pack folder " in rebuild_hint(
        tmp_path, {"options": {}, "corpus": {"source": "files:folder"}}
    )
    for unknown in (None, {}, {"options": {"seed": 0}}, {"options": None}, []):
        assert "mmldlm prepare CORPUS " in rebuild_hint(tmp_path, unknown)


def test_a_wrong_path_names_the_stores_near_it(tmp_path, capsys):
    store = _truncated(tmp_path / "data" / "news")
    for wrong in (tmp_path / "data", tmp_path / "data" / "new"):
        assert main(["verify-data", str(wrong)]) == 2
        fix = capsys.readouterr().err.partition("fix:")[2].strip()
        assert (
            fix.startswith(f"check the path (there is a store at {store})")
            and "prepare CORPUS" in fix
        )
    assert main(["train", "--config-name", "tiny"]) == 2
    assert "mmldlm prepare CORPUS --output-dir DIR" in capsys.readouterr().err
