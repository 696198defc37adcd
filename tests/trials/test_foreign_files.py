"""Files and folders of other programs: one complete model is converted, a part of one or one of
several is refused.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import io
import json
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.trials.harness import SLOW, mmldlm, refuses, succeeds, tiny_run, train_rank

MATRIX = torch.arange(24.0).reshape(4, 6)


def default(values, count: int = 1) -> list:
    """The first `count` kinds for the default run, the others for `--trials`."""
    return [
        value if place < count else pytest.param(value, marks=SLOW)
        for place, value in enumerate(values)
    ]


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def convert(source: Path, *options: str, out: str = "out"):
    return mmldlm("convert", source, source.parent / out, "--no-fsync", *options)


def save(path: Path, value) -> Path:
    """Write with torch.save or safetensors, as the suffix says; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(value, path)
    else:
        torch.save(value, path)
    return path


def zero_folder(folder: Path, **state: torch.Tensor) -> Path:
    """Write DeepSpeed's files of a model of two weights, with Adam's state or another; return the
    folder.
    """
    ddp = folder.parent / "ddp"
    groups = [
        {"params": [0, 1], "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    ]
    states = {number: {"step": torch.tensor(3.0), **state} for number in (0, 1)} if state else {}
    save(ddp / "model.pt", {"a": MATRIX, "b": MATRIX + 1})
    save(
        ddp / "optimizer.pt",
        {"state": states, "param_groups": groups, "param_names": [["a", "b"]]},
    )
    succeeds(mmldlm("convert", ddp, folder, "--to", "zero2", "--world", "2", "--no-fsync"))
    return folder


@pytest.fixture(scope="module")
def zero(tmp_path_factory) -> Path:
    """A folder of DeepSpeed: `latest` and `zero/`. Copy it before changing anything."""
    return zero_folder(tmp_path_factory.mktemp("zero") / "in")


# -- folders of several models --------------------------------------------------------------------

SEVERAL = [
    ("model.safetensors", "model_1.safetensors"),  # accelerate
    ("pytorch_model.bin", "pytorch_model_1.bin"),
    ("model.safetensors", "adapter_model.safetensors"),  # peft
    ("model.pt", "discriminator.pt"),
    ("pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_1/.metadata"),
    ("generator.safetensors", "critic.safetensors"),
]


@pytest.mark.parametrize("names", default(SEVERAL, 2), ids="+".join)
def test_a_folder_of_several_models_is_never_its_first(tmp_path, names):
    """conversion-trials part 2 BAD 2."""
    for name in names:
        if name.endswith(".metadata"):
            import torch.distributed.checkpoint as dcp

            dcp.save(
                {"model": {"w": MATRIX}},
                checkpoint_id=(tmp_path / "in" / name).parent,
                no_dist=True,
            )
        else:
            save(tmp_path / "in" / name, {"w": MATRIX})
    save(
        tmp_path / "in" / "optimizer.bin", {"state": {0: {"exp_avg": MATRIX}}, "param_groups": []}
    )
    given = [name.partition("/")[0] for name in names]
    refuses(convert(tmp_path / "in"), "2 models", *given)
    assert not (tmp_path / "out").exists()
    succeeds(mmldlm("convert", tmp_path / "in" / given[1], tmp_path / "one", "--no-fsync"))
    assert set(tensors_in(tmp_path / "one")) == {"w"}


def test_one_model_in_several_forms_is_one(tmp_path):
    """What a Trainer leaves: the model, its optimizer and counters, and checkpoints of its
    past.
    """
    save(tmp_path / "in" / "model.safetensors", {"w": MATRIX})
    for name in ("pytorch_model_fsdp.bin", "checkpoint-2/pytorch_model.bin"):
        save(tmp_path / "in" / name, {"w": MATRIX})
    for name in (
        "optimizer.pt",
        "rng_state_0.pth",
        "training_args.bin",
        "scheduler.pt",
        "random_states_0.pkl",
    ):
        save(tmp_path / "in" / name, {"state": {0: {"exp_avg": MATRIX}}})
    succeeds(convert(tmp_path / "in"), "pytorch_model_fsdp.bin, next to model.safetensors")


@pytest.mark.parametrize(
    "module",
    default(["2_Dense/model.safetensors", "2_Dense/pytorch_model.bin", "1_Router/0_A/model.bin"]),
)
def test_modules_of_sentence_transformers(tmp_path, module):
    """conversion-trials part 2 BAD 3: the Dense module was left out."""
    folder = tmp_path / "in"
    save(folder / "model.safetensors", {"embeddings.weight": MATRIX})
    save(folder / module, {"linear.weight": MATRIX})
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": module.partition("/")[0]}]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "config.json").write_text("{}", encoding="utf-8")
    refuses(convert(folder), module.partition("/")[0], "give the file")
    # The file of the transformer may be asked for by name: a note says that it is alone.
    succeeds(
        mmldlm("convert", folder / "model.safetensors", tmp_path / "one"),
        "note: .*sentence-transformers",
    )
    (folder / module).unlink()
    succeeds(convert(folder), "note: .*sentence-transformers.*1_Pooling")


@pytest.mark.parametrize(
    "name",
    default(
        [
            "pytorch_model.bin",
            "diffusion_pytorch_model.safetensors",
            "model.fp16.safetensors",
            "lit_model.pth",
        ]
    ),
)
def test_a_folder_with_one_obvious_file(tmp_path, name):
    """conversion-trials P3, part 2 POOR 6: the file was there, and the folder was refused."""
    save(tmp_path / "in" / name, {"w": MATRIX})
    (tmp_path / "in" / "config.json").write_text('{"model_type": "x"}', encoding="utf-8")
    succeeds(convert(tmp_path / "in"))
    assert (
        tensors_in(tmp_path / "out")["w"].equal(MATRIX)
        and (tmp_path / "out" / "config.json").is_file()
    )


@SLOW
@pytest.mark.parametrize(
    "stem, suffix", [("pytorch_model", "bin"), ("diffusion_pytorch_model", "safetensors")]
)
def test_shards_and_their_index(tmp_path, stem, suffix):
    """conversion-trials P3: pytorch_model.bin.index.json was "a text file"."""
    names = {"a.w": f"{stem}-00001-of-00002.{suffix}", "b.w": f"{stem}-00002-of-00002.{suffix}"}
    for name, file in names.items():
        save(tmp_path / "in" / file, {name: MATRIX})
    index = tmp_path / "in" / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}), encoding="utf-8")
    succeeds(convert(tmp_path / "in"))
    assert set(tensors_in(tmp_path / "out")) == set(names)
    succeeds(mmldlm("convert", "diff", index, tmp_path / "out"))
    refuses(
        mmldlm("convert", tmp_path / "in" / names["a.w"], tmp_path / "no"),
        "one of the 2 shards",
        "index.json",
    )
    index.write_text(json.dumps({"weight_map": {"a.w": names["a.w"]}}), encoding="utf-8")
    refuses(convert(tmp_path / "in", out="out2"), "1 of 2 shards")


