"""mmldlm convert: the written file holds the truth, is readable by safetensors, and appears whole
or not at all.

Weights that do not fit the config beside them are refused; the shapes are those of a model that
was built.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from mmldlm.checkpoints import output_folder
from mmldlm.checkpoints.commit import begin
from mmldlm.checkpoints.convert import convert
from mmldlm.checkpoints.files.dtypes import bf16_to_fp32, fp32_to_bf16
from mmldlm.checkpoints.files.tensor_writer import TensorSpec
from mmldlm.checkpoints.formats.base import WEIGHT, WritePlan, WriteSegment, check_nothing_left
from mmldlm.checkpoints.formats.deepspeed_reader import ZeroCheckpoint
from mmldlm.checkpoints.formats.open import open_source
from mmldlm.checkpoints.formats.safetensors import SafetensorsWriter
from mmldlm.commands import convert as convert_module
from mmldlm.errors import MmldlmError, UserError
from mmldlm.utils.moments import MOMENTS
from tests.support.convert_command import command


def read_safetensors(path) -> tuple[dict, dict[str, np.ndarray], dict[str, str]]:
    """metadata, name -> raw bytes, name -> dtype; by hand, because numpy has no bfloat16."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    body = data[8 + length :]
    spans = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    assert [0] + [end for _, end in spans] == [start for start, _ in spans] + [
        len(body)
    ]  # no gap, no overlap
    raw = {name: body[slice(*entry["data_offsets"])] for name, entry in header.items()}
    return metadata, raw, {name: entry["dtype"] for name, entry in header.items()}


def run_of(folder, zero_case, step: int = 7):
    """An mmldlm run with one committed checkpoint around a case's DeepSpeed files."""
    pending = begin(folder, step)
    shutil.copytree(zero_case / "zero", pending.path / "engine" / "zero")
    (pending.path / "model_config.json").write_text(
        json.dumps({"architecture": "Odd", "hidden": 5})
    )
    (pending.path / "config.yaml").write_text("model: {}\n")
    (pending.path / "tokenizer").mkdir()
    (pending.path / "tokenizer" / "tokenizer.json").write_text("{}")
    (pending.path / "tokenizer" / "README.md").write_text("of somebody else")
    pending.commit(engine="deepspeed", stage=2)
    return folder


@pytest.mark.parametrize("case", ["z0_bf16", "z1_bf16", "z2_bf16", "z3_bf16", "z3_fp32"])
def test_fp32_holds_the_live_values(zero_dir, tmp_path, case):
    summary = convert(zero_dir / case, tmp_path / "out", dtype="fp32")
    metadata, raw, dtypes = read_safetensors(tmp_path / "out" / "model.safetensors")
    truth = np.load(zero_dir / case / "truth.npz")
    index = json.loads((zero_dir / case / "truth.json").read_text())
    assert metadata["format"] == "pt" and json.loads(metadata["aliases"]) == {
        "head.weight": "embed.weight"
    }
    assert set(raw) == set(index) - {"head.weight"}
    for name, data in raw.items():
        expected = truth[name].tobytes()
        if index[name]["dtype"] == "bfloat16":
            expected = bf16_to_fp32(np.frombuffer(expected, np.uint16)).tobytes()
        assert data == expected, name
    assert dtypes["counts"] == "I64" and dtypes["flag"] == "BOOL"
    assert (
        summary.num_aliases == 1
        and summary.num_bytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    )


def test_bf16_and_keep(zero_dir, tmp_path):
    convert(zero_dir / "z2_bf16", tmp_path / "bf16", dtype="bf16")
    convert(zero_dir / "z2_bf16", tmp_path / "keep", dtype="keep")
    _, low, low_types = read_safetensors(tmp_path / "bf16" / "model.safetensors")
    _, kept, kept_types = read_safetensors(tmp_path / "keep" / "model.safetensors")
    assert kept_types["wide.weight"] == "F32" and kept_types["frozen.weight"] == "BF16"
    assert (
        low_types["wide.weight"] == "BF16"
        and low_types["mean"] == "F32"
        and low_types["counts"] == "I64"
    )
    rounded = fp32_to_bf16(np.frombuffer(kept["wide.weight"], np.float32))
    assert low["wide.weight"] == rounded.tobytes()


