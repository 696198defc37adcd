"""Conversions of DeepSpeed's checkpoints: names, mixed saves, counters, universal folders.

The sources are written by `mmldlm convert` from a state_dict and an AdamW's state that the test
saves with torch; tests/checkpoints has DeepSpeed's own.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest
import torch

from tests.trials.harness import ROOT, SLOW, mmldlm, mostly_slow, refuses, succeeds

OPTIM = "*zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL, MODEL3 = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"


def training_state(
    folder: Path, names=("a.weight", "b.bias"), step: int = 3, frozen: bool = True
) -> Path:
    """A folder with model.pt and optimizer.pt, as mmldlm's ddp engine saves them; all values
    depend on the step.
    """
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(step)
    weights = {name: torch.randn(4, 3, generator=generator) for name in names}
    others = {"frozen.weight": torch.randn(2, 3), "mean": torch.randn(3)} if frozen else {}
    torch.save({**weights, **others}, folder / "model.pt")
    moments = {key: torch.rand(4, 3, generator=generator) for key in ("exp_avg", "exp_avg_sq")}
    states = {
        number: {"step": torch.tensor(float(step)), **moments} for number in range(len(names))
    }
    group = {
        "lr": 0.1,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "params": list(range(len(names))),
    }
    buffers = {"buffer_names": ["mean"] if frozen else []}
    torch.save(
        {"state": states, "param_groups": [group], "param_names": [list(names)], **buffers},
        folder / "optimizer.pt",
    )
    return folder


def converted(source: Path, out: Path, to: str, *options: str) -> Path:
    succeeds(mmldlm("convert", source, out, "--to", to, *options))
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(target, step) -> a folder that was converted once for all tests of this file."""
    root, known = tmp_path_factory.mktemp("zero_trials"), {}

    def make(to: str, step: int = 3) -> Path:
        if (to, step) not in known:
            folder = root / f"{to}_{step}"
            options = ["--world", "2", "--dtype", "bf16"] if to.startswith("zero") else []
            known[to, step] = converted(
                training_state(folder / "source", step=step), folder / "out", to, *options
            )
        return known[to, step]

    return make


@pytest.fixture
def zero_folder(made, tmp_path):
    """(stage, step) -> a copy of the files of ZeRO for two ranks."""

    def copy(stage: int, step: int = 3) -> Path:
        return Path(
            shutil.copytree(
                made(f"zero{stage}", step) / "zero", tmp_path / f"zero{stage}_{step}" / "zero"
            )
        )

    return copy


@pytest.fixture
def universal_folder(made, tmp_path):
    """A copy of a universal checkpoint."""
    return Path(shutil.copytree(made("universal") / "universal", tmp_path / "universal"))


def change(path: Path, edit) -> None:
    """Load a file of torch, change its dict and save it under its name."""
    value = torch.load(path, weights_only=False)
    edit(value)
    torch.save(value, path)