@SLOW
def test_a_pipeline_names_its_models(tmp_path):
    """conversion-trials part 2 POOR 6."""
    save(tmp_path / "in" / "transformer" / "diffusion_pytorch_model.safetensors", {"w": MATRIX})
    save(tmp_path / "in" / "vae" / "diffusion_pytorch_model.safetensors", {"w": MATRIX})
    (tmp_path / "in" / "model_index.json").write_text("{}", encoding="utf-8")
    refuses(convert(tmp_path / "in"), "in/transformer or .*in/vae")


@pytest.mark.parametrize("rounded", default(["w.fp16.safetensors", "w.bf16.bin"]))
def test_the_form_that_is_not_rounded_is_taken(tmp_path, rounded):
    """diffusers writes variants beside the weights; of a folder with both the 16-bit one was
    converted.
    """
    save(tmp_path / "in" / rounded, {"w": (MATRIX + 0.123).bfloat16()})
    save(tmp_path / "in" / "w.bin", {"w": MATRIX + 0.123})
    succeeds(convert(tmp_path / "in"), f"{rounded}, next to w.bin")
    assert tensors_in(tmp_path / "out")["w"].equal(MATRIX + 0.123)


@pytest.mark.parametrize("name", default(["final_model_states.pt", "optim_states.pt"]))
def test_a_name_that_only_ends_like_deepspeeds(tmp_path, name):
    """It was taken for one rank's file."""
    succeeds(convert(save(tmp_path / name, {"w": MATRIX})))
    assert tensors_in(tmp_path / "out")["w"].equal(MATRIX)


