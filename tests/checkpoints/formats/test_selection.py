"""Which tensors of a file or a DCP folder are the model, and what becomes of the optimizer beside
it.

The same from outside, for the listed inputs alone: tests/trials/test_model_selection.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import pickle
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from mmldlm.checkpoints.files.unpickler import OpaqueObject, TensorRef
from mmldlm.checkpoints.formats.selection import FileTensor, select_model
from mmldlm.errors import MmldlmError, UserError
from tests.support.convert_command import command
from tests.trials.harness import Result, refuses, succeeds

STEPS = 3
MATRIX = torch.arange(6.0).reshape(2, 3)


def trained(optimizer=torch.optim.AdamW, **settings):
    """A model of two layers in two parameter groups, and its optimizer after three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.25},
        {"params": list(model[1].parameters())},
    ]
    made = optimizer(groups, lr=0.125, **settings)
    for _ in range(STEPS):
        model(torch.randn(4, 5)).square().sum().backward()
        made.step()
        made.zero_grad()
    return model, made


MODEL, ADAMW = trained()
TRUTH = {name: value.clone() for name, value in MODEL.state_dict().items()}
OTHER = {name: value + 1 for name, value in TRUTH.items()}
NAMED = get_optimizer_state_dict(MODEL, ADAMW)
FLAT = get_optimizer_state_dict(
    MODEL, ADAMW, options=StateDictOptions(flatten_optimizer_state_dict=True)
)
NUMBERED = ADAMW.state_dict()
RANDOM_STATE = torch.get_rng_state()
COUNTERS = {"step": torch.tensor(7, dtype=torch.int32), "ntokens_seen": torch.tensor(1234)}


def mmldlm(*words):
    """Run `mmldlm convert` in this process."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            code = command(*words[1:])
        except MmldlmError as error:
            code = error.exit_code
            print(error)
    return Result(code, output.getvalue())


class AppState(dcp.stateful.Stateful):
    """PyTorch's own recipe of DCP."""

    def state_dict(self):
        return {"model": TRUTH, "optim": NAMED}

    def load_state_dict(self, state_dict):
        raise NotImplementedError


def save_dcp(state, folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True, **options)
    return folder


def save_file(state, path):
    torch.save(state, path)
    return path


def save(kind, state, path):
    return save_file(state, path.with_suffix(".pt")) if kind == "file" else save_dcp(state, path)


def holds(result, out, truth):
    """Assert that OUT holds exactly these tensors under exactly these names."""
    succeeds(result)
    written = load_file(out / "model.safetensors")
    assert sorted(written) == sorted(truth)
    assert all(torch.equal(written[name], truth[name]) for name in truth)


WRAPPED = {f"model.{name}": value for name, value in TRUTH.items()}
# What stands beside a model in one file or folder; in all of them the model is unique.
UNIQUE = {
    "app": {"app": {"model": TRUTH, "optim": NAMED}},
    "lightning": {"model": TRUTH, "optimizer_0": NAMED},
    "torchtitan": {
        **TRUTH,
        "optimizer": FLAT,
        "train_state": COUNTERS,
        "dataloader": {"rank_0": b"xyz"},
        "lr_scheduler": {"last_epoch": 7, "base": torch.tensor([0.1])},
    },
    "step tensor": {"model": TRUTH, "optimizer": NUMBERED, "step": torch.tensor(3)},
    "tutorial": {
        "epoch": 1,
        "model_state_dict": TRUTH,
        "optimizer_state_dict": NUMBERED,
        "loss": torch.tensor(0.5),
    },
    "class weights": {"state_dict": TRUTH, "class_weights": torch.ones(3), "confusion": MATRIX},
    "deep": {
        "state": {"model": TRUTH, "optimizers": {"AdamW": NAMED}, "step": torch.tensor(3)},
        "rng": [RANDOM_STATE],
    },
    "unknown name": {
        "generator": TRUTH,
        "optimizers": [NUMBERED, NAMED],
        "rng": {"cpu": RANDOM_STATE},
    },
    "optimizer among the weights": {**TRUTH, **FLAT},
    "optimizer merged into the file": {**NUMBERED, "model": TRUTH, "epoch": 3},
    "states alone": {"net": TRUTH, "adam": NAMED["state"]},
    "moments by kind": {"network": TRUTH, "optim": {"exp_avg": OTHER, "exp_avg_sq": OTHER}},
    "average known by its key": {"model": TRUTH, "ema": OTHER},
    "callbacks": {
        "state_dict": TRUTH,
        "callbacks": {"EMA": {"state_dict": OTHER}},
        "optimizer_states": [NUMBERED],
    },
}


