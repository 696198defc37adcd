"""The advice of errors about a store must not cost users the store: the right path, no default
corpus.
"""

from __future__ import annotations

import json
import shlex

import pytest

from mmldlm.cli import main
from mmldlm.data.store import Store
from mmldlm.errors import UserError


def test_a_damaged_store_is_rebuilt_from_a_named_corpus(made_store, tmp_path):
    root = tmp_path / "my store"
    (root / "train").mkdir(parents=True)
    manifest = json.loads((made_store / "manifest.json").read_text())
    (root / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError) as error:
        Store(root)
    words = shlex.split(error.value.fix.partition("with: ")[2].partition(" (")[0])
    assert words == ["mmldlm", "prepare", "CORPUS", "--force", "--output-dir", str(root)]


def test_a_missing_store_is_told_how_to_be_made(tmp_path, capsys):
    assert main(["verify-data", str(tmp_path / "none")]) == 2
    fix = capsys.readouterr().err.partition("fix:")[2].strip()
    assert fix.startswith("check the path") and "mmldlm prepare CORPUS --output-dir" in fix
    assert main(["train", "--config-name", "tiny"]) == 2
    assert "mmldlm prepare CORPUS --output-dir DIR" in capsys.readouterr().err