# -- parts of sharded checkpoints -----------------------------------------------------------------

MODULE = {
    "module": {"w": MATRIX},
    "dp_world_size": 2,
    "mp_world_size": 1,
    "ds_version": "0.19.8",
    "param_shapes": [],
}
OPTIMIZER = {
    "optimizer_state_dict": {"zero_stage": 3, "partition_count": 2, "w": MATRIX},
    "w": MATRIX,
}
FAIRSCALE = {"model": {"flat_param_0": MATRIX}, "shard_metadata": {}}
PARTS = {
    "zero3 model": ("zero_pp_rank_0_mp_rank_00_model_states.pt", {"module": {"w": MATRIX}}),
    "zero2 model": ("mp_rank_00_model_states.pt", {"module": {"w": MATRIX}}),
    "zero2 optimizer": ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", {"w": MATRIX}),
    "pipeline layer": ("layer_01-model_states.pt", {"w": MATRIX}),
    "renamed model states": ("model.pt", MODULE),
    "renamed optimizer states": ("weights.pt", OPTIMIZER),
    "universal": ("fp32.pt", {"param": MATRIX, "cat_dim": 0}),
    "fairscale": ("checkpoint.pt", FAIRSCALE),
    "fairscale names": ("checkpoint.pt", {"model": {"decoder.flat_param_0": MATRIX[0]}}),
    "fsdp1 names": ("local.pt", {"_fsdp_wrapped_module._flat_param": MATRIX[0]}),
    "safetensors shard": ("model-00001-of-00004.safetensors", {"w": MATRIX}),
    "torch shard": ("pytorch_model-00002-of-00002.bin", {"w": MATRIX}),
    "nanotron": ("model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors", {"w": MATRIX}),
    "name with the number of ranks": ("model_world_size_4_rank_0.pt", {"w": MATRIX}),
    "average": (
        "ema_rank0.pt",
        {"w": {"start": 0, "shape": (4, 6), "values": MATRIX.flatten()}, "v": MATRIX},
    ),
}

IN_DEFAULT = (
    "zero3 model",
    "renamed model states",
    "fairscale",
    "fairscale names",
    "safetensors shard",
)


@pytest.mark.parametrize(
    "kind", default(sorted(PARTS, key=lambda kind: kind not in IN_DEFAULT), len(IN_DEFAULT))
)
def test_a_part_of_a_checkpoint_is_refused_by_itself(tmp_path, kind):
    """conversion-trials BAD 5, part 2 BAD 7."""
    name, value = PARTS[kind]
    refuses(convert(save(tmp_path / name, value)), "part of a sharded checkpoint")
    assert not (tmp_path / "out").exists()


SIBLINGS = [
    ("model_rank0.pt", "model_rank1.pt"),
    ("consolidated.00.pth", "consolidated.01.pth"),
    ("checkpoint_last-model_part-0-shard0.pt", "checkpoint_last-model_part-0-shard1.pt"),
    ("mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"),
    ("model_pp0_tp0.pt", "model_pp0_tp1.pt"),
]


@pytest.mark.parametrize("names", default(SIBLINGS), ids=lambda names: names[0])
def test_one_of_several_ranks_files(tmp_path, names):
    """conversion-trials BAD 5, part 2 BAD 7: the files beside one say what it is.

    Alone it may be a whole model.
    """
    first, second = (save(tmp_path / "in" / name, {"w": MATRIX}) for name in names)
    refuses(
        mmldlm("convert", first, tmp_path / "out", "--no-fsync"),
        "one of 2 ranks' files",
        Path(names[1]).parts[0],
    )
    second.unlink()
    succeeds(mmldlm("convert", first, tmp_path / "out", "--no-fsync"))