def tensors(out: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(out / "model.safetensors")


def everything_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# -- names that become paths (conversion-trials 1, BAD 1) -----------------------------------------

HOSTILE = {
    "parent": "../../../../evil",
    "middle": "a/../../../../../evil",
    "dots": "..",
    "dot": ".",
    "inner dot": "a/./b",
    "absolute": "{tmp}/evil",
    "empty": "",
    "trailing slash": "evil/",
    "double slash": "a//b",
    "NUL": "ev\0il",
    "as a file": "b.bias/fp32.pt",
    "as the settings": "optimizer_state.pt",
    "too long": "x" * 300,
}


@pytest.mark.parametrize("kind", mostly_slow(HOSTILE, "parent", "absolute", "NUL", "as a file"))
def test_a_hostile_name_is_no_path(tmp_path, kind):
    """conversion-trials 1, BAD 1: `--to universal` wrote outside OUT; its reader has the same
    rule.
    """
    name = HOSTILE[kind].format(tmp=tmp_path)
    inside = tmp_path / "a" / "b" / "c" / "d"
    source = training_state(inside / "source", ("b.bias", name))
    before = everything_below(tmp_path)
    refuses(mmldlm("convert", source, inside / "out", "--to", "universal"), "found: ")
    assert everything_below(tmp_path) == before


@pytest.mark.parametrize("kind", mostly_slow(HOSTILE, "parent"))
def test_a_hostile_name_in_a_universal_folder(universal_folder, tmp_path, kind):
    name = HOSTILE[kind].format(tmp=tmp_path)

    def rename(state):
        for group in [*state["param_shapes"], state["module"]]:
            if "a.weight" in group:
                group[name] = group.pop("a.weight")

    change(universal_folder / MODEL, rename)
    refuses(mmldlm("convert", universal_folder, tmp_path / "out"), "found: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "to", ["zero2", *(pytest.param(to, marks=SLOW) for to in ("safetensors", "fsdp", "ddp"))]
)
def test_a_name_that_is_no_text(tmp_path, to):
    """A pickle may hold half of a character; no file of names can."""
    source = training_state(tmp_path / "source", ("a.weight", "b\ud800"))
    refuses(mmldlm("convert", source, tmp_path / "out", "--to", to), "valid text")


NAMES = [
    "a/b",
    *(
        pytest.param(name, marks=SLOW)
        for name in ("a/b/c.weight", "..a", "a..b/.c", "schön/ü", "a\\b")
    ),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_legitimate_name_survives(tmp_path, name):
    """conversion-trials 1, BAD 1: mmldlm refused its own output for `a/b`."""
    source = training_state(tmp_path / "source", ("a.weight", name))
    for number, to in enumerate(["universal", "zero2", "fsdp", "universal", "safetensors"]):
        source = converted(source, tmp_path / str(number), to)
    assert torch.equal(tensors(source)[name], torch.load(tmp_path / "source" / "model.pt")[name])


# -- files of two saves (conversion-trials 1, BAD 6) ----------------------------------------------


def take(folder: Path, other: Path, *patterns: str) -> None:
    for path in (path for pattern in patterns for path in other.glob(pattern)):
        shutil.copyfile(path, folder / path.name)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("to", mostly_slow(["safetensors", "universal"], "safetensors"))
def test_optimizer_files_of_a_later_save(zero_folder, tmp_path, stage, to):
    folder, later = zero_folder(stage, 3), zero_folder(stage, 5)
    take(folder, later, "*optim_states.pt")
    refuses(
        mmldlm("convert", folder, tmp_path / "out", "--to", to), "optimizer step 5", "same save"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("pattern", [OPTIM.format(1), MODEL3.format(1), MODEL3.format(0)])
def test_one_file_of_another_save(zero_folder, tmp_path, pattern):
    folder, later = zero_folder(3, 3), zero_folder(3, 5)
    take(folder, later, pattern)
    refuses(mmldlm("convert", folder, tmp_path / "out"), "_states.pt", "same save")


def test_optimizer_files_of_an_earlier_save_are_a_note(zero_folder, tmp_path):
    """They look like an optimizer that was started anew."""
    folder, earlier = zero_folder(3, 5), zero_folder(3, 3)
    take(folder, earlier, "*optim_states.pt")
    succeeds(mmldlm("convert", folder, tmp_path / "out"), r"note: .*made 3 steps.* counts 5")


# counters other than the optimizer's step: of rank 1's model file, and of an optimizer's file
MIXED = {
    "skipped steps": (MODEL3.format(1), lambda state: state.update(skipped_steps=1)),
    "samples": (MODEL3.format(1), lambda state: state.update(global_samples=77)),
    "schedule": (MODEL3.format(1), lambda state: state.update(lr_scheduler={"last_epoch": 4})),
    "learning rate": (
        OPTIM.format(1),
        lambda state: state["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"][
            0
        ].update(lr=0.05),
    ),
    "step of the group": (
        OPTIM.format(1),
        lambda state: state["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"][
            0
        ].update(step=4),
    ),
}


@pytest.mark.parametrize("kind", mostly_slow(MIXED, "schedule", "learning rate"))
def test_other_counters_of_two_saves(zero_folder, tmp_path, kind):
    """Without a step count in the state, as SGD's."""
    folder = zero_folder(3)
    pattern, edit = MIXED[kind]
    change(next(folder.glob(pattern)), edit)
    refuses(mmldlm("convert", folder, tmp_path / "out"), "_states.pt", "same save")


def test_skipped_steps_count(zero_folder, tmp_path):
    """Two of five steps were skipped: the optimizer made three."""
    folder = zero_folder(3)
    for path in folder.glob("*model_states.pt"):
        change(path, lambda state: state.update(global_steps=5, skipped_steps=2))
    result = mmldlm("convert", folder, tmp_path / "out")
    succeeds(result)
    assert "made 3 steps" not in result
    for path in folder.glob("*model_states.pt"):
        change(path, lambda state: state.update(skipped_steps=3))
    refuses(mmldlm("convert", folder, tmp_path / "out2"), "optimizer step 3", "same save")


def test_deepspeed_before_0_14_is_one_step_ahead(zero_folder, tmp_path):
    folder = zero_folder(3)
    for path in folder.glob("*model_states.pt"):
        change(path, lambda state: state.update(global_steps=2, ds_version="0.12.6"))
    # Of this version, and ahead too.
    again = converted(folder, tmp_path / "out", "zero2", "--world", "2")
    succeeds(mmldlm("convert", again, tmp_path / "out2"))


@pytest.mark.parametrize("step", [4.0, 7.0])
def test_universal_steps_of_another_save(universal_folder, tmp_path, step):
    folder = universal_folder
    torch.save(torch.tensor(step), folder / "zero" / "b.bias" / "step.pt")
    refuses(
        mmldlm("convert", folder, tmp_path / "out"),
        "step.pt",
        f"optimizer step {step}",
        "same save",
    )


# -- counters (conversion-trials 1, BAD 7) --------------------------------------------------------


WAYS = [
    ("fsdp",),
    ("ddp",),
    *(pytest.param(way, marks=SLOW) for way in (("dcp",), ("fsdp", "ddp", "zero3", "dcp"))),
]


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_counters_survive_other_formats(zero_folder, tmp_path, way):
    """global_steps, lr_scheduler and the client state were lost through fsdp and ddp without a
    word.
    """
    folder = zero_folder(2)
    own = {
        "global_steps": 7,
        "skipped_steps": 4,
        "global_samples": 56,
        "lr_scheduler": {"last_batch_iteration": 6},
        "epoch": 2,
        "best": {"loss": 0.5, "at": (1, 2)},
        "seen": torch.arange(5),
    }
    change(folder / MODEL, lambda state: state.update(own))
    source = folder
    for number, to in enumerate([*way, "zero2"]):
        source = converted(
            source, tmp_path / str(number), to, *(["--world", "2"] if to != "ddp" else [])
        )
    found = torch.load(source / "zero" / MODEL, weights_only=False)
    assert torch.equal(found.pop("seen"), own.pop("seen"))
    assert {key: found[key] for key in own} == own


@pytest.mark.parametrize("to", ["fsdp", "ddp"])
def test_an_object_that_is_not_kept_is_named(zero_folder, tmp_path, to):
    folder = zero_folder(2)
    change(folder / MODEL, lambda state: state.update(arguments=argparse.Namespace(lr=1)))
    succeeds(
        mmldlm("convert", folder, tmp_path / "out", "--to", to), "note: .*'arguments'.* left out"
    )


# -- universal (conversion-trials 1, BAD 8 and 10) ------------------------------------------------


def test_universal_says_what_deepspeed_does_not_load(tmp_path):
    """conversion-trials 1, BAD 8: frozen weights and buffers are lost in DeepSpeed's own
    loader.
    """
    source = training_state(tmp_path / "source")
    result = mmldlm("convert", source, tmp_path / "u", "--to", "universal")
    succeeds(
        result,
        r"note: DeepSpeed.* neither frozen weights nor buffers \(1 frozen weight and 1 buffer"
        r" here\)",
    )
    plain = training_state(tmp_path / "plain", frozen=False)
    assert "frozen" not in mmldlm("convert", plain, tmp_path / "u2", "--to", "universal")
    assert "neither frozen weights nor buffers" in (ROOT / "docs" / "convert.md").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(
    "stage, to", [(1, "safetensors"), (2, "zero2"), pytest.param(2, "model.pt", marks=SLOW)]
)
def test_universal_masters_are_held_against_the_weights(zero_folder, tmp_path, stage, to):
    """conversion-trials 1, BAD 10: the masters of one parameter under the name of another."""
    folder = converted(zero_folder(stage), tmp_path / "u", "universal") / "universal"
    shutil.copyfile(
        folder / "zero" / "a.weight" / "fp32.pt", folder / "zero" / "b.bias" / "fp32.pt"
    )
    refuses(mmldlm("convert", folder, tmp_path / "out", "--to", to), "b.bias", "rounding")


# -- rarer layouts --------------------------------------------------------------------------------


def test_tensors_without_elements_are_not_tied(zero_folder, tmp_path):
    """conversion-trials 1, P5: DeepSpeed lists all empty tensors as tied to each other."""
    folder = zero_folder(2)
    empty = {"none": torch.empty(0), "none_too": torch.empty(0, 5)}

    def add(state):
        state["module"].update(empty)
        state["shared_params"] = {"none_too": "none"}

    change(folder / MODEL, add)
    succeeds(mmldlm("convert", folder, tmp_path / "out"))
    assert {name: tuple(tensors(tmp_path / "out")[name].shape) for name in empty} == {
        "none": (0,),
        "none_too": (0, 5),
    }
    # Universal checkpoints keep the list, and are read as those of ZeRO-3.
    source = converted(folder, tmp_path / "universal", "universal")
    succeeds(mmldlm("convert", "diff", source, tmp_path / "out"), "6 tensors equal, 0 differ")


def test_a_parameter_outside_the_optimizer_under_zero3(zero_folder, tmp_path):
    """DeepSpeed saves no value of it: the others can be converted, and the reason is named."""
    folder = zero_folder(3)
    for path in folder.glob("*model_states.pt"):
        change(
            path, lambda state: state["module"].update(extra=torch.empty(0, dtype=torch.bfloat16))
        )
    result = mmldlm("convert", folder, tmp_path / "out", "--only", "a.*")
    succeeds(result, "note: extra: named in the model, without a value")
    assert "copy the file again" not in mmldlm("convert", folder, tmp_path / "out2")
    for target in ([], ["--to", "universal"]):
        refuses(mmldlm("convert", folder, tmp_path / "out2", *target), "none of extra", "--only")
    succeeds(mmldlm("convert", folder, tmp_path / "out3", "--only", "*"))
    assert set(tensors(tmp_path / "out3")) == {"a.weight", "b.bias", "frozen.weight", "mean"}


def zero0_folder(folder: Path, module: dict, groups: list) -> Path:
    """A checkpoint of ZeRO-0 in bf16; its masters, by group, have no names."""
    state = {
        "module": {name: value.bfloat16() for name, value in module.items()},
        "buffer_names": [],
        "global_steps": 1,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
        "ds_config": {"bf16": {"enabled": True}},
        "shared_params": {},
        "optimizer": {
            "fp32_groups": groups,
            "optimizer_state_dict": {"state": {}, "param_groups": []},
        },
    }
    folder.mkdir(parents=True)
    torch.save(state, folder / MODEL)
    return folder


def test_zero0_with_equal_frozen_and_trained_weights(tmp_path):
    """Fresh LayerNorms are equal in 16 bits: at least the 16-bit weights can be had with --dtype
    keep.
    """
    names = ("frozen.weight", "norm.weight")
    module = {name: torch.ones(4) for name in names}
    folder = zero0_folder(tmp_path / "ck" / "zero", module, [[torch.full((4,), 1.0001)]])
    succeeds(mmldlm("convert", folder, tmp_path / "out", "--dtype", "keep"), "note: .*told apart")
    refuses(mmldlm("convert", folder, tmp_path / "out2"), "norm.weight", "--dtype bf16 takes")
    refuses(mmldlm("convert", folder, tmp_path / "out2", "--to", "zero2"), "norm.weight .*equal")
    succeeds(mmldlm("convert", folder, tmp_path / "out2", "--dtype", "bf16"))


def test_zero0_weights_between_others_are_known(tmp_path):
    """conversion-trials 1, P4: the masters before and after tell which of two equal weights is
    trained.
    """
    one, master = torch.ones(4), torch.full((4,), 1.0001)
    first, last = torch.full((4,), 3.0001), torch.full((4,), 5.0001)
    module = {"frozen": one, "first": first, "norm": one, "last": last, "frozen.2": one}
    folder = zero0_folder(tmp_path / "ck" / "zero", module, [[first, master, last]])
    succeeds(mmldlm("convert", folder, tmp_path / "out"))
    assert tensors(tmp_path / "out")["norm"].equal(master)
    assert tensors(tmp_path / "out")["frozen"].equal(one)
    # An optimizer that got its parameters in another order says nothing about the place.
    folder = zero0_folder(tmp_path / "ck2" / "zero", module, [[last, master, first]])
    refuses(mmldlm("convert", folder, tmp_path / "out2"), "frozen, norm")


def test_zero0_of_fused_adam_has_its_16_bit_weights(tmp_path):
    """conversion-trials 1, P4: flat masters have no order, unless the client state names them."""
    module = {"a": torch.rand(4, 3), "b": torch.rand(3)}
    folder = zero0_folder(tmp_path / "ck" / "zero", module, [])
    flat = torch.cat([value.flatten() for value in module.values()])
    change(folder / MODEL, lambda state: state["optimizer"].update(fp32_groups_flat=[flat]))
    refuses(mmldlm("convert", folder, tmp_path / "out"), "FusedAdam", "--dtype bf16")
    succeeds(mmldlm("convert", folder, tmp_path / "out", "--dtype", "keep"))
    assert tensors(tmp_path / "out")["a"].equal(module["a"].bfloat16())
    change(folder / MODEL, lambda state: state.update(optimizer_param_names=[["a", "b"]]))
    succeeds(mmldlm("convert", folder, tmp_path / "out2"))
    assert tensors(tmp_path / "out2")["b"].equal(module["b"])
    refuses(mmldlm("convert", folder, tmp_path / "out3", "--to", "zero2"), "moments are flat")
