"""model.pt in the forms that other programs give it: MM-LDLM's checkpoint.pt, weights under a key,
two candidates.
"""

from __future__ import annotations

import json
import sys
import types
from dataclasses import dataclass

import pytest

from mmldlm.checkpoints.convert import convert
from mmldlm.checkpoints.formats.model_pt import ModelFile
from mmldlm.checkpoints.formats.open import open_source
from mmldlm.checkpoints.formats.safetensors import SafetensorsModel
from mmldlm.errors import UserError

torch = pytest.importorskip("torch", reason="torch is not installed")


def mm_ldlm_checkpoint(path, key: str) -> dict:
    """checkpoint.pt as MM-LDLM's trainer saves it: its own state_dict, AdamW's, a pickled
    dataclass, config None.
    """

    @dataclass
    class TrainingState:
        step: int = 3
        epoch: int = 1

    module = types.ModuleType("their_checkpoints")
    module.TrainingState = TrainingState
    TrainingState.__module__, TrainingState.__qualname__ = module.__name__, "TrainingState"
    sys.modules[module.__name__] = module
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    trainer = {f"model.{name}": value for name, value in model.state_dict().items()}
    trainer["text_noise_schedule.sigmas"] = torch.linspace(0, 1, 5)
    saved = {
        key: trainer,
        "optimizer": optimizer.state_dict(),
        "training_state": TrainingState(),
        "config": None,
    }
    torch.save(saved, path)
    del sys.modules[module.__name__]
    return model.state_dict()


@pytest.mark.parametrize("key", ["model", "trainer", "model_state_dict"])
def test_mm_ldlm(tmp_path, key):
    expected = mm_ldlm_checkpoint(tmp_path / "checkpoint.pt", key)
    summary = convert(tmp_path / "checkpoint.pt", tmp_path / "out")
    assert any("noise schedules" in note for note in summary.notes)
    with SafetensorsModel.open(tmp_path / "out") as written:
        assert set(written.tensors) == set(expected)
        for name, value in expected.items():
            assert written.read(name).tobytes() == value.numpy().tobytes()


def test_without_noise_schedules_no_prefix_is_taken_off(tmp_path):
    torch.save({"model.a": torch.ones(2), "model.b": torch.ones(2)}, tmp_path / "a.pt")
    with open_source(tmp_path / "a.pt").weights as source:
        assert set(source.tensors) == {"model.a", "model.b"}


def test_two_candidates_are_not_guessed_between(tmp_path):
    torch.save({"one": {"w": torch.ones(2)}, "two": {"w": torch.zeros(2)}}, tmp_path / "a.pt")
    with pytest.raises(UserError, match="tensor"):
        convert(tmp_path / "a.pt", tmp_path / "out")
    torch.save({"network": {"w": torch.ones(2)}, "step": 3}, tmp_path / "b.pt")
    with open_source(tmp_path / "b.pt").weights as source:
        assert set(source.tensors) == {"w"} and any("'network'" in note for note in source.notes)


@pytest.mark.parametrize("first", ["a.bin", "b.bin"])
def test_of_a_name_in_two_shards_the_index_says_which_is_meant(tmp_path, first):
    """Trainers save a shared tensor in every shard, and may have changed one since."""
    for name, value in (("a.bin", 1.0), ("b.bin", 2.0)):
        own = {f"of_{name[0]}": torch.full((2, 2), value)}
        torch.save({**own, "twice": torch.full((2, 2), value)}, tmp_path / name)
    index = {"of_a": "a.bin", "of_b": "b.bin", "twice": first}
    path = tmp_path / "pytorch_model.bin.index.json"
    path.write_text(json.dumps({"weight_map": index}))
    with ModelFile.open(path) as source:
        assert source.read("twice")[0, 0] == {"a.bin": 1.0, "b.bin": 2.0}[first]
        assert set(source.tensors) == set(index)
