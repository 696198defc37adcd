"""Files on which the vectors of an encoder depend."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import mmldlm
from mmldlm.data.encoders.model_files import model_files

OWN = "MultimodalMMDiT"


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


def calls_without_refusal(source: str):
    """Lines of every `X.from_pretrained(...)` of a class that is not ours without
    trust_remote_code=False.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        is_own = isinstance(owner, ast.Name) and owner.id == OWN
        refused = any(
            word.arg == "trust_remote_code"
            and isinstance(word.value, ast.Constant)
            and word.value.value is False
            for word in node.keywords
        )
        if node.func.attr == "from_pretrained" and not is_own and not refused:
            yield node.lineno


def test_every_call_refuses_code():
    package = Path(mmldlm.__file__).parent
    found = [
        f"{path}:{line}"
        for path in package.rglob("*.py")
        for line in calls_without_refusal(path.read_text())
    ]
    assert found == []


def test_the_check_sees_a_call_without_it():
    assert list(
        calls_without_refusal(
            "AutoModel.from_pretrained(x)\nkind.from_pretrained(x, trust_remote_code=True)"
        )
    )
    assert not list(calls_without_refusal("AutoModel.from_pretrained(x, trust_remote_code=False)"))
