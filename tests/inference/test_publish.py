"""`mmldlm push`: a converted folder goes to the hub and comes back from it, and nothing private
goes along. The hub is a stand-in on this machine; the client is huggingface_hub itself.
"""

from __future__ import annotations

import json
import shutil
import sys

import numpy as np
import pytest

import mmldlm
from mmldlm.checkpoints.convert import convert
from mmldlm.cli import main
from mmldlm.errors import UserError
from mmldlm.inference.publish import publishable_files
from tests.support.helpers import launch
from tests.support.hub_server import TOKEN, Repository, running_hub

CARD = '---\nlibrary_name: mmldlm\n---\n\n# A model\n\n    mmldlm.load("folder")\n'
# Its commands are words of mmldlm, or `load NAME REVISION OUT`, which writes embeddings.
WORKER = """
import json, sys
import numpy as np
import mmldlm
from mmldlm.cli import main
for words in json.loads(sys.argv[1]):
    if words[0] != "load":
        print("exit code", main(words), flush=True)
        continue
    _, name, revision, out = words
    try:
        model = mmldlm.load(name, revision=revision or None)
        np.save(out, model.encode(["word1 word2"], num_steps=2))
    except mmldlm.errors.UserError as error:
        print("refused:", error, flush=True)
"""


@pytest.fixture
def folder(checkpoint, tmp_path):
    """A converted folder that can be published."""
    folder = tmp_path / "folder"
    shutil.copytree(checkpoint, folder)
    set_config(folder, model_type="mmldlm")
    (folder / "README.md").write_text(CARD)
    return folder


def set_config(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config | values))


def run_worker(tmp_path, hub, *commands, **environment) -> str:
    """Run commands in a process whose hub is the stand-in; return what it printed."""
    settings = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "cache"),
        "HF_TOKEN": TOKEN,
        # Without it files go by LFS, which the stand-in has.
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }
    words = [sys.executable, "-c", WORKER, json.dumps([list(map(str, c)) for c in commands])]
    done = launch(words, **(settings | environment))
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_pushed_model_comes_back_from_the_hub(folder, tmp_path):
    sharded, out = tmp_path / "sharded", tmp_path / "samples"
    convert(folder, sharded, shard_bytes=8_000)
    (folder / "modeling.py").write_text("raise SystemExit('code of a folder was executed')")
    with running_hub() as hub:
        foreign = hub.repositories["me/bert"] = Repository(private=False)
        foreign.commits["0" * 40] = {
            "config.json": b'{"model_type": "bert"}', "weights.safetensors": b"x",
        }  # fmt: skip
        printed = run_worker(
            tmp_path, hub,
            ("push", sharded, "me/model"),
            ("push", folder, "me/model", "--private"),
            ("push", folder, "me/model"),
            ("push", folder, "me/model", "--revision", "v2"),
            ("load", "me/model", "", tmp_path / "main.npy"),
            ("load", "me/model", "v2", tmp_path / "v2.npy"),
            ("load", "me/model", "v3", tmp_path / "v3.npy"),
            ("load", "me/other", "", tmp_path / "other.npy"),
            ("load", "me/bert", "", tmp_path / "bert.npy"),
            ("sample", "t2l", "--checkpoint", "me/model", "--revision", "v2", "--num-steps", "2",
             "--text", "word1 word2", "--output-dir", out),
        )  # fmt: skip
        files, endpoint = hub.files("me/model"), hub.endpoint
    # The card names the model as it is found; shards of the first push are gone.
    assert {name for name in files if "safetensors" in name} == {"model.safetensors"}
    assert "modeling.py" not in files and "converted.json" not in files
    assert b'mmldlm.load("me/model")' in files["README.md"]
    assert files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert any(request.startswith("PUT /lfs/") for request in hub.requests)
    assert printed.count("exit code 0") == 4 and printed.count("exit code 2") == 1
    assert "one that is public" in printed and "left out" in printed and "modeling.py" in printed
    assert printed.count("refused:") == 3 and "revision v3" in printed and endpoint in printed
    # A model of another library is refused before its weights are fetched.
    assert "model_type 'bert'" in printed
    assert not any("weights.safetensors" in request for request in hub.requests)

    expected = mmldlm.load(folder).encode(["word1 word2"], num_steps=2)
    for name in ("main.npy", "v2.npy", "samples/latents.npy"):
        np.testing.assert_array_equal(np.load(tmp_path / name), expected)

    # The server is gone now: what is in the cache is still opened.
    offline = {"HF_HUB_OFFLINE": "1"}
    command = ("load", "me/model", "", tmp_path / "offline.npy")
    assert "refused" not in run_worker(tmp_path, hub, command, **offline)
    np.testing.assert_array_equal(np.load(tmp_path / "offline.npy"), expected)


def test_a_dry_run_lists_the_files(folder, capsys):
    (folder / "notes.txt").write_text("mine")
    assert main(["push", str(folder), "me/model", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    for name in ("model.safetensors", "config.json", "README.md", "tokenizer.json"):
        assert name in printed
    assert "notes.txt" in printed and "nothing was sent" in printed


@pytest.mark.parametrize("name", ["config.json", "README.md", "model.safetensors", "tokenizer"])
def test_an_incomplete_folder_is_refused(folder, name):
    for path in folder.glob(f"{name}*"):
        path.unlink()
    with pytest.raises(UserError, match=name):
        publishable_files(folder)


def test_a_damaged_folder_is_refused(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError):
        publishable_files(folder)


@pytest.mark.parametrize(
    "name, text, found",
    [
        ("config.yaml", "data:\n  latent_data_root: /data/store\n", "data.latent_data_root"),
        ("config.yaml", "training:\n  init_from: ~/runs/a\n", "training.init_from"),
        ("README.md", CARD + "made in /tmp/me/run\n", "/tmp/me/run in line 8"),
        ("README.md", CARD + "token hf_" + "a" * 34, "a secret in line 8"),
        ("README.md", CARD + "http://me:word@host/", "a secret in line 8"),
        ("generation_config.json", '{"a": [{"b": "file:///x/y"}]}', "a.b"),
        ("generation_config.json", '{"a": "github_pat_' + "a" * 40 + '"}', "a, a secret"),
    ],
)
def test_what_is_private_is_named_and_not_published(folder, name, text, found):
    (folder / name).write_text(text)
    with pytest.raises(UserError) as error:
        publishable_files(folder)
    assert f"{name}: {found}" in str(error.value)


def test_a_secret_of_the_shell_is_found(folder, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    (folder / "README.md").write_text(CARD + "key: 0123456789abcdef\n")
    with pytest.raises(UserError, match="a secret in line 8") as error:
        publishable_files(folder)
    assert "0123456789" not in str(error.value)


def test_words_of_a_card_are_no_paths(folder):
    (folder / "README.md").write_text(
        CARD + "and/or, 3/4, https://a.b/tmp/c, /v1/models, /tmp, </a/b>\n"
    )
    publishable_files(folder)


def test_a_link_out_of_the_folder_is_not_followed(folder, tmp_path):
    (tmp_path / "secret").write_text("x")
    (folder / "LICENSE").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="LICENSE"):
        publishable_files(folder)