@pytest.mark.parametrize("given", default(["file", "folder"]))
def test_files_of_torchs_hugging_face_writer(tmp_path, given):
    """conversion-trials part 2 BAD 7: half the rows of every tensor."""
    from safetensors.torch import save_file

    (tmp_path / "in").mkdir()
    for rank, rows in enumerate((slice(0, 2), slice(2, 4))):
        info = {
            "DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [2 * rank, 0]}}),
            "DCP_VERSION": "1.0",
        }
        name = f"shard-0000{rank + 1}-model-00001-of-00001.safetensors"
        save_file({"w": MATRIX[rows].clone()}, tmp_path / "in" / name, info)
    source = tmp_path / "in" / (name if given == "file" else "")
    refuses(
        mmldlm("convert", source, tmp_path / "out"),
        "HuggingFaceStorageWriter",
        "consolidate_safetensors_files",
    )


@SLOW
@pytest.mark.parametrize(
    "names", [("lora_rank4.pt", "lora_rank8.pt"), ("epoch-1-of-3.pt", "epoch-2-of-3.pt")]
)
def test_whole_models_with_numbers_in_their_names(tmp_path, names):
    """The other side of BAD 5: a number alone is no proof."""
    for name in names:
        save(tmp_path / name, {"w": MATRIX})
    succeeds(convert(tmp_path / names[0]))


@SLOW
def test_a_rank_of_megatron(tmp_path):
    """conversion-trials part 2 BAD 7: its arguments say how many ways the model was cut."""
    import argparse

    value = {"args": argparse.Namespace(tensor_model_parallel_size=2), "model": {"w": MATRIX}}
    refuses(convert(save(tmp_path / "model_optim_rng.pt", value)), "tensor_model_parallel_size 2")
    value["args"].tensor_model_parallel_size = 1
    succeeds(convert(save(tmp_path / "model_optim_rng.pt", value)))


# -- one file in two ------------------------------------------------------------------------------


def torch_bytes(value) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def tar_of(*files: bytes, form: int = tarfile.PAX_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as archive:
        for number, data in enumerate(files):
            member = tarfile.TarInfo(f"mp_rank_{number:02d}/model_weights.ckpt")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


ONE, TWO = torch_bytes({"weight": MATRIX[:2].clone()}), torch_bytes({"weight": MATRIX[2:].clone()})


JOINED = {
    "tar of two": (tar_of(ONE, TWO), "a tar archive"),
    "two joined": (ONE + TWO, "joined"),
    "tar of one": (tar_of(ONE), "a tar archive"),
    "gnu tar": (tar_of(ONE, TWO, form=tarfile.GNU_FORMAT), "a tar archive"),
    "bytes before": (b"#!/bin/sh\n" + ONE, "joined"),
    "bytes after": (ONE + bytes(100), "joined"),
}


@pytest.mark.parametrize("kind", default(JOINED, 2))
def test_one_file_in_two_is_refused(tmp_path, kind):
    """conversion-trials part 2 BAD 6: the last of several archives was the model."""
    data, says = JOINED[kind]
    (tmp_path / "m.nemo").write_bytes(data)
    refuses(convert(tmp_path / "m.nemo"), says)


# -- values ---------------------------------------------------------------------------------------


def test_views_that_torch_saves_with_a_sign(tmp_path):
    """conversion-trials BAD 3: the sine of RoPE, `freqs.conj().imag`, had every sign wrong."""
    angles = torch.arange(6.0).reshape(3, 2)
    rope = torch.polar(torch.ones(3, 2), angles)
    state = {
        "sin": rope.conj().imag,
        "row": rope.conj().imag[1],
        "parameter": nn.Parameter(rope.conj().imag.clone()),
        "half": torch._neg_view(angles.half()),
        "bf16": torch._neg_view(angles.bfloat16()),
        "transposed": torch._neg_view(angles.t()),
        "plain": angles,
    }
    state["parameter_view"] = nn.Parameter(torch._neg_view(angles.double()))
    succeeds(convert(save(tmp_path / "in.pt", state), "--dtype", "keep"))
    found = tensors_in(tmp_path / "out")
    assert {name: value.dtype for name, value in found.items()} == {
        n: v.dtype for n, v in state.items()
    }
    assert all(found[name].equal(state[name].detach().resolve_neg()) for name in state)


@SLOW
def test_complex_and_rare_types(tmp_path):
    """conversion-trials P2: freqs_cis refused the whole checkpoint."""
    rope = torch.polar(torch.ones(3), torch.arange(3.0))
    state = {
        "freqs_cis": rope,
        "conjugate": rope.conj(),
        "scale": torch.tensor([1.0, 2.0]).to(torch.float8_e8m0fnu),
        "fnuz": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fnuz),
        "w": MATRIX,
    }
    succeeds(convert(save(tmp_path / "in.pt", state)))
    found = tensors_in(tmp_path / "out")
    assert found["freqs_cis"].equal(rope) and found["conjugate"].equal(rope.conj().resolve_conj())
    assert all(
        found[name].view(torch.uint8).equal(state[name].view(torch.uint8))
        for name in ("scale", "fnuz")
    )
    succeeds(convert(tmp_path / "out" / "model.safetensors", "--to", "model.pt", out="pt"))
    succeeds(mmldlm("convert", "diff", tmp_path / "in.pt", tmp_path / "out" / "pt"))


