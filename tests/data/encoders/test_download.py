"""Files on which the vectors of an encoder depend."""

from __future__ import annotations

import json

import pytest

from mmldlm.data.encoders.download import model_files


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_files_of_modules_count_whatever_the_list_begins_with(encoding, tmp_path):
    (tmp_path / "2_Dense").mkdir()
    for name in ("model.safetensors", "2_Dense/model.safetensors", "2_Dense/config.json"):
        (tmp_path / name).write_bytes(b"{}")
    modules = [{"type": "Transformer", "path": ""}, {"type": "Dense", "path": "2_Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules), encoding=encoding)
    names = {path.relative_to(tmp_path).as_posix() for path in model_files(tmp_path)}
    assert names == {
        "modules.json",
        "model.safetensors",
        "2_Dense/model.safetensors",
        "2_Dense/config.json",
    }