@pytest.mark.parametrize("kind", ["file", "dcp"])
@pytest.mark.parametrize("name", UNIQUE)
def test_the_model_alone_is_written(kind, name, tmp_path):
    source = save(kind, UNIQUE[name], tmp_path / "ck")
    holds(mmldlm("convert", source, tmp_path / "out"), tmp_path / "out", TRUTH)


@pytest.mark.parametrize(
    "state, truth",
    [
        (AppState(), None),
        (WRAPPED, WRAPPED),
        ({"optimizer": FLAT, "step": 3, **WRAPPED}, WRAPPED),
        ({"model": WRAPPED, "optim": NAMED}, WRAPPED),
    ],
    ids=["AppState", "a child called model", "a child called model beside an optimizer", "both"],
)
def test_names_of_dcp_are_the_models(state, truth, tmp_path):
    """conversion-trials BAD 2: `planner_data` tells the keys of dicts from the dots of names."""
    save_dcp({"app": state} if truth is None else state, tmp_path / "ck")
    holds(mmldlm("convert", tmp_path / "ck", tmp_path / "out"), tmp_path / "out", truth or TRUTH)


def test_what_was_left_out_is_named(tmp_path):
    """conversion-trials BAD 4, part 2 POOR 9."""
    save_file(
        {"epoch": 1, "state_dict": TRUTH, "state_dict_ema": OTHER, "loss": torch.tensor(1.0)},
        tmp_path / "a.pt",
    )
    result = mmldlm("convert", tmp_path / "a.pt", tmp_path / "out")
    succeeds(
        result,
        "under 'state_dict'",
        r"other state dicts .*--key.*state_dict_ema \(4 tensors",
        "left out: loss",
    )
    result = mmldlm("convert", tmp_path / "a.pt", tmp_path / "out2", "--ema")
    refuses(result, "state_dict_ema", "--key state_dict_ema")
    assert "the run kept none" not in result
    holds(
        mmldlm("convert", tmp_path / "a.pt", tmp_path / "out3", "--key", "state_dict_ema"),
        tmp_path / "out3",
        OTHER,
    )


AMBIGUOUS = {
    "ema and net": ({"ema": OTHER, "net": TRUTH, "step": torch.tensor(3)}, ["ema", "net"]),
    "ESRGAN": ({"params": OTHER, "params_ema": TRUTH}, ["params", "params_ema"]),
    "two known keys": ({"model": OTHER, "state_dict": TRUTH}, ["model", "state_dict"]),
    "a known key beside another branch": (
        {"ema": {"model": OTHER}, "net": TRUTH},
        ["ema/model", "net"],
    ),
    "a list": ({"models": [OTHER, TRUTH], "optimizer": NUMBERED}, ["models/0", "models/1"]),
    "top level and average": ({**OTHER, "ema": TRUTH}, [r"\.", "ema"]),
}


@pytest.mark.parametrize("kind", ["file", "dcp"])
@pytest.mark.parametrize("name", AMBIGUOUS)
def test_several_models_are_refused_until_one_is_named(kind, name, tmp_path):
    """conversion-trials BAD 4."""
    state, keys = AMBIGUOUS[name]
    source = save(kind, state, tmp_path / "ck")
    refuses(
        mmldlm("convert", source, tmp_path / "out"),
        "--key",
        *(rf" {key} \(4 tensors, 66 elements\)" for key in keys),
    )
    assert not (tmp_path / "out").exists()
    holds(mmldlm("convert", source, tmp_path / "out", "--key", keys[1]), tmp_path / "out", TRUTH)
    refuses(mmldlm("convert", source, tmp_path / "out2", "--key", "nowhere"), "nowhere", keys[1])
    first = keys[0].removeprefix("\\")
    inspected = mmldlm("convert", "inspect", source, "--key", first)
    succeeds(inspected, "0.weight")
    compared = mmldlm("convert", "diff", source, tmp_path / "out", "--key", first)
    refuses(compared, "0 tensors equal, 4 differ", code=1)
    succeeds(
        mmldlm("convert", "diff", tmp_path / "out", source, "--key-b", keys[1]),
        "4 tensors equal, 0 differ",
    )


