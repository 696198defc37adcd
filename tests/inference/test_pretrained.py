"""Whatever a user names as --checkpoint gives the same model; what is damaged or hostile is
refused, never believed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct

import pytest
import torch

import mmldlm.inference.load
from mmldlm.checkpoints.commit import begin
from mmldlm.checkpoints.convert import convert, convert_state
from mmldlm.errors import UserError
from mmldlm.inference.load import load_pretrained, usable_device
from mmldlm.models import MultimodalMMDiT


@pytest.fixture(scope="module")
def run(checkpoint, tmp_path_factory):
    """A run with one checkpoint as the single engine saves it, with a moving average of other
    values.
    """
    folder = tmp_path_factory.mktemp("run") / "r"
    model = MultimodalMMDiT.from_pretrained(checkpoint)
    pending = begin(folder, 7)
    engine = pending.path / "engine"
    engine.mkdir()
    torch.save(model.state_dict(), engine / "model.pt")
    average = {
        name: {"start": 0, "shape": list(p.shape), "values": torch.full((p.numel(),), 9.0)}
        for name, p in model.named_parameters()
    }
    torch.save(average, engine / "ema_rank0.pt")
    shutil.copy(checkpoint / "config.json", pending.path / "model_config.json")
    (pending.path / "tokenizer").mkdir()
    for path in checkpoint.glob("tokenizer*.json"):
        shutil.copy(path, pending.path / "tokenizer")
    pending.commit(engine="single")
    return folder


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported")
    convert(run, out / "safetensors")
    convert_state(run, out / "pt", "model.pt")
    return out


@pytest.mark.parametrize(
    "named",
    [
        "RUN",
        "RUN/latest",
        "RUN/checkpoints/step_00000007",
        "RUN/checkpoints/step_00000007/engine/model.pt",
        "OUT/safetensors",
        "OUT/safetensors/model.safetensors",
        "OUT/pt",
        "OUT/pt/model.pt",
    ],
)
def test_every_name_of_a_model_opens_it(checkpoint, run, exported, named):
    path = named.replace("RUN", str(run)).replace("OUT", str(exported))
    before = sorted(run.parent.rglob("*")), sorted(exported.rglob("*"))
    found = load_pretrained(path)
    expected = MultimodalMMDiT.from_pretrained(checkpoint).state_dict()
    state = found.model.state_dict()
    assert state.keys() == expected.keys()
    # The weights, not their average.
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert (
        found.tokenizer.mask_token == "[MASK]"
        and found.mode_weights["l2t"] == 0.4
        and not found.model.training
    )
    # No second copy on the disk.
    assert before == (
        sorted(run.parent.rglob("*")),
        sorted(exported.rglob("*")),
    )


def test_a_bf16_export_is_widened(run, tmp_path):
    convert(run, tmp_path / "out", dtype="bf16")
    state = load_pretrained(tmp_path / "out").model.state_dict()
    exact = load_pretrained(run).model.state_dict()
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    assert torch.equal(state["text_head.weight"], exact["text_head.weight"].bfloat16().float())


def test_a_checkpoint_that_its_run_deletes_meanwhile_is_named(run, tmp_path, monkeypatch):
    copy = shutil.copytree(run, tmp_path / "r", symlinks=True)
    read = mmldlm.inference.load.read_values

    def read_and_delete(path):
        values = read(path)
        shutil.rmtree(copy / "checkpoints")
        return values

    monkeypatch.setattr("mmldlm.inference.load.read_values", read_and_delete)
    with pytest.raises(UserError, match="its run deleted it meanwhile"):
        load_pretrained(copy)


def test_a_tied_model_has_one_embedding(checkpoint, tmp_path):
    from mmldlm.models.mmdit_config import ModelConfig

    values = json.loads((checkpoint / "config.json").read_text())
    known = {key: value for key, value in values.items() if key in ModelConfig.model_fields}
    shutil.copytree(checkpoint, tmp_path / "tied")
    MultimodalMMDiT(ModelConfig(**{**known, "tie_embeddings": True})).save_pretrained(
        tmp_path / "tied"
    )
    (tmp_path / "tied" / "config.json").write_text(json.dumps({**values, "tie_embeddings": True}))
    state = load_pretrained(tmp_path / "tied").model.state_dict()
    assert torch.equal(state["text_head.weight"], state["text_encoder.token_embedding.weight"])


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-500])


def huge_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 40) + path.read_bytes()[8:])


def set_config(text=None, **values):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(text or json.dumps({**config, **values}))

    return change


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        huge_header,
        lambda folder: (folder / "model.safetensors").write_bytes(b"[" * 100_000),
        set_config(n_heads=3),
        set_config(hidden_size=10**9),
        set_config(n_blocks=10**9),
        set_config(vocab_size="many"),
        set_config(architecture="Llama"),
        set_config("[" * 200_000),
        lambda folder: (folder / "config.json").unlink(),
    ],
)
def test_a_damaged_model_is_a_users_error(checkpoint, tmp_path, damage):
    shutil.copytree(checkpoint, tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(UserError, match=str(tmp_path / "model")) as error:
        load_pretrained(tmp_path / "model")
    assert error.value.exit_code == 2


def test_a_pickle_with_code_is_not_run(exported, tmp_path):
    shutil.copytree(exported / "pt", tmp_path / "pt")
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return open, (str(marker), "w")

    torch.save({"a": Evil()}, tmp_path / "pt" / "model.pt")
    with pytest.raises(UserError, match="model.pt"):
        load_pretrained(tmp_path / "pt")
    assert not marker.exists()


def test_weights_of_another_model_are_refused(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other", symlinks=True)
    state = torch.load(other / "checkpoints/step_00000007/engine/model.pt", weights_only=True)
    shutil.copytree(run / "checkpoints/step_00000007", tmp_path / "loose")
    (tmp_path / "loose" / "manifest.json").unlink()
    torch.save(
        {**state, "extra.weight": torch.ones(2)}, tmp_path / "loose" / "engine" / "model.pt"
    )
    with pytest.raises(UserError, match="extra.weight: not a tensor of this model"):
        load_pretrained(tmp_path / "loose" / "engine" / "model.pt")


@pytest.mark.parametrize("name", ["cuda", "cuda:7", "gpu", "meta"])
@pytest.mark.parametrize("command", ["sample", "evaluate"])
def test_a_device_that_is_not_here_is_refused_first(name, command, tmp_path, monkeypatch, capsys):
    from mmldlm import cli

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "empty", _without_cuda(torch.empty))
    words = {
        "sample": ["sample", "unconditional", "--output-dir", str(tmp_path / "out")],
        "evaluate": ["evaluate", "--data", str(tmp_path / "store")],
    }[command]
    assert cli.main([*words, "--checkpoint", str(tmp_path / "none"), "--device", name]) == 2
    said = capsys.readouterr().err
    assert "--device" in said and f"found: {name}" in said and "omit --device" in said


def _without_cuda(empty):
    def refuse(*shape, device=None, **more):
        if torch.device(device or "cpu").type == "cuda":
            raise AssertionError("Torch not compiled with CUDA enabled")
        return empty(*shape, device=device, **more)

    return refuse


def test_the_default_device_is_usable():
    assert usable_device(None) in ("cpu", "cuda") and usable_device("cpu") == "cpu"


def test_the_help_of_a_kind_lists_its_own_options(capsys):
    from mmldlm import cli

    for words, listed, others in (
        (["sample", "l2t"], "--latent-file", "--eta"),
        (["sample", "t2l"], "--eta", "--latent-file"),
        (["sample", "unconditional"], "--method", "--guidance"),
        (["convert", "inspect"], "SRC", "--dtype"),
        (["convert", "diff"], "--optimizer", "--dtype"),
    ):
        with pytest.raises(SystemExit) as done:
            cli.main([*words, "--help"])
        text = capsys.readouterr().out
        assert done.value.code == 0 and listed in text and others not in text
        assert text.startswith(f"usage: mmldlm {' '.join(words)} ")


def test_the_former_spelling_of_method_names_the_new_one(capsys):
    from mmldlm import cli

    for words in (["sample", "unconditional"], ["sample"]):
        with pytest.raises(SystemExit) as done:
            cli.main([*words, "--way", "joint"])
        assert done.value.code == 2
        assert "--way was renamed: use --method joint" in capsys.readouterr().err


def test_options_before_the_kind_are_read_as_well(checkpoint, tmp_path):
    from mmldlm.commands.sample import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--checkpoint", str(checkpoint), "--output-dir", str(tmp_path), "unconditional"]
    args = parser.parse_intermixed_args(words)
    own = argparse.ArgumentParser()
    add_arguments(own, "unconditional")
    same = own.parse_intermixed_args(words[:-1])
    assert vars(args) == vars(same)