def test_the_safetensors_library_reads_it(zero_dir, tmp_path):
    load_file = pytest.importorskip(
        "safetensors.torch", reason="safetensors is not installed"
    ).load_file
    convert(zero_dir / "z3_bf16", tmp_path / "out", dtype="bf16")
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert state["counts"].tolist() == [2**40 + 1, -3, 5] and state["flag"].shape == ()
    with ZeroCheckpoint.open(zero_dir / "z3_bf16") as checkpoint:
        master = torch.from_numpy(checkpoint.read("narrow.weight"))
    assert torch.equal(state["narrow.weight"], master.to(torch.bfloat16))


@pytest.mark.parametrize("spelling", ["", "latest", "checkpoints/step_00000007"])
def test_a_run_becomes_a_model_folder(zero_dir, tmp_path, spelling):
    run_dir = run_of(tmp_path / "run", zero_dir / "z2_bf16")
    convert(run_dir / spelling, tmp_path / "out", dtype="fp32")
    out = tmp_path / "out"
    assert sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()) == [
        "README.md",
        "config.json",
        "config.yaml",
        "converted.json",
        "model.safetensors",
        "tokenizer.json",
        # Not where it would be taken for the model's.
        "tokenizer/README.md",
    ]
    config = json.loads((out / "config.json").read_text())
    assert config == {
        "model_type": "mmldlm",
        "architecture": "Odd",
        "hidden": 5,
        "torch_dtype": "float32",
    }
    convert(run_dir / spelling, out, dtype="bf16", force=True)
    convert(run_dir / spelling, out, dtype="fp32", force=True)
    metadata, _, _ = read_safetensors(out / "model.safetensors")
    assert metadata["step"] == "7" and len(metadata["source_manifest_sha256"]) == 64


@pytest.mark.parametrize("name", ["latest", "last_best"])
def test_a_link_of_another_program_is_what_it_leads_to(tmp_path, name):
    step = tmp_path / "checkpoints" / "step_00000100"
    step.mkdir(parents=True)
    torch.save({"w": torch.ones(2, 3)}, step / "model.pt")
    (tmp_path / name).symlink_to(step)
    assert convert(tmp_path / name, tmp_path / "out").num_parameters == 6
    (tmp_path / "file" / name).parent.mkdir()
    (tmp_path / "file" / name).symlink_to(step / "model.pt")
    assert convert(tmp_path / "file" / name, tmp_path / "of_file").num_parameters == 6


def test_a_file_of_another_save_in_a_run(zero_dir, tmp_path):
    """Same sizes, same rank, same names; for ZeRO-3 only the manifest can tell when all ranks
    agree.
    """
    run_dir = run_of(tmp_path / "run", zero_dir / "z3_bf16")
    engine = run_dir / "checkpoints" / "step_00000007" / "engine" / "zero"
    for path in engine.glob("*optim_states.pt"):
        other = zero_dir / "z3_later" / "zero" / path.name
        assert other.stat().st_size == path.stat().st_size
        path.write_bytes(other.read_bytes())
    with pytest.raises(UserError, match="optim_states.pt"):
        convert(run_dir, tmp_path / "out")


def test_model_pt(tmp_path):
    weight = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    torch.save(
        {
            "module.a": weight,
            "module.b": weight.t(),
            "module.tied": weight,
            "module.n": torch.tensor(3),
        },
        tmp_path / "model.pt",
    )
    convert(tmp_path / "model.pt", tmp_path / "out", strip_prefix="module.")
    metadata, raw, dtypes = read_safetensors(tmp_path / "out" / "model.safetensors")
    assert set(raw) == {"a", "b", "n"} and json.loads(metadata["aliases"]) == {"tied": "a"}
    assert (
        raw["a"] == weight.numpy().tobytes()
        and raw["b"] == weight.t().contiguous().numpy().tobytes()
    )
    assert dtypes["n"] == "I64"