def test_a_tree_of_parameters_is_taken_by_its_key(tmp_path):
    """conversion-trials BAD 4: nested dicts below the model's key are a part of it, or not: the
    user knows.
    """
    tree = {
        "embed": MATRIX,
        "norm": {"scale": torch.ones(3)},
        "blocks": [{"w": MATRIX + 1}, {"w": MATRIX + 2}],
    }
    source = save_file({"model": tree, "optimizer": NUMBERED}, tmp_path / "a.pt")
    refuses(mmldlm("convert", source, tmp_path / "out"), "model/blocks/1", "--key model")
    truth = {
        "embed": MATRIX,
        "norm.scale": torch.ones(3),
        "blocks.0.w": MATRIX + 1,
        "blocks.1.w": MATRIX + 2,
    }
    holds(mmldlm("convert", source, tmp_path / "out", "--key", "model"), tmp_path / "out", truth)


def test_parts_of_a_model_are_joined_at_the_top_level(tmp_path):
    source = save_file(
        {"backbone": TRUTH, "head": {"w": MATRIX}, "optimizer": NUMBERED}, tmp_path / "a.pt"
    )
    refuses(mmldlm("convert", source, tmp_path / "out"), "backbone .*head")
    truth = {**{f"backbone.{name}": value for name, value in TRUTH.items()}, "head.w": MATRIX}
    holds(mmldlm("convert", source, tmp_path / "out", "--key", "."), tmp_path / "out", truth)


def test_counters_among_the_weights_are_named(tmp_path):
    """Nobody can tell them from a module's own scalars."""
    source = save_dcp({**TRUTH, "step": torch.tensor(3)}, tmp_path / "ck")
    succeeds(mmldlm("convert", source, tmp_path / "out"), "may be counters: step")


def test_endless_nesting(tmp_path):
    path = tmp_path / "a.pt"
    with torch.serialization._open_zipfile_writer(str(path)) as archive:
        deep = b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b"."
        archive.write_record("data.pkl", deep, len(deep))
    refuses(mmldlm("convert", path, tmp_path / "out"), "deep")


class OpaqueTensor(OpaqueObject):
    may_be_tensor = True


@pytest.mark.parametrize(
    "beside", [{}, {"b": FileTensor(None, TensorRef("float32", (2, 2), (2, 1), "0", 0, 4))}]
)
def test_tensors_of_a_class_that_is_not_read(beside):
    """Neither left out of the model, nor a reason to take another one."""
    weights = {"a": FileTensor(None, TensorRef("float32", (2, 2), (2, 1), "0", 0, 4))}
    tree = {
        "model": {**beside, "w": OpaqueTensor("torch.distributed.tensor.DTensor")},
        "average": weights,
    }
    with pytest.raises(UserError, match="DTensor|model, which holds objects"):
        select_model(tree, Path("a.pt"))


def test_key_needs_a_source_that_has_keys(tmp_path):
    source = save_file({"net": TRUTH, "ema": OTHER}, tmp_path / "a.pt")
    succeeds(mmldlm("convert", source, tmp_path / "out", "--key", "net"))
    refuses(
        mmldlm("convert", tmp_path / "out", tmp_path / "out2", "--key", "net"), "leave --key out"
    )


@pytest.mark.parametrize(
    "state", [NUMBERED, {"optimizer": NAMED}, {"step": torch.tensor(3), "args": "x"}]
)
def test_a_file_without_a_model(state, tmp_path):
    """conversion-trials BAD 4: what is in the file is said as it is."""
    result = mmldlm("convert", save_file(state, tmp_path / "optimizer.pt"), tmp_path / "out")
    refuses(result, "an optimizer alone|without a weight")