def test_complex_numbers_of_double_precision(tmp_path):
    """conversion-trials P2: safetensors has no type for them, torch's files do."""
    rope = torch.polar(torch.ones(3).double(), torch.arange(3.0).double())
    source = save(tmp_path / "in.pt", {"freqs": rope, "conjugate": rope.conj(), "w": MATRIX})
    refuses(convert(source), "freqs of type complex128", "--to model.pt")
    succeeds(convert(source, "--only", "w"))
    succeeds(convert(source, "--to", "model.pt", out="pt"))
    found = torch.load(tmp_path / "pt" / "model.pt")
    assert found["freqs"].equal(rope) and found["conjugate"].equal(rope.conj().resolve_conj())
    succeeds(mmldlm("convert", "diff", source, tmp_path / "pt"), "3 tensors equal")


@pytest.mark.parametrize("form", default(["file", "folder"], 2))
def test_a_type_that_is_not_read_is_named(tmp_path, form):
    """conversion-trials P2: of a DCP folder it was said to be damaged."""
    import torch.distributed.checkpoint as dcp

    state = {"w": MATRIX, "x": torch.ones(3, dtype=torch.complex32)}
    if form == "file":
        save(tmp_path / "in", state)
    else:
        dcp.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    result = convert(tmp_path / "in")
    refuses(result, "x.*torch.complex32")
    assert "intact" not in result


class Mode(enum.Enum):
    A = "a"


@dataclasses.dataclass
class HParams:
    lr: float = 0.1
    mode: Mode = Mode.A


OBJECTS = {
    "dataclass": HParams(),
    "enum": Mode.A,
    "partial": functools.partial(print, 1),
    "class as key": {HParams: 1},
    "TorchVersion": torch.__version__,
    "complex": complex(1, 2),
}


@pytest.mark.parametrize("kind", default(OBJECTS))
def test_objects_of_other_classes_beside_the_weights(tmp_path, kind):
    """conversion-trials P1; public-reports A opaque_objects_in_checkpoints."""
    value = {"state_dict": {"w": MATRIX}, "hyper_parameters": OBJECTS[kind], "epoch": 3}
    path = save(tmp_path / "in.ckpt", value)
    succeeds(convert(path))
    assert tensors_in(tmp_path / "out")["w"].equal(MATRIX)


@pytest.mark.parametrize("kind", default(["subclass", "sparse", "quantized"]))
def test_tensors_of_unknown_kinds_are_not_left_out(tmp_path, kind):
    """conversion-trials P1, the other side: what stands for a weight is never skipped as a foreign
    object.
    """
    value = {
        "sparse": lambda: MATRIX.to_sparse(),
        "quantized": lambda: torch.quantize_per_tensor(MATRIX, 0.1, 0, torch.qint8),
        "subclass": lambda: MATRIX.as_subclass(Labeled),
    }[kind]()
    refuses(convert(save(tmp_path / "in.pt", {"w": MATRIX, "v": value})), "'v'")


class Labeled(torch.Tensor):
    """A subclass of another program."""