def test_model_pt_in_a_checkpoint(tmp_path):
    pending = begin(tmp_path / "run", 3)
    (pending.path / "engine").mkdir()
    # One name alone starts with "module.": it is the model's own.
    torch.save(
        {"module.a": torch.ones(2), "b": torch.zeros(2)}, pending.path / "engine" / "model.pt"
    )
    pending.commit(engine="single")
    convert(tmp_path / "run", tmp_path / "out")
    _, raw, _ = read_safetensors(tmp_path / "out" / "model.safetensors")
    assert set(raw) == {"module.a", "b"}


def test_a_model_comes_back_whole_from_model_pt(tmp_path, capsys):
    folder, path = tmp_path / "model", str(tmp_path)
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(
        json.dumps({"architecture": "MultimodalMMDiT", "torch_dtype": "float32"})
    )
    tensors = {
        "head.weight": torch.full((3, 2), 0.1),
        "latent_mean": torch.full((2,), 0.1),
        "latent_std": torch.ones(2),
    }
    torch.save(tensors, folder / "model.pt")
    before = [command(f"{path}/model", f"{path}/st"), capsys.readouterr().out]
    assert command(f"{path}/st", f"{path}/pt", "--to", "model.pt") == before[0] == 0
    assert command(f"{path}/pt", f"{path}/again", "--dtype", "bf16") == 0
    after = capsys.readouterr().out
    assert (
        "parameters  6\n" in before[1]
        and after.count("parameters  6\n") == 2
        and "note:" not in before[1] + after
    )
    assert (tmp_path / "again" / "tokenizer" / "tokenizer.json").is_file()
    assert (
        json.loads((tmp_path / "again" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    )
    _, _, dtypes = read_safetensors(tmp_path / "again" / "model.safetensors")
    assert dtypes == {
        "head.weight": "BF16",
        "latent_mean": "F32",
        "latent_std": "F32",
    }  # as of any checkpoint


@pytest.mark.parametrize("target", ["safetensors", "model.pt", "zero2"])
def test_what_is_no_checkpoint_is_named_for_what_it_is(tmp_path, target):
    (tmp_path / "clean.txt").write_text("Grüße.\nA second line.\n" * 40, encoding="utf-8")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "manifest.json").write_text('{"format": "mmldlm-store", "version": 1}')
    for name, found in (("clean.txt", "a text file"), ("store", "a store of prepared data")):
        with pytest.raises(UserError) as error:
            command(str(tmp_path / name), str(tmp_path / "out"), "--to", target)
        assert error.value.found.startswith(found) and "copy" not in error.value.fix, error.value


def test_values_that_do_not_fit(tmp_path):
    torch.save({"huge": torch.tensor([1e30])}, tmp_path / "model.pt")
    with pytest.raises(UserError, match="huge"):
        convert(tmp_path / "model.pt", tmp_path / "out", dtype="fp16")
    torch.save({"bad": torch.tensor([float("nan")])}, tmp_path / "model.pt")
    with pytest.raises(UserError, match="bad"):
        convert(tmp_path / "model.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
    convert(tmp_path / "model.pt", tmp_path / "out", allow_nonfinite=True)


def test_existing_output(zero_dir, tmp_path):
    out = tmp_path / "out"
    convert(zero_dir / "z2_bf16", out)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="--force"):
        convert(zero_dir / "z2_later", out)
    assert (out / "model.safetensors").read_bytes() == before
    convert(zero_dir / "z2_later", out, force=True)
    assert (out / "model.safetensors").read_bytes() != before
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="thesis.tex"):
        convert(zero_dir / "z2_bf16", out, force=True)
    assert (out / "thesis.tex").exists()