# -- the optimizer --------------------------------------------------------------------------------


def moments(name, key):
    return NAMED["state"][name][key]


def accelerate(folder):
    save_dcp({"model": TRUTH}, folder / "pytorch_model_fsdp_0")
    save_dcp({"optimizer": NAMED}, folder / "optimizer_0")
    return folder


def accelerate_in_files(folder):
    folder.mkdir()
    save_file(NAMED, folder / "optimizer.bin")
    return save_file(TRUTH, folder / "pytorch_model_fsdp.bin")


WITH_OPTIMIZER = {
    "optim": lambda path: save_dcp({"model": TRUTH, "optim": NAMED}, path),
    "optimizer, flattened": lambda path: save_dcp({"model": TRUTH, "optimizer": FLAT}, path),
    "AppState": lambda path: save_dcp({"app": AppState()}, path),
    "torchtitan": lambda path: save_dcp(UNIQUE["torchtitan"], path),
    "accelerate": accelerate,
    "accelerate's files": accelerate_in_files,
    "accelerate's subfolder": lambda path: accelerate(path) / "pytorch_model_fsdp_0",
    "not flattened": lambda path: save_dcp(
        {"model": TRUTH, "optim": NAMED},
        path,
        planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
    ),
    "torch.save": lambda path: save_file(
        {"model": TRUTH, "optimizer": NAMED}, path.with_suffix(".pt")
    ),
}


@pytest.mark.parametrize("name", WITH_OPTIMIZER)
def test_optimizer_of_another_program_is_kept(name, tmp_path):
    """conversion-trials BAD 9, part 2 BAD 5."""
    source, out = WITH_OPTIMIZER[name](tmp_path / "ck"), tmp_path / "dcp"
    succeeds(mmldlm("convert", source, out, "--to", "dcp", "--world", 2))
    read = {
        key: {name: torch.full_like(value, -1) for name, value in TRUTH.items()}
        for key in ("exp_avg", "exp_avg_sq")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"optim": read}, checkpoint_id=out, no_dist=True)
    for key, table in read.items():
        assert all(torch.equal(value, moments(name, key)) for name, value in table.items())
    groups = json.loads((out / "trainable.json").read_text())["groups"]
    assert [group["settings"]["lr"] for group in groups] == [0.25, 0.125]
    assert [sorted(group["names"]) for group in groups] == [
        ["0.bias", "0.weight"],
        ["1.bias", "1.weight"],
    ]


@pytest.mark.parametrize("target", ["zero1", "zero2", "zero3", "fsdp", "ddp", "universal"])
def test_every_target_keeps_it(target, tmp_path):
    """conversion-trials BAD 9."""
    source, out = save_dcp({"model": TRUTH, "optim": NAMED}, tmp_path / "ck"), tmp_path / "out"
    world = [] if target in ("ddp", "universal") else ["--world", 2]
    succeeds(mmldlm("convert", source, out, "--to", target, *world))
    succeeds(
        mmldlm("convert", "diff", source, out, "--optimizer"),
        "12 tensors equal, 0 differ, 0 in one",
    )
    if target == "ddp":
        made = torch.load(out / "optimizer.pt", weights_only=True)
        names = [name for group in made["param_names"] for name in group]
        for number, name in enumerate(names):
            assert torch.equal(made["state"][number]["exp_avg"], moments(name, "exp_avg"))
            assert made["state"][number]["step"] == STEPS
    if target == "universal":
        for name in TRUTH:
            kept = torch.load(next(out.glob(f"**/zero/{name}/exp_avg_sq.pt")), weights_only=True)
            assert torch.equal(
                kept["param"].reshape(TRUTH[name].shape), moments(name, "exp_avg_sq")
            )


SGD = trained(torch.optim.SGD, momentum=0.5)
AMSGRAD = trained(torch.optim.AdamW, amsgrad=True)
UNREADABLE = {
    "numbered": (NUMBERED, "numbers its parameters"),
    "SGD": (get_optimizer_state_dict(*SGD), "momentum_buffer"),
    "amsgrad": (get_optimizer_state_dict(*AMSGRAD), "max_exp_avg_sq"),
    "of another model": (
        {**NAMED, "param_groups": [{"lr": 0.1, "params": ["x.weight"]}]},
        "x.weight",
    ),
}