def test_a_pickle_that_runs_programs_is_refused(tmp_path):
    class Hostile:
        def __reduce__(self):
            import os

            return os.system, (f"touch {tmp_path / 'ran'}",)

    torch.save({"state_dict": {"w": MATRIX}, "extra": Hostile()}, tmp_path / "in.pt")
    refuses(convert(tmp_path / "in.pt"), "system", "nothing was executed")
    assert not (tmp_path / "ran").exists()


# -- other kinds of files -------------------------------------------------------------------------


def other_file(kind: str, path: Path) -> None:
    if kind == "TorchScript":
        torch.jit.script(nn.Linear(3, 4)).save(path)
    elif kind == "numpy":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.npy", b"x" * 99)
            archive.writestr("b.npy", b"y" * 99)
    elif kind == "Keras":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("config.json", "{}")
            archive.writestr("model.weights.h5", "x" * 200)
    elif kind == "old format":
        torch.save({"w": MATRIX}, path, _use_new_zipfile_serialization=False)
    elif kind == "safetensors":
        save(path.with_suffix(".safetensors"), {"w": MATRIX})
        path.with_suffix(".safetensors").rename(path)
    else:
        path.write_bytes(HEADS[kind] + bytes(600))


HEADS = {
    "GGUF": b"GGUF",
    "HDF5": b"\x89HDF\r\n\x1a\n",
    "gzip": b"\x1f\x8b\x08",
    "ONNX": b"\x08\x07",
    "Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
    "zip file": b"PK\x03\x04",
}


@pytest.mark.parametrize(
    "kind",
    default(
        [
            "GGUF",
            "Git LFS",
            "HDF5",
            "ONNX",
            "gzip",
            "numpy",
            "Keras",
            "TorchScript",
            "old format",
            "safetensors",
        ],
        2,
    ),
)
def test_other_kinds_of_files_are_named(tmp_path, kind):
    """conversion-trials part 2 POOR 8, P8: "truncated or overwritten; copy the file again"."""
    other_file(kind, tmp_path / "in.bin")
    result = convert(tmp_path / "in.bin")
    refuses(result, kind)
    assert "copy the file again" not in result and "DeepSpeed" not in result


@pytest.mark.parametrize("kind", default(["GGUF", "zip file", "Git LFS"]))
def test_a_safetensors_name_of_another_kind(tmp_path, kind):
    """conversion-trials part 2 POOR 8: "not a safetensors file, or truncated"."""
    other_file(kind, tmp_path / "in.safetensors")
    result = convert(tmp_path / "in.safetensors")
    refuses(result, kind)
    assert "copy the file again" not in result


OBJECTS_ALONE = {
    "object of the class .*Linear": nn.Linear(2, 3),
    "a tensor without a name": MATRIX,
    "a list": [MATRIX],
    "values without a weight": {"epoch": 3, "rng": torch.get_rng_state()},
}


@pytest.mark.parametrize("says", default(OBJECTS_ALONE))
def test_a_file_without_a_state_dict(tmp_path, says):
    refuses(convert(save(tmp_path / "in.pt", OBJECTS_ALONE[says])), says, "state_dict")


# -- what a folder holds --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", default(["GGUF", "Git LFS"]))
def test_a_folder_of_other_kinds_of_files(tmp_path, kind):
    """conversion-trials part 2 POOR 6 and 8."""
    (tmp_path / "in").mkdir()
    other_file(kind, tmp_path / "in" / "weights.xyz")
    refuses(convert(tmp_path / "in"), f"weights.xyz \\(.*{kind}")


def test_what_can_be_converted_in_a_folder_is_listed(zero, tmp_path):
    """conversion-trials part 2 POOR 6: files without a known suffix, DeepSpeed's and DCP's
    folders.
    """
    import torch.distributed.checkpoint as dcp

    folder = tmp_path / "in"
    shutil.copytree(zero / "zero", folder / "global_step3")
    dcp.save({"w": MATRIX}, checkpoint_id=folder / "step-3", no_dist=True)
    save(folder / "weights", {"w": MATRIX})
    (folder / "notes.txt").write_text("text", encoding="utf-8")
    (folder / "empty").mkdir()
    refuses(convert(folder), "global_step3.* or .*step-3.* or .*weights$")


