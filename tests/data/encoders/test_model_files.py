"""Files on which the vectors of an encoder depend."""

from __future__ import annotations

import ast
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

import mmldlm
from mmldlm.data.encoders.model_files import encoder_dir, model_files, name_to_load
from mmldlm.errors import UserError

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


def test_a_folder_that_moved_is_found_where_the_user_says(tmp_path, monkeypatch):
    """public-reports B 15: among other folders, or itself under another name"""
    identity = {"name": "enc", "source": "folder:enc"}
    for name in ("a/enc", "b", "renamed"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "renamed" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MMLDLM_ENCODERS", str(tmp_path / "b"))
    with pytest.raises(UserError, match=f"nor in {tmp_path}/b(?s:.*)--encoder-dir"):
        name_to_load(identity)
    for given, found in (("a", "a/enc"), ("renamed", "renamed")):
        with encoder_dir(str(tmp_path / given)):
            assert name_to_load(identity) == str(tmp_path / found)
    (tmp_path / "enc").mkdir()
    assert name_to_load(identity) == "enc"
    with encoder_dir(str(tmp_path / "a")):
        assert name_to_load(identity) == str(tmp_path / "a" / "enc")
    assert os.environ["MMLDLM_ENCODERS"] == str(tmp_path / "b")
    with encoder_dir(None):
        assert name_to_load(identity) == "enc"
    with pytest.raises(UserError, match="no such folder"), encoder_dir(str(tmp_path / "none")):
        pass
    assert name_to_load({"name": "minilm", "source": "imported"}) == "minilm"


def test_calls_at_once_have_folders_of_their_own(tmp_path):
    identity = {"name": "enc", "source": "folder:enc"}
    for name in "ab":
        (tmp_path / name / "enc").mkdir(parents=True)
    both_inside, both_done = Barrier(2), Barrier(2)

    def find(name: str) -> str:
        with encoder_dir(str(tmp_path / name)):
            both_inside.wait(60)
            found = name_to_load(identity)
            both_done.wait(60)
        return found

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(find, "ab")) == [str(tmp_path / name / "enc") for name in "ab"]


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