@pytest.mark.parametrize("name", ["out", "out.partial", "out.replaced"])
def test_a_model_of_another_program_is_never_deleted(zero_dir, tmp_path, name):
    if name == "out.replaced":
        convert(zero_dir / "z2_bf16", tmp_path / "out")
    folder = tmp_path / name
    folder.mkdir()
    # As save_pretrained writes it.
    header = (
        b'{"__metadata__":{"format":"pt"},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    )
    weights = len(header).to_bytes(8, "little") + header + b"w"
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match="another program may have written"):
        convert(zero_dir / "z2_bf16", tmp_path / "out", force=True)
    assert (folder / "model.safetensors").read_bytes() == weights
    for path in list(folder.iterdir()):
        path.unlink()
    convert(zero_dir / "z2_bf16", tmp_path / "out", force=True)


def test_a_conversion_without_a_marker_is_known_by_its_header(zero_dir, tmp_path):
    """As earlier versions wrote those of foreign weights."""
    convert(zero_dir / "z2_bf16", tmp_path / "out")
    (tmp_path / "out" / "converted.json").unlink()
    convert(zero_dir / "z2_later", tmp_path / "out", force=True)


@pytest.mark.parametrize("name", ["out.partial", "out.replaced"])
def test_a_leftover_that_cannot_be_deleted_is_named_before_the_work(
    zero_dir, tmp_path, monkeypatch, name
):
    convert(zero_dir / "z2_bf16", tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / name)

    def refused(path, **more):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refused)
    monkeypatch.setattr(os, "pwrite", refused)
    with pytest.raises(UserError, match=f"to delete .*{name}(?s:.*)Permission denied"):
        convert(zero_dir / "z2_later", tmp_path / "out", force=True)


