"""A model's folder from elsewhere: damaged or hostile files are errors that name the file, and no
code of it is run.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import tomllib

import pytest

from mmldlm.cli import main as command
from mmldlm.errors import UserError
from mmldlm.inference.inputs import tokenize_texts
from mmldlm.inference.load import load_pretrained
from tests.support.helpers import ROOT, launch


@pytest.fixture
def folder(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "model")


def with_header(path, change) -> None:
    """Writes a safetensors file with another header, its data as it was."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = change(raw[8 : 8 + length])
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


def with_shape(shape):
    def change(header: bytes) -> bytes:
        values = json.loads(header)
        next(entry for name, entry in values.items() if name != "__metadata__")["shape"] = shape
        return json.dumps(values).encode()

    return change


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-5000]),
    "header of 1 TB": lambda path: path.write_bytes(
        (1 << 40).to_bytes(8, "little") + path.read_bytes()[8:]
    ),
    "brackets": lambda path: with_header(path, lambda header: b"[" * 5_000_000),
    "negative": lambda path: with_header(path, with_shape([-1, 6])),
    "overflow": lambda path: with_header(path, with_shape([1 << 40, 1 << 40])),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_named(folder, damage):
    DAMAGES[damage](folder / "model.safetensors")
    with pytest.raises(
        UserError, match="an intact .*model.safetensors\n  found: .+\n.*copy the file again"
    ):
        load_pretrained(folder)


def config_with(**values):
    return lambda text: json.dumps({**json.loads(text), **values})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (config_with(n_heads=3), "does not divide"),
        (config_with(hidden_size=10**9), "hidden_size"),
        (config_with(hidden_size=1 << 20), "mismatched"),  # allowed, and 50 TB if it were built
        (config_with(n_blocks=9_999), "n_blocks 9999"),
        (config_with(max_seq_len=1 << 28), "mismatched"),
        (config_with(vocab_size="many"), "vocab_size"),
        (config_with(training={"mode_weights": [1]}), "mode_weights"),
        (config_with(training=3), "training"),
        (config_with(encoder="minilm"), "encoder"),
        (lambda text: "[" * 200_000, "damaged file"),
        (lambda text: text[:-20], "damaged file"),
        (lambda text: "[]", "damaged file: a JSON list"),
        (lambda text: " " * (5 << 20) + text, "more than"),
    ],
)
def test_a_damaged_config_is_named(folder, change, says):
    path = folder / "config.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=says) as caught:
        load_pretrained(folder)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("names", [["../outside.safetensors"], [], ["/etc/passwd"]])
def test_an_index_names_files_of_its_own_folder(folder, names):
    shutil.move(folder / "model.safetensors", folder.parent / "outside.safetensors")
    index = {"weight_map": {f"tensor{number}": name for number, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="model.safetensors.index.json"):
        load_pretrained(folder)


def test_the_commands_end_with_2(folder, tmp_path, capsys):
    DAMAGES["cut"](folder / "model.safetensors")
    words = [
        "sample",
        "unconditional",
        "--checkpoint",
        str(folder),
        "--output-dir",
        str(tmp_path / "out"),
    ]
    assert command(words) == 2
    assert "truncated" in capsys.readouterr().err


def test_a_tokenizer_with_code_of_its_own_is_refused_without_a_question(
    folder, tmp_path, monkeypatch, capsys
):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "X", "auto_map": {"AutoTokenizer": [None, "evil.X"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast\n"
        "class X(PreTrainedTokenizerFast): pass\n"
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    words = [
        "sample",
        "unconditional",
        "--checkpoint",
        str(folder),
        "--output-dir",
        str(tmp_path / "out"),
    ]
    assert command(words) == 2
    shown = capsys.readouterr()
    assert "auto_map" in shown.err and "does not run" in shown.err and "[y/N]" not in shown.out
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_of_gigabytes_is_not_read(folder):
    with open(folder / "tokenizer.json", "r+b") as file:
        file.truncate(6 << 30)
    with pytest.raises(UserError, match="tokenizer.json of 6,442,450,944 bytes"):
        load_pretrained(folder)


def test_the_tokenizer_of_a_folder_of_an_earlier_version_is_found(folder):
    """Until 0.1.0 `mmldlm convert` kept it in a folder of its own."""
    expected = load_pretrained(folder).tokenizer.get_vocab()
    (folder / "tokenizer").mkdir()
    for path in folder.glob("tokenizer*.json"):
        path.rename(folder / "tokenizer" / path.name)
    assert load_pretrained(folder).tokenizer.get_vocab() == expected


def test_names_of_special_tokens_in_a_text_are_words(checkpoint):
    """As `mmldlm prepare` reads them."""
    pretrained = load_pretrained(checkpoint)
    (ids,) = tokenize_texts(["word1 [MASK] word2 [EOS] [PAD]"], pretrained)
    tokenizer = pretrained.tokenizer
    assert not {tokenizer.mask_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id} & set(ids)
    assert tokenizer.convert_tokens_to_ids("word2") in ids


def test_models_are_used_without_what_only_a_training_needs(checkpoint):
    """What docs/usage.md installs is enough: the other requirements cannot be imported here."""
    page = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8")
    installed = set(re.search(r"install -c constraints.txt (torch tr.*)", page)[1].split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}
    imports = {"nvidia-ml-py": "pynvml"}
    left_out = [imports.get(name, name) for name in required - installed]
    assert installed < required and "deepspeed" in left_out
    script = f"""
import sys
sys.modules |= dict.fromkeys({left_out})
import mmldlm
model = mmldlm.load({str(checkpoint)!r})
assert len(model.decode([[1.0] * 6], num_steps=2)) == len(model.encode(["word1"])) == 1
from mmldlm.commands import convert, sample
"""
    done = launch([sys.executable, "-c", script])
    assert done.returncode == 0, done.stdout