@pytest.mark.parametrize("kind", ["file", "dcp"])
@pytest.mark.parametrize("name", UNREADABLE)
def test_an_optimizer_that_cannot_be_kept_is_named(kind, name, tmp_path):
    """conversion-trials BAD 9: weights alone with the reason, or a refusal with it."""
    optimizer, reason = UNREADABLE[name]
    source = save(kind, {"model": TRUTH, "optim": optimizer}, tmp_path / "ck")
    succeeds(
        mmldlm("convert", source, tmp_path / "dcp", "--to", "dcp"),
        f"the optimizer was left out: .*{reason}",
    )
    succeeds(mmldlm("convert", "inspect", source), reason)
    refuses(
        mmldlm("convert", source, tmp_path / "zero", "--to", "zero2"),
        f"cannot be carried over: .*{reason}",
    )
    assert not (tmp_path / "zero").exists()


def test_parameters_that_are_numbered_beside_their_names(tmp_path):
    """conversion-trials BAD 9: torch.optim records the names if it was given them."""
    optimizer = torch.optim.AdamW(MODEL.named_parameters(), lr=0.5)
    optimizer.load_state_dict(
        {**NUMBERED, "param_groups": [{**NUMBERED["param_groups"][0], "params": [0, 1, 2, 3]}]}
    )
    source = save_file({"model": TRUTH, "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    succeeds(mmldlm("convert", source, tmp_path / "out", "--to", "ddp"))
    made = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    names = [name for group in made["param_names"] for name in group]
    assert all(
        torch.equal(made["state"][i]["exp_avg"], moments(name, "exp_avg"))
        for i, name in enumerate(names)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_other_dtypes(dtype, tmp_path):
    """Masters of 16-bit weights are fp32."""
    weights = {name: value.to(dtype) for name, value in OTHER.items()}
    source = save_dcp({"model": weights, "optim": NAMED}, tmp_path / "ck")
    for target in ("dcp", "zero2", "ddp"):
        succeeds(mmldlm("convert", source, tmp_path / target, "--to", target))
        succeeds(
            mmldlm("convert", "diff", source, tmp_path / target, "--optimizer"),
            "12 tensors equal, 0 differ",
        )


def test_each_model_keeps_its_own_optimizer(tmp_path):
    """Two models of the same names, each beside its optimizer; and two of other names in
    one dict.
    """
    moved = {
        **NAMED,
        "state": {
            name: {**entry, "exp_avg": entry["exp_avg"] + 1}
            for name, entry in NAMED["state"].items()
        },
    }
    state = {"g": {"model": TRUTH, "optim": NAMED}, "d": {"model": OTHER, "optim": moved}}
    source = save_dcp(state, tmp_path / "ck")
    succeeds(mmldlm("convert", source, tmp_path / "out", "--to", "ddp", "--key", "g/model"))
    only = save_dcp({"model": TRUTH, "optim": NAMED}, tmp_path / "only")
    succeeds(
        mmldlm("convert", "diff", only, tmp_path / "out", "--optimizer"),
        "12 tensors equal, 0 differ",
    )
    renamed = {
        "state": {f"d.{name}": entry for name, entry in moved["state"].items()},
        "param_groups": [{"lr": 0.5, "params": [f"d.{name}" for name in TRUTH]}],
    }
    discriminator = {f"d.{name}": value for name, value in TRUTH.items()}
    source = save_dcp(
        {"g": TRUTH, "d": discriminator, "optim_g": NAMED, "optim_d": renamed}, tmp_path / "ck2"
    )
    succeeds(mmldlm("convert", source, tmp_path / "out2", "--to", "ddp", "--key", "g"))
    succeeds(
        mmldlm("convert", "diff", only, tmp_path / "out2", "--optimizer"),
        "12 tensors equal, 0 differ",
    )


def test_moments_in_another_order_of_elements(tmp_path):
    state = {
        name: {**entry, "exp_avg": entry["exp_avg"].t().contiguous().t()}
        for name, entry in NAMED["state"].items()
    }
    source = save_file({"model": TRUTH, "optim": {**NAMED, "state": state}}, tmp_path / "a.pt")
    refuses(
        mmldlm("convert", source, tmp_path / "out", "--to", "zero2"), "row-major", "contiguous"
    )


def test_frozen_and_tied_weights_without_a_record(tmp_path):
    """conversion-trials BAD 9: what the optimizer does not train is named, and a second name is
    found by its values.
    """
    weights = {**TRUTH, "tied.weight": TRUTH["0.weight"].clone(), "frozen.weight": MATRIX}
    source = save_dcp({"model": weights, "optim": NAMED}, tmp_path / "ck")
    succeeds(
        mmldlm("convert", source, tmp_path / "out", "--to", "zero3", "--world", 2), "frozen.weight"
    )
    inspected = mmldlm("convert", "inspect", tmp_path / "out")
    succeeds(inspected, "tied.weight .* -> 0.weight", r"frozen.weight +float32 +frozen")


# -- pickled, foreign and old .metadata -----------------------------------------------------------


@pytest.mark.parametrize("name", ["step tensor", "app", "class weights", "unknown name"])
def test_dicts_that_were_not_flattened(name, tmp_path):
    """conversion-trials part 2 BAD 4."""
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    save_dcp(UNIQUE[name], tmp_path / "ck", planner=planner)
    holds(mmldlm("convert", tmp_path / "ck", tmp_path / "out"), tmp_path / "out", TRUTH)


class Foreign:
    """An object that no checkpoint of tensors needs."""


def test_a_model_in_a_pickle_that_is_refused(tmp_path):
    """conversion-trials part 2 BAD 4: never `step` alone."""
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    state = {"model": Foreign(), "step": torch.tensor(3)}
    save_dcp(state, tmp_path / "ck", planner=planner)
    refuses(mmldlm("convert", tmp_path / "ck", tmp_path / "out"), "model")
    assert not (tmp_path / "out").exists()


def rewrite(folder, change):
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def add_plans(metadata):
    """What Megatron-core's planner leaves in it."""
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

    index = next(iter(metadata.storage_data))
    items = [WriteItem(index, WriteItemType.TENSOR), WriteItem(index, WriteItemType.SHARD)]
    metadata.all_local_plans = [SavePlan(items), SavePlan([])]


def use_copied_classes(metadata):
    """OLMo-core's writer has its own copy of _StorageInfo."""
    name = "olmo_core.distributed.checkpoint.filesystem"
    module = types.ModuleType(name)
    for end in range(1, 5):
        sys.modules.setdefault(".".join(name.split(".")[:end]), module)
    fields = [("relative_path", str), ("offset", int), ("length", int)]
    kind = dataclasses.make_dataclass("_StorageInfo", fields)
    kind.__module__ = name
    module._StorageInfo = kind
    metadata.storage_data = {
        key: kind(value.relative_path, value.offset, value.length)
        for key, value in metadata.storage_data.items()
    }


def use_old_properties(metadata):
    """torch 2.2 kept TensorProperties elsewhere."""
    import torch.distributed._shard.sharded_tensor.metadata as old

    for entry in metadata.state_dict_metadata.values():
        if hasattr(entry, "properties"):
            entry.properties = old.TensorProperties(dtype=entry.properties.dtype)


@pytest.mark.parametrize("change", [add_plans, use_copied_classes, use_old_properties])
def test_metadata_of_other_writers(change, tmp_path):
    """conversion-trials part 2 POOR 1, 2, 3."""
    folder = tmp_path / "step2" / "model_and_optim"
    save_dcp({"model": TRUTH, "optim": NAMED}, folder)
    rewrite(folder, change)
    source = folder.parent if change is use_copied_classes else folder
    holds(mmldlm("convert", source, tmp_path / "out"), tmp_path / "out", TRUTH)


def test_metadata_that_names_code_is_refused(tmp_path):
    """conversion-trials part 2 POOR 1: only classes named like DCP's own are taken, as inert
    objects.
    """
    save_dcp({"model": TRUTH}, tmp_path / "ck")

    class Hostile:
        def __reduce__(self):
            return eval, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    rewrite(tmp_path / "ck", lambda metadata: setattr(metadata, "storage_meta", Hostile()))
    refuses(mmldlm("convert", tmp_path / "ck", tmp_path / "out"), "builtins.eval")
    assert not (tmp_path / "ran").exists()


STACKED = {
    "embedding.word_embeddings.weight": torch.randn(16, 8),
    "decoder.layers.mlp.linear_fc1.weight": torch.randn(2, 12, 8),
}


@pytest.mark.parametrize("mark", ["common.pt", "metadata.json", "names", "wrapped names"])
def test_megatrons_stacked_layers_are_refused_by_name(mark, tmp_path):
    """conversion-trials part 2 BAD 8."""
    prefix = "model." if mark == "wrapped names" else ""
    folder = save_dcp({prefix + name: value for name, value in STACKED.items()}, tmp_path / "ck")
    rewrite(folder, add_plans)
    if mark == "common.pt":
        torch.save({"iteration": 3}, folder / mark)
    elif mark == "metadata.json":
        (folder / mark).write_text(json.dumps({"sharded_backend": "torch_dist"}))
    refuses(mmldlm("convert", folder, tmp_path / "out"), "Megatron-core", "Megatron's own tools")


def test_layers_by_name_are_no_stacked_ones(tmp_path):
    """conversion-trials part 2 BAD 8: a ModuleDict called `layers` is a model like any other."""
    state = {"encoder.layers.first.weight": MATRIX, "decoder.layers.0.mlp.weight": MATRIX}
    save_dcp(state, tmp_path / "ck")
    holds(mmldlm("convert", tmp_path / "ck", tmp_path / "out"), tmp_path / "out", state)


@pytest.mark.parametrize("state", [
    {"model": TRUTH, "torch": torch.__version__},
    {"state": {"model": TRUTH, "metadata": {"torch_version": torch.__version__}}, "rng": []},
])  # fmt: skip
def test_the_version_of_torch_beside_a_model(state, tmp_path):
    """conversion-trials part 2 POOR 4."""
    source = save_file(state, tmp_path / "ep1.pt")
    holds(mmldlm("convert", source, tmp_path / "out"), tmp_path / "out", TRUTH)


# -- masks ----------------------------------------------------------------------------------------

MASK = torch.triu(torch.full((6, 6), float("-inf")), diagonal=1)


@pytest.mark.parametrize("kind", ["file", "dcp"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "keep"])
def test_masks_of_infinities(kind, dtype, tmp_path):
    """conversion-trials P7: sources without kinds."""
    source = save(kind, {**TRUTH, "mask": MASK, "upper": -MASK}, tmp_path / "ck")
    succeeds(mmldlm("convert", source, tmp_path / "out", "--dtype", dtype), "taken as a mask")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["mask"].float(), MASK)


@pytest.mark.parametrize(
    "bad",
    [
        MASK * float("nan"),
        torch.full((2, 2), float("inf")),
        MASK + MATRIX[1, 0],
        torch.tensor([0.0, float("inf")]),
        MASK - MASK.T,
    ],
)
def test_other_infinities_stay_refused(bad, tmp_path):
    """conversion-trials P7."""
    source = save_file({**TRUTH, "w": bad}, tmp_path / "a.pt")
    refuses(
        mmldlm("convert", source, tmp_path / "out"),
        "NaN or infinite elements in w",
        "--allow-nonfinite",
    )


@pytest.mark.parametrize("target", ["ddp", "zero2", "fsdp"])
def test_a_mask_beside_a_named_optimizer_is_a_buffer(target, tmp_path):
    source = save_file({"model": {**TRUTH, "mask": MASK}, "optim": NAMED}, tmp_path / "a.pt")
    succeeds(mmldlm("convert", source, tmp_path / "out", "--to", target), "taken as a mask")
    succeeds(mmldlm("convert", tmp_path / "out", tmp_path / "back"))
    assert torch.equal(load_file(tmp_path / "back" / "model.safetensors")["mask"], MASK)