@pytest.mark.parametrize("content", ["[1]", '{"out_dir": "runs/mine", "lr": 0.1}', "not JSON"])
def test_a_config_of_something_else_beside_a_file_is_left_alone(tmp_path, content):
    torch.save({"w": torch.ones(2, 3)}, tmp_path / "weights.pt")
    (tmp_path / "config.json").write_text(content)
    convert(tmp_path / "weights.pt", tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_output_inside_the_checkpoint(zero_dir, tmp_path):
    run_dir = run_of(tmp_path / "run", zero_dir / "z2_bf16")
    step = run_dir / "checkpoints" / "step_00000007"
    for out in (step / "out", step, run_dir):
        with pytest.raises(UserError, match="outside the checkpoint"):
            convert(run_dir, out, force=True)


def test_failed_write_leaves_nothing(zero_dir, tmp_path, monkeypatch):
    out = tmp_path / "out"
    convert(zero_dir / "z2_bf16", out)
    before = (out / "model.safetensors").read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(MmldlmError, match="No space left"):
        convert(zero_dir / "z2_later", out, force=True)
    assert (out / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


@pytest.fixture
def old_conversion(zero_dir, tmp_path):
    """A conversion at tmp_path / "out", and its bytes."""
    convert(zero_dir / "z2_bf16", tmp_path / "out")
    return (tmp_path / "out" / "model.safetensors").read_bytes()


def test_a_failed_exchange_puts_the_old_output_back(
    zero_dir, tmp_path, monkeypatch, old_conversion
):
    rename = os.rename

    def failing(source, target):
        if str(source).endswith(".partial"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(MmldlmError, match="Input/output error"):
        convert(zero_dir / "z2_later", tmp_path / "out", force=True)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == old_conversion
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_an_output_of_a_killed_exchange_is_put_back(zero_dir, tmp_path, old_conversion):
    out = tmp_path / "out"
    os.rename(out, tmp_path / "out.replaced")
    with pytest.raises(UserError, match="--force"):
        convert(zero_dir / "z2_later", out)
    assert (out / "model.safetensors").read_bytes() == old_conversion
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_an_old_output_that_cannot_be_deleted_is_no_failure(
    zero_dir, tmp_path, monkeypatch, old_conversion
):
    rmtree = shutil.rmtree

    def failing(path, ignore_errors=False, **more):
        if (tmp_path / "out.replaced").exists() and not ignore_errors:
            raise OSError(39, "Directory not empty")
        rmtree(path, ignore_errors=ignore_errors, **more)

    monkeypatch.setattr(shutil, "rmtree", failing)
    convert(zero_dir / "z2_later", tmp_path / "out", force=True)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != old_conversion


def test_no_space(zero_dir, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(output_folder.shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(UserError, match="free space"):
        convert(zero_dir / "z2_bf16", tmp_path / "out")


def test_an_output_that_cannot_be_made_is_no_lack_of_space(zero_dir, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("kept")
    usage = shutil.disk_usage(tmp_path)
    # As /proc has.
    monkeypatch.setattr(output_folder.shutil, "disk_usage", lambda path: usage._replace(free=0))
    with pytest.raises(UserError, match="Not a directory"):
        convert(zero_dir / "z2_bf16", tmp_path / "file" / "out")


def test_interrupted_conversion_starts_clean(zero_dir, tmp_path):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_text("half")
    (partial / "converted.json").write_text("{}")
    convert(zero_dir / "z2_bf16", tmp_path / "out")
    assert not partial.exists()


def test_memory_stays_bounded(tmp_path):
    """192 MiB of weights in one tensor, through a few chunks."""
    torch.save({"w": torch.zeros(48 << 20)}, tmp_path / "model.pt")
    code = (
        "import resource, sys; from mmldlm.checkpoints.convert import convert\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "convert(sys.argv[1], sys.argv[2], dtype='bf16')\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model.pt"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
    )
    assert int(done.stdout) < 80, done.stderr


def test_command(zero_dir, tmp_path, capsys):
    source = str(zero_dir / "z2_bf16")
    assert command(source, "--dry-run") == 0
    assert "would write" in capsys.readouterr().out and not list(tmp_path.iterdir())
    assert command(source, str(tmp_path / "out")) == 0
    assert "13 + 1 tied" in capsys.readouterr().out
    assert command("inspect", source) == 0
    text = capsys.readouterr().out
    assert "head.weight" in text and "-> embed.weight" in text and "ZeRO stage  2" in text
    with pytest.raises(UserError, match="output folder"):
        command(source)
    with pytest.raises(UserError, match="nothing"):
        command(str(tmp_path / "absent"), str(tmp_path / "other"))


@pytest.mark.parametrize("target", ["safetensors", "zero3", "universal"])
def test_without_the_flush_the_bytes_are_the_same(zero_dir, tmp_path, monkeypatch, target):
    source, words = str(zero_dir / "z2_bf16"), ("--to", target)
    assert command(source, str(tmp_path / "flushed"), *words) == 0
    flushed = []
    for name in ("fsync_path", "sync_file_system"):
        monkeypatch.setattr(output_folder, name, flushed.append)
    monkeypatch.setattr(os, "fsync", flushed.append)
    assert command(source, str(tmp_path / "loose"), *words, "--no-fsync") == 0
    assert not flushed
    folders = (tmp_path / "flushed", tmp_path / "loose")
    written = [
        {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
        for folder in folders
    ]
    assert written[0].keys() == written[1].keys() and written[0]
    assert all(
        path.read_bytes() == written[1][name].read_bytes() for name, path in written[0].items()
    )


def test_a_bar_only_where_somebody_waits(zero_dir, tmp_path, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "stderr", screen)
    assert (
        command(str(zero_dir / "z2_bf16"), str(tmp_path / "quick")) == 0 and not screen.getvalue()
    )
    monkeypatch.setattr(convert_module, "PROGRESS_DELAY", -1.0)
    assert command(str(zero_dir / "z2_bf16"), str(tmp_path / "slow")) == 0
    assert "957 B of 957 B" in screen.getvalue()


def test_a_reader_that_has_enough(zero_dir):
    words = [sys.executable, "-m", "mmldlm.cli", "convert", "inspect", str(zero_dir / "z2_bf16")]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == 1 and not done.stderr


def test_exit_codes_of_the_process(zero_dir, tmp_path, capsys):
    assert command(str(zero_dir / "z3_fp32"), str(tmp_path / "out")) == 0
    done = capsys.readouterr().out
    assert done.startswith("wrote") and "MiB/s" in done
    words = [
        sys.executable,
        "-m",
        "mmldlm.cli",
        "convert",
        str(zero_dir / "z3_fp32"),
        str(tmp_path / "out"),
    ]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: expected no file or folder at")
    with open("/dev/full", "w", encoding="utf-8") as full:
        # An output that cannot be written is no success.
        done = subprocess.run([*words, "--force"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode not in (0, 2) and "No space left" in done.stderr


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 150_000, -1])
def test_copied_weights_must_be_finite(tmp_path, bad, position):
    values = torch.full((300_001,), 1e30)
    torch.save({"w": values}, tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "out")
    values[position] = bad
    torch.save({"w": values}, tmp_path / "model.pt")
    with pytest.raises(UserError, match="1 NaN or infinite elements in w"):
        convert(tmp_path / "model.pt", tmp_path / "out", force=True)
    convert(tmp_path / "model.pt", tmp_path / "out", force=True, allow_nonfinite=True)
    _, raw, _ = read_safetensors(tmp_path / "out" / "model.safetensors")
    assert raw["w"] == values.numpy().tobytes()


def test_dry_run_reads_the_weights(zero_copy):
    folder = zero_copy("z2_bf16")
    path = folder / "mp_rank_00_model_states.pt"
    with ZeroCheckpoint.open(folder) as checkpoint:
        part = checkpoint.parts["counts"][0]
        place = part.file.records[f"data/{part.ref.key}"].start
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(UserError, match="mp_rank_00_model_states.pt"):
        command(str(folder), "--dry-run")


def test_writer_refuses_an_existing_file(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(FileExistsError):
        SafetensorsWriter(tmp_path / "x", {}, {}).finish()


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1.0, 1.0039062, 1.00390625, 1.0117188, 3.4e38, float("inf"), float("nan")]
)
def test_bf16_rounds_as_torch(value):
    expected = torch.tensor([value]).to(torch.bfloat16).float().numpy()
    got = bf16_to_fp32(fp32_to_bf16(np.array([value], np.float32)))
    np.testing.assert_array_equal(got, expected)


def test_an_element_that_is_left_over_is_an_error(tmp_path):
    """A plan with a hole in a weight, and one without the moments of another."""
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4), "empty": torch.ones(0)}
    torch.save(weights, tmp_path / "model.pt")
    with open_source(tmp_path / "model.pt").weights as source:
        file, tensor = None, TensorSpec("float32", (6,))
        plan = WritePlan()
        plan.add("a", WEIGHT, [WriteSegment(file, tensor, 0, 0, 4)])
        plan.add("a", WEIGHT, [WriteSegment(file, tensor, 0, 2, 3)])
        plan.add("b", WEIGHT, [WriteSegment(file, tensor, 0, 0, 4)])
        assert plan.covered() == {("a", WEIGHT): 5, ("b", WEIGHT): 4}
        with pytest.raises(MmldlmError, match="weight of a$"):
            check_nothing_left(source, plan.covered())
        plan.add("a", WEIGHT, [WriteSegment(file, tensor, 0, 5, 1)])
        check_nothing_left(source, plan.covered())
        source.moments = {"exp_avg": {"a": source.parts["a"]}}
        with pytest.raises(MmldlmError, match="exp_avg of a$"):
            check_nothing_left(source, plan.covered(), MOMENTS)
