"""training.init_from and `mmldlm convert` take the same parts off the names of weights: the rows
of docs/convert.md#names.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

from mmldlm.checkpoints.convert import convert
from mmldlm.checkpoints.init_from import init_weights
from mmldlm.engines.base import persistent_buffers


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))


# wrapper's name of a tensor of the model, and whether convert knows by itself that it is one
WRAPPED = {
    "compile": ("_orig_mod.{}", True),
    "compiled children": ("0._orig_mod.{}", True),
    "FSDP": ("_fsdp_wrapped_module.{}", True),
    "activation checkpointing": ("_checkpoint_wrapped_module.{}", True),
    "compile of DDP": ("_orig_mod.module.{}", True),
    "DDP of compile": ("module._orig_mod.{}", True),
    "average": ("module.{}", True),
    "DDP": ("module.{}", False),
}


def saved(tmp_path, weights: dict, form: str):
    path = tmp_path / f"in{form}"
    if form == ".pt":
        torch.save(weights, path)
    elif form == ".safetensors":
        save_file({name: value.clone() for name, value in weights.items()}, path)
    else:
        dcp.save({"model": weights}, checkpoint_id=path, no_dist=True)
    return path


@pytest.mark.parametrize("form", [".pt", ".safetensors"])
@pytest.mark.parametrize("kind", WRAPPED)
def test_the_same_parts_are_taken_off(tmp_path, kind, form):
    pattern, is_known = WRAPPED[kind]
    truth = {name: torch.rand_like(value) for name, value in model().state_dict().items()}
    weights = {pattern.format(name): value for name, value in truth.items()}
    if kind == "compiled children":
        weights = {name.replace(".", "._orig_mod.", 1): value for name, value in truth.items()}
    if kind == "average":
        weights["n_averaged"] = torch.tensor(3)
    path = saved(tmp_path, weights, form)
    loaded = model()
    report = init_weights(loaded, str(path))
    assert not report.missing and not report.unexpected
    assert any("removed from the names" in note for note in report.notes)
    assert all(value.equal(truth[name]) for name, value in loaded.state_dict().items())
    convert(path, tmp_path / "out", strip_prefix="" if is_known else "module.")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(truth)


@pytest.mark.parametrize("form", [".pt", ".safetensors", ""])
def test_a_child_called_module_is_not_taken_off(tmp_path, form):
    truth = nn.ModuleDict({"module": model()})
    path = saved(tmp_path, truth.state_dict(), form)
    loaded = nn.ModuleDict({"module": model()})
    report = init_weights(loaded, str(path))
    assert len(report.loaded) == 4 and not report.unexpected
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), truth.parameters()))


def test_a_prefix_of_a_dcp_folder(tmp_path):
    """`convert` keeps the names that a folder records, the model's names decide here."""
    truth = nn.DataParallel(model())
    path = saved(tmp_path, truth.state_dict(), "")
    assert len(init_weights(model(), str(path)).loaded) == 4
    convert(path, tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(truth.state_dict())


def tied_model() -> nn.Module:
    tied = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    tied[1].weight = tied[0].weight
    return tied


@pytest.mark.parametrize("name", ["0.weight", "1.weight"])
def test_tied_weights_are_found_by_each_of_their_names(tmp_path, name):
    tied, truth = tied_model(), torch.rand(5, 3)
    path = saved(tmp_path, {name: truth}, ".safetensors")
    report = init_weights(tied, str(path))
    assert report.loaded == ["0.weight"] and not report.missing and not report.unexpected
    assert tied[0].weight.equal(truth)


def test_tied_weights_take_those_of_their_first_name(tmp_path):
    """The second is the same tensor, or one that is not used."""
    tied, truth = tied_model(), torch.rand(5, 3)
    path = saved(tmp_path, {"1.weight": truth, "0.weight": truth}, ".pt")
    report = init_weights(tied, str(path))
    assert (report.loaded, report.unexpected) == (["0.weight"], []) and tied[0].weight.equal(truth)
    path = saved(tmp_path, {"1.weight": truth + 1, "0.weight": truth}, ".safetensors")
    report = init_weights(tied, str(path))
    assert (report.loaded, report.unexpected) == (["0.weight"], [])
    assert any("this model ties it to 0.weight: 1.weight" in note for note in report.notes)
    assert tied[0].weight.equal(truth)


def test_a_module_under_two_names_is_saved_under_both():
    """A buffer of it too: a checkpoint without one of them could not be read."""
    shared = nn.BatchNorm1d(3)
    found = nn.ModuleDict({"a": shared, "b": shared})
    names = {f"{module}.{name}" for module in "ab" for name, _ in shared.named_buffers()}
    assert set(persistent_buffers(found)) == names
    names |= {name for name, _ in found.named_parameters(remove_duplicate=False)}
    assert names == set(found.state_dict())