def test_an_unreadable_model_is_not_passed_over(tmp_path):
    """conversion-trials P8: of a folder with a file of torch's old format another file was
    taken.
    """
    old = tmp_path / "in" / "pytorch_model.bin"
    old.parent.mkdir()
    torch.save({"w": MATRIX}, old, _use_new_zipfile_serialization=False)
    refuses(convert(tmp_path / "in"), "old format")
    save(tmp_path / "in" / "critic.bin", {"w": MATRIX})
    refuses(convert(tmp_path / "in"), "2 models: critic.bin, pytorch_model.bin")


def test_the_advice_for_torchs_old_format_works(zero, tmp_path):
    """conversion-trials P8: DeepSpeed's files with checkpoint_serialization = false."""
    shutil.copytree(zero, tmp_path / "in")
    paths = sorted((tmp_path / "in" / "zero").glob("*_states.pt"))
    for path in paths:
        value = torch.load(path, weights_only=False)
        torch.save(value, path, _use_new_zipfile_serialization=False)
    refuses(convert(tmp_path / "in"), "old format", "write every file again under its own name")
    for path in paths:
        torch.save(torch.load(path, weights_only=False), path)
    succeeds(convert(tmp_path / "in"))
    assert tensors_in(tmp_path / "out")["a"].equal(MATRIX)


@SLOW
def test_items_of_dcp_in_safetensors_are_named(tmp_path):
    """conversion-trials part 2 POOR 8: "truncated"."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat

    writer = FileSystemWriter(
        tmp_path / "in", serialization_format=SerializationFormat.SAFETENSORS
    )
    dcp.save({"model": {"w": MATRIX}}, storage_writer=writer, no_dist=True)
    refuses(convert(tmp_path / "in"), "safetensors items", "TORCH_SAVE")


@SLOW
def test_an_optimizer_file_is_named(tmp_path):
    """conversion-trials P9: "a dict without a single tensor; give a model.pt of mmldlm"."""
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    refuses(
        convert(save(tmp_path / "optimizer.bin", optimizer.state_dict())), "state of an optimizer"
    )


# -- folders of DeepSpeed -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", default(["config", "latest", "manifest", "macOS"]))
def test_what_lies_beside_the_files_of_deepspeed(zero, tmp_path, kind):
    """conversion-trials P9 (untrue reasons), P12 (OUT had no config.json)."""
    folder = source = tmp_path / "in"
    shutil.copytree(zero, folder)
    if kind == "latest":
        source = folder / "latest"
    elif kind == "manifest":
        for text in ('{"files": ["a"]}', "no JSON"):
            (folder / "manifest.json").write_text(text, encoding="utf-8")
            succeeds(mmldlm("convert", folder, tmp_path / f"out{len(text)}", "--no-fsync"))
    elif kind == "macOS":
        for path in list((folder / "zero").glob("*_states.pt")):
            path.with_name(f"._{path.name}").write_bytes(b"\x00\x05\x16\x07" + bytes(100))
    else:
        (folder / "config.json").write_text('{"model_type": "x"}', encoding="utf-8")
        (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    succeeds(mmldlm("convert", source, tmp_path / "out", "--no-fsync"))
    assert tensors_in(tmp_path / "out")["a"].equal(MATRIX)
    assert kind != "config" or {"config.json", "tokenizer.json"} <= {
        p.name for p in (tmp_path / "out").iterdir()
    }


@SLOW
def test_a_dcp_folder_named_like_a_step_of_a_run(tmp_path):
    """conversion-trials P9: checkpoints/step_00000010 of another program."""
    import torch.distributed.checkpoint as dcp

    folder = tmp_path / "checkpoints" / "step_00000010"
    dcp.save({"w": MATRIX}, checkpoint_id=folder, no_dist=True)
    succeeds(mmldlm("convert", folder, tmp_path / "out", "--no-fsync"))


LAYOUTS = [
    ("version_0", "checkpoints/epoch=3-step=4.ckpt"),  # Lightning
    ("project", "checkpoints/checkpoint_0/model.safetensors"),  # accelerate
    ("out", "checkpoints/global_step3/model.pt"),
]


@pytest.mark.parametrize("layout", default(LAYOUTS, 2), ids=lambda layout: layout[0])
def test_a_folder_of_checkpoints_of_another_program(tmp_path, layout):
    """It was taken for a run of mmldlm: "start without training.resume"."""
    run, name = layout
    path = save(tmp_path / run / name, {"w": MATRIX})
    top = mmldlm("convert", tmp_path / run, tmp_path / "no")
    refuses(top, f"give one of the models in it: .*{run}/checkpoints")
    assert "resume" not in top
    inside = path.relative_to(tmp_path / run).parts[1]
    given, out = tmp_path / run / "checkpoints", tmp_path / "written"
    result = mmldlm("convert", given, out, "--no-fsync")
    if not path.parent.samefile(given):
        refuses(result, f"give one of the models in it: .*checkpoints/{inside}")
        result = mmldlm("convert", given / inside, out, "--no-fsync")
    succeeds(result)
    assert tensors_in(out)["w"].equal(MATRIX)


def test_flat_parameters_in_a_folder_are_named(tmp_path):
    """conversion-trials part 2, table: FSDP1's local state of two ranks."""
    for rank in (0, 1):
        path = tmp_path / "in" / f"pytorch_model_fsdp_rank{rank}.bin"
        save(path, {"_fsdp_wrapped_module._flat_param": MATRIX[0]})
    refuses(convert(tmp_path / "in"), "part of a sharded checkpoint")


