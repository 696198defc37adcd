"""Which tensors of a file or a DCP folder are the model, and what becomes of the optimizer beside
it.

More layouts, in this process: tests/checkpoints/formats/test_selection.py.
"""

from __future__ import annotations

import json
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from tests.trials.harness import Result, mmldlm, refuses, succeeds, train_rank

torch.manual_seed(0)
_MODEL = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
_ADAMW = torch.optim.AdamW(_MODEL.parameters(), lr=0.125)
_MODEL(torch.randn(4, 5)).square().sum().backward()
_ADAMW.step()
TRUTH = {name: value.clone() for name, value in _MODEL.state_dict().items()}
OTHER = {name: value + 1 for name, value in TRUTH.items()}
NAMED = get_optimizer_state_dict(_MODEL, _ADAMW)
FLAT = get_optimizer_state_dict(
    _MODEL, _ADAMW, options=StateDictOptions(flatten_optimizer_state_dict=True)
)


def save(state, path, **options):
    """torch.save to a name with a suffix, a DCP folder otherwise."""
    if path.suffix:
        torch.save(state, path)
        return path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True, **options)
    return path


def holds(result: Result, out, truth) -> None:
    """Assert that OUT holds exactly these tensors under exactly these names."""
    succeeds(result)
    written = load_file(out / "model.safetensors")
    assert sorted(written) == sorted(truth)
    assert all(torch.equal(written[name], value) for name, value in truth.items())


WRAPPED = {f"model.{name}": value for name, value in TRUTH.items()}
UNFLATTENED = {"planner": dcp.DefaultSavePlanner(flatten_state_dict=False)}
LAYOUTS = {
    "PyTorch's recipe (BAD 2)": ({"app": {"model": TRUTH, "optim": NAMED}}, "ck", {}, TRUTH),
    "Lightning (BAD 2)": ({"model": TRUTH, "optimizer_0": NAMED}, "ck", {}, TRUTH),
    "a child called model (BAD 2)": (WRAPPED, "ck", {}, WRAPPED),
    "torchtitan": (
        {
            **TRUTH,
            "optimizer": FLAT,
            "train_state": {"step": torch.tensor(7)},
            "lr_scheduler": {"base": torch.ones(1)},
        },
        "ck",
        {},
        TRUTH,
    ),
    "tutorial (BAD 4)": (
        {
            "epoch": 1,
            "model_state_dict": TRUTH,
            "optimizer_state_dict": _ADAMW.state_dict(),
            "loss": torch.ones(()),
        },
        "a.pt",
        {},
        TRUTH,
    ),
    "composer (BAD 4, part 2 POOR 4)": (
        {
            "state": {"model": TRUTH, "metadata": {"torch_version": torch.__version__}},
            "step": torch.ones(()),
        },
        "a.pt",
        {},
        TRUTH,
    ),
    "not flattened (part 2 BAD 4)": (
        {"model": TRUTH, "step": torch.tensor(3)},
        "ck",
        UNFLATTENED,
        TRUTH,
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_model_alone_is_written(name, tmp_path):
    """conversion-trials; public-reports torchtitan_dcp."""
    state, path, options, truth = LAYOUTS[name]
    source = save(state, tmp_path / path, **options)
    holds(mmldlm("convert", source, tmp_path / "out"), tmp_path / "out", truth)


def test_several_models_are_listed(tmp_path):
    """conversion-trials BAD 4."""
    source = save({"ema": OTHER, "net": TRUTH, "step": torch.tensor(3)}, tmp_path / "a.pt")
    refuses(
        mmldlm("convert", source, tmp_path / "out"), r"ema \(4 tensors.*net \(4 tensors", "--key"
    )
    holds(mmldlm("convert", source, tmp_path / "out", "--key", "net"), tmp_path / "out", TRUTH)
    succeeds(mmldlm("convert", "inspect", source, "--key", "ema"), "0.weight")
    refuses(
        mmldlm("convert", "diff", source, tmp_path / "out", "--key", "ema"), "4 differ", code=1
    )


MATRIX = torch.arange(12.0).reshape(3, 4)
UNNAMED = {
    "a list": {"a.w": MATRIX, "experts": [MATRIX]},
    "a list below": {"model": {"a.w": MATRIX, "experts": (MATRIX,)}},
    "numbers": {"a.w": MATRIX, 0: MATRIX},
    "bytes below": {"model": {"a.w": MATRIX, b"b": MATRIX}},
}


@pytest.mark.parametrize("kind", UNNAMED)
def test_tensors_without_names_are_not_left_out(kind, tmp_path):
    """A file with tensors in a list beside those of the model, or under keys that are not text,
    lost them.
    """
    torch.save(UNNAMED[kind], tmp_path / "in.pt")
    refuses(mmldlm("convert", tmp_path / "in.pt", tmp_path / "out"), "a name for every tensor")
    key = "model" if "model" in UNNAMED[kind] else "."
    result = mmldlm("convert", tmp_path / "in.pt", tmp_path / "out", "--key", key)
    succeeds(result, "note: tensors without names were left out")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"a.w"}


def test_random_states_in_a_list_are_no_weights(tmp_path):
    """The other side: what trainers save beside a model is noted."""
    states = [torch.get_rng_state(), torch.get_rng_state()]
    torch.save({"a.w": MATRIX, "rng": states, "histories": {"loss": [MATRIX]}}, tmp_path / "in.pt")
    succeeds(
        mmldlm("convert", tmp_path / "in.pt", tmp_path / "out"),
        "without names .*rng .*histories/loss",
    )


def test_a_tuple_with_names_under_model_is_not_another_model(tmp_path):
    """The state dict under another key was taken."""
    pair = torch.return_types.max((MATRIX, MATRIX))  # a class of torch's, as any named tuple
    torch.save({"model": pair, "critic": {"a.w": MATRIX}}, tmp_path / "in.pt")
    refuses(mmldlm("convert", tmp_path / "in.pt", tmp_path / "out"), "model, which holds objects")


def test_an_average_in_the_file_is_named(tmp_path):
    """conversion-trials part 2 POOR 9."""
    source = save(
        {"epoch": 1, "state_dict": TRUTH, "state_dict_ema": OTHER},
        tmp_path / "checkpoint-1.pth.tar",
    )
    succeeds(mmldlm("convert", source, tmp_path / "out"), "left out .*--key.*: state_dict_ema")
    refuses(mmldlm("convert", source, tmp_path / "out2", "--ema"), "state_dict_ema")


@pytest.mark.parametrize("target", ["dcp", "zero2", "universal"])
@pytest.mark.parametrize("layout", ["one folder (BAD 9)", "accelerate (part 2 BAD 5)"])
def test_optimizer_of_another_program_is_kept(layout, target, tmp_path):
    """conversion-trials."""
    source, out = tmp_path / "ck", tmp_path / "out"
    if layout.startswith("accelerate"):
        save({"model": TRUTH}, source / "pytorch_model_fsdp_0")
        save({"optimizer": NAMED}, source / "optimizer_0")
    else:
        save({"model": TRUTH, "optim": NAMED}, source)
    succeeds(mmldlm("convert", source, out, "--to", target))
    succeeds(
        mmldlm("convert", "diff", source, out, "--optimizer"),
        "12 tensors equal, 0 differ, 0 in one",
    )


def test_an_optimizer_without_names_is_not_lost_silently(tmp_path):
    """conversion-trials BAD 9."""
    source = save({"model": TRUTH, "optim": _ADAMW.state_dict()}, tmp_path / "ck")
    reason = "numbers its parameters"
    succeeds(
        mmldlm("convert", source, tmp_path / "out", "--to", "dcp"),
        f"optimizer was left out.*{reason}",
    )
    refuses(mmldlm("convert", source, tmp_path / "out2", "--to", "zero2"), reason)


@pytest.mark.parametrize("mark", ["common.pt", "names"])
def test_stacked_layers_of_megatron(mark, tmp_path):
    """conversion-trials part 2 BAD 8 and POOR 2."""
    source = save({"decoder.layers.mlp.linear_fc1.weight": torch.ones(2, 12, 8)}, tmp_path / "ck")
    metadata = pickle.loads((source / ".metadata").read_bytes())
    metadata.all_local_plans = [dcp.SavePlan([])]
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    if mark == "common.pt":
        torch.save({"iteration": 3}, source / mark)
        (source / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    refuses(mmldlm("convert", source, tmp_path / "out"), "Megatron-core")


def test_masks_of_infinities(tmp_path):
    """conversion-trials P7."""
    mask = torch.triu(torch.full((6, 6), float("-inf")), diagonal=1)
    source = save({**TRUTH, "mask": mask}, tmp_path / "a.pt")
    holds(mmldlm("convert", source, tmp_path / "out"), tmp_path / "out", {**TRUTH, "mask": mask})


def test_a_training_that_starts_from_several_models(trial_store, tmp_path):
    """conversion-trials BAD 4: the same error wherever weights are read."""
    source = save({"ema": OTHER, "net": TRUTH}, tmp_path / "a.pt")
    words = [
        "--config-name",
        "tiny",
        f"data.latent_data_root={trial_store}",
        f"logging.save_dir={tmp_path}",
    ]
    result = train_rank(
        *words, "logging.run_name=r", "engine.kind=single", f"training.init_from={source}"
    )
    refuses(result, "ema .*net", "--key")