@SLOW
def test_pipeline_stages_are_named(zero, tmp_path):
    """conversion-trials P9: "merge the tensor-parallel parts"."""
    shutil.copytree(zero, tmp_path / "in")
    save(tmp_path / "in" / "zero" / "layer_00-model_states.pt", {"w": MATRIX})
    save(
        tmp_path / "in" / "zero" / "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", {"w": MATRIX}
    )
    refuses(convert(tmp_path / "in"), "layer_00-model_states.pt .*pipeline")


@SLOW
def test_an_optimizer_that_is_not_adam(tmp_path):
    """conversion-trials P9: "expected an intact checkpoint file" of SGD's momentum."""
    ddp = tmp_path / "ddp"
    save(ddp / "model.pt", {"a": MATRIX})
    state = {
        "state": {0: {"momentum_buffer": MATRIX}},
        "param_groups": [{"params": [0], "lr": 0.1}],
    }
    save(ddp / "optimizer.pt", {**state, "param_names": [["a"]]})
    result = mmldlm("convert", ddp, tmp_path / "zero", "--to", "zero2", "--no-fsync")
    refuses(result, "AdamW or Muon", "momentum_buffer")
    assert "intact" not in result


@SLOW
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_16_bits_without_masters(tmp_path, dtype):
    """conversion-trials P11: ZeRO-0 of DeepSpeed 0.17.6 saves no masters; the output is fp32 all
    the same.
    """
    model = {
        "module": {"w": MATRIX.to(dtype)},
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": "0.17.6",
    }
    model |= {
        "optimizer": {"state": {}, "param_groups": []},
        "buffer_names": [],
        "global_steps": 3,
    }
    save(tmp_path / "in" / "mp_rank_00_model_states.pt", model)
    result = mmldlm("convert", tmp_path / "in", tmp_path / "out", "--no-fsync")
    succeeds(result)
    assert ("no fp32 masters" in result) == (dtype == torch.bfloat16)


# -- training.resume ------------------------------------------------------------------------------

RESUMED = {
    "export": ("model", "init_from"),
    "file": ("model/model.safetensors", "init_from"),
    "true": ("true", "auto"),
    "latest": ("latest", "auto"),
    "engine": ("r0/latest/engine", "latest"),
    "runs": (".", "one of its runs"),
}


@pytest.mark.parametrize("kind", default(RESUMED))
def test_resume_names_what_it_was_given(trial_run, trial_store, trial_model, tmp_path, kind):
    """public-reports A resume_from_an_export: "start without training.resume"."""
    given, says = RESUMED[kind]
    (tmp_path / "model").symlink_to(trial_model)
    (tmp_path / "r0").symlink_to(trial_run)
    path = given if kind in ("true", "latest") else tmp_path / given
    result = train_rank(*tiny_run(trial_store, tmp_path / "new", "r1", f"training.resume={path}"))
    refuses(result, says)
