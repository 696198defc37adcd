"""mmldlm convert on the checkpoints of every engine, the moving average, shards, selections, and
diff.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from mmldlm.checkpoints.commit import begin
from mmldlm.checkpoints.convert import convert
from mmldlm.checkpoints.formats.dcp import DcpCheckpoint
from mmldlm.checkpoints.formats.dcp_folder import ItemFile
from mmldlm.checkpoints.formats.open import open_source
from mmldlm.checkpoints.formats.safetensors import SafetensorsModel
from mmldlm.checkpoints.inspect import compare
from mmldlm.errors import UserError
from tests.support.convert_command import command

torch = pytest.importorskip("torch", reason="torch is not installed: no truth to compare with")


def state_of(folder) -> dict:
    """name -> tensor of a converted folder, as torch's own users would read it."""
    load_file = pytest.importorskip(
        "safetensors.torch", reason="safetensors is not installed"
    ).load_file
    state = {}
    for path in folder.glob("*.safetensors"):
        state.update(load_file(path))
    return state


def run_of(run_dir, engine_folder, engine: str):
    """An mmldlm run with one committed checkpoint around an engine's files."""
    pending = begin(run_dir, 7)
    shutil.copytree(engine_folder, pending.path / "engine")
    pending.commit(engine=engine)
    return run_dir


SOURCES = [("fsdp", "fsdp", "truth.pt"), ("plain", "ddp", "plain.pt")]


@pytest.mark.parametrize("folder, engine, truth_file", SOURCES)
def test_weights(fsdp_dir, tmp_path, folder, engine, truth_file):
    truth = torch.load(fsdp_dir / truth_file, weights_only=True)["weight"]
    run = run_of(tmp_path / "run", fsdp_dir / folder, engine)
    for source in (run, fsdp_dir / folder):
        convert(source, tmp_path / "out", dtype="keep", force=True, verify=True)
        state = state_of(tmp_path / "out")
        assert set(state) == set(truth) - {"head.weight"}
        for name, tensor in state.items():
            assert tensor.dtype == truth[name].dtype and torch.equal(tensor, truth[name]), name
    convert(run, tmp_path / "low", dtype="bf16")
    low = state_of(tmp_path / "low")
    assert low["wide.weight"].dtype == torch.bfloat16 and low["scale"].dtype == torch.float32


@pytest.mark.parametrize("folder, engine, truth_file", SOURCES)
def test_average(fsdp_dir, tmp_path, folder, engine, truth_file):
    truth = torch.load(fsdp_dir / truth_file, weights_only=True)
    run = run_of(tmp_path / "run", fsdp_dir / folder, engine)
    convert(run, tmp_path / "out", ema=True)
    state = state_of(tmp_path / "out")
    for name, tensor in state.items():
        expected = truth["ema"].get(name, truth["weight"][name])
        assert torch.equal(tensor, expected), name
    with SafetensorsModel.open(tmp_path / "out") as written:
        assert written.files[0].metadata["ema"] == "true" and written.step == 7


def test_average_of_a_run_without_one(zero_dir, tmp_path):
    with pytest.raises(UserError, match="moving average"):
        convert(zero_dir / "z2_bf16", tmp_path / "out", ema=True)
    assert not list(tmp_path.iterdir())


def test_average_of_tied_weights_that_were_saved_apart(fsdp_dir, tmp_path):
    """No `aliases` in trainable.json: the second name must get the average too, or the model loads
    the wrong one.
    """
    engine = tmp_path / "engine"
    shutil.copytree(fsdp_dir / "fsdp", engine)
    facts = json.loads((engine / "trainable.json").read_text())
    (engine / "trainable.json").write_text(json.dumps({"trainable": facts["trainable"]}))
    summary = convert(engine, tmp_path / "out", ema=True)
    assert "head.weight" not in state_of(tmp_path / "out") and summary.num_aliases == 1
    assert any("head.weight" in note and "tied" in note for note in summary.notes)
    convert(engine, tmp_path / "weights")
    state = state_of(tmp_path / "weights")
    assert torch.equal(state["head.weight"], state["embed.weight"])


def test_average_beside_zero_files(zero_dir, tmp_path):
    """The average replaces the masters, whose rounded copies in the model file must then not be
    compared with it.
    """
    engine = tmp_path / "engine"
    shutil.copytree(zero_dir / "z3_bf16", engine)
    with open_source(engine).weights as source:
        shapes = {
            name: info.shape for name, info in source.tensors.items() if info.kind == "trainable"
        }
    for rank in (0, 1):
        entries = {}
        for name, shape in shapes.items():
            flat = torch.arange(float(np.prod(shape)))
            half = flat.numel() // 2
            part = flat[:half] if rank == 0 else flat[half:]
            entries[name] = {"start": rank * half, "shape": list(shape), "values": part.clone()}
        torch.save(entries, engine / f"ema_rank{rank}.pt")
    convert(engine, tmp_path / "out", ema=True)
    state = state_of(tmp_path / "out")
    assert (
        torch.equal(state["wide.weight"].flatten(), torch.arange(65.0))
        and state["frozen.weight"].any()
    )


def test_foreign_dcp(fsdp_dir, tmp_path):
    """A bare state_dict without our names: tied weights twice, and no record of what is frozen."""
    truth = torch.load(fsdp_dir / "truth.pt", weights_only=True)["weight"]
    for path in (fsdp_dir / "bare", fsdp_dir / "bare" / ".metadata"):
        with open_source(path).weights as source:
            assert set(source.tensors) == set(truth) and source.engine == "fsdp"
            assert {info.kind for info in source.tensors.values()} == {"parameter"}
            for name, tensor in truth.items():
                raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                assert source.read(name).tobytes() == raw, name


def test_another_cut_is_refused(fsdp_dir):
    with pytest.raises(UserError, match="first dimension"):
        DcpCheckpoint.open(fsdp_dir / "columns")


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "swapped"])
def test_damaged_dcp(fsdp_dir, tmp_path, damage):
    folder = tmp_path / "dcp"
    shutil.copytree(fsdp_dir / "fsdp", folder)
    one, two = folder / "__0_0.distcp", folder / "__1_0.distcp"
    data = bytearray(two.read_bytes())
    if damage == "missing":
        two.unlink()
    elif damage == "cut":
        two.write_bytes(data[: len(data) // 2])
    elif damage == "swapped":
        two.write_bytes(one.read_bytes())
        one.write_bytes(data)
    else:
        with DcpCheckpoint.open(folder) as source:
            item = source.parts["wide.weight"][1].file
            data[ItemFile.position_of(item, item._tensor(), 3)] ^= 1
        two.write_bytes(data)
    with pytest.raises(UserError, match="distcp"):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_foreign_folders_named_checkpoints(fsdp_dir, zero_dir, tmp_path):
    """Nothing but the name is ours."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(zero_dir / "z2_bf16", folder)
    shutil.copytree(fsdp_dir / "bare", folder / "step-100")
    (folder / "latest").write_text("zero")
    for path, engine in (
        (folder, "deepspeed"),
        (folder / "zero", "deepspeed"),
        (folder / "step-100", "fsdp"),
    ):
        with open_source(path).weights as source:
            assert source.engine == engine


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_a_checkpoint_of_ours_without_its_manifest(fsdp_dir, zero_dir, tmp_path, engine):
    run = run_of(
        tmp_path / "run", fsdp_dir / "fsdp" if engine == "fsdp" else zero_dir / "z2_bf16", engine
    )
    step = run / "checkpoints" / "step_00000007"
    (step / "manifest.json").unlink()
    for path in (run, step):
        with pytest.raises(UserError, match="manifest"):
            open_source(path)


@pytest.mark.parametrize("key", ["model", "state_dict"])
def test_weights_beside_other_things(tmp_path, key):
    """What trainers save: {"model": state_dict, "optimizer": ..., "step": ...}."""
    torch.save(
        {"step": 3, key: {"w": torch.ones(2)}, "optimizer": {"state": {}}},
        tmp_path / "checkpoint.pt",
    )
    with open_source(tmp_path / "checkpoint.pt").weights as source:
        assert set(source.tensors) == {"w"} and key in source.notes[0]
    torch.save(
        {"step": 3, "one": {"w": torch.ones(2)}, "other": {"w": torch.ones(2)}},
        tmp_path / "checkpoint.pt",
    )
    with pytest.raises(UserError, match=r"(?s)several state dicts: one .*, other .*--key one"):
        open_source(tmp_path / "checkpoint.pt")


# -- shards, selections, safetensors as a source --------------------------------------------------


@pytest.mark.parametrize("size, files", [("100", 11), ("400B", 2), ("1GB", 1)])
def test_shards(fsdp_dir, tmp_path, size, files):
    source, out = fsdp_dir / "plain", tmp_path / "out"
    assert command(source, out, "--shard-size", size, "--verify", "--dtype", "keep") == 0
    written = sorted(path.name for path in out.glob("*.safetensors"))
    if files == 1:
        assert (
            written == ["model.safetensors"]
            and not (out / "model.safetensors.index.json").exists()
        )
    else:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == written and len(written) > 1
        assert written[0] == f"model-00001-of-{len(written):05d}.safetensors"
    with open_source(source).weights as before, open_source(out).weights as after:
        found = compare(before, after)
        assert not found.any and not found.dtypes and found.equal == len(before.tensors)
    # A second conversion may replace the shards of the first, and a shard that is gone is named.
    if files > 1:
        assert command(source, out, "--shard-size", size, "--force") == 0
        (out / written[1]).unlink()
        with pytest.raises(UserError, match=written[1]):
            open_source(out)


def test_only(fsdp_dir, tmp_path):
    convert(fsdp_dir / "fsdp", tmp_path / "out", only=["wide.*", "head.weight"])
    with SafetensorsModel.open(tmp_path / "out") as written:
        assert set(written.tensors) == {"wide.weight", "wide.bias", "embed.weight", "head.weight"}
        assert written.tensors["head.weight"].alias_of == "embed.weight"
    with pytest.raises(UserError, match="nothing.of.the.kind"):
        convert(fsdp_dir / "fsdp", tmp_path / "other", only=["nothing.of.the.kind"])


def test_a_hugging_face_folder_keeps_what_belongs_to_it(fsdp_dir, tmp_path):
    model = tmp_path / "model"
    convert(fsdp_dir / "plain", model)
    (model / "config.json").write_text(json.dumps({"architectures": ["Odd"], "dtype": "float32"}))
    for name in ("tokenizer.json", "merges.txt", "generation_config.json"):
        (model / name).write_text(name)
    (model / "notes.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    for source in (model, model / "model.safetensors"):
        assert command(source, tmp_path / "half", "--dtype", "bf16", "--force") == 0
        names = {path.name for path in (tmp_path / "half").iterdir()}
        assert names == {*before, "converted.json"} - {"notes.txt"}
        assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
        assert (tmp_path / "half" / "merges.txt").read_text() == "merges.txt"
    # Somebody's own model is never replaced, and an unreadable config is named.
    with pytest.raises(UserError, match="only files of an earlier conversion"):
        command(fsdp_dir / "plain", model, "--force")
    assert before == {path.name: path.read_bytes() for path in model.iterdir()}
    (model / "config.json").write_text("[")
    with pytest.raises(UserError, match="config.json"):
        command(model, tmp_path / "third")
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize("damage", ["cut", "header", "gap"])
def test_damaged_safetensors(fsdp_dir, tmp_path, damage):
    convert(fsdp_dir / "plain", tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "header":
        path.write_bytes(b"\xff" * 8 + data[8:])
    else:
        header = json.loads(data[8 : 8 + length])
        del header["wide.weight"]
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(UserError, match="model.safetensors"):
        open_source(tmp_path / "out")


def test_written_output_that_changed_is_seen(fsdp_dir, tmp_path, monkeypatch):
    from mmldlm.checkpoints import convert as to_safetensors
    from mmldlm.errors import MmldlmError

    original = to_safetensors.execute

    def write_and_flip(source, plan, *rest):
        original(source, plan, *rest)
        path = plan.files[0].path
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(to_safetensors, "execute", write_and_flip)
    with pytest.raises(MmldlmError, match="read back"):
        convert(fsdp_dir / "plain", tmp_path / "out", verify=True)
    assert not list(tmp_path.iterdir())


# -- inspect and diff -----------------------------------------------------------------------------


@pytest.mark.parametrize("folder, engine, _", [*SOURCES, ("plain_muon", "ddp", "")])
def test_inspect(fsdp_dir, tmp_path, capsys, folder, engine, _):
    assert command("inspect", run_of(tmp_path / "run", fsdp_dir / folder, engine)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert (
        ["engine", engine] in lines and ["step", "7"] in lines and ["world", "size", "1"] in lines
    )
    assert ["frozen.weight", "float32", "frozen", "3x5"] in lines
    assert ["EMA", "of", "5", "tensors,", "183", "elements"] in lines
    assert any(line[:3] == ["head.weight", "float32", "alias"] for line in lines)
    num_second, states = (3, ["exp_avg"]) if "muon" in folder else (5, ["exp_avg", "exp_avg_sq"])
    assert [
        "moments",
        "exp_avg",
        "of",
        "5",
        "tensors,",
        "exp_avg_sq",
        "of",
        str(num_second),
        "tensors",
    ] in lines
    assert ["wide.weight", "float32", "trainable", "13x5", *states] in lines
    assert command("inspect", fsdp_dir / "bare") == 0  # it does not record what was trained
    assert "moments" not in capsys.readouterr().out


def test_diff(fsdp_dir, zero_dir, tmp_path, capsys):
    plain = fsdp_dir / "plain"
    assert command("diff", plain, plain) == 0
    assert "12 tensors equal, 0 differ, 0 in one alone" in capsys.readouterr().out
    convert(plain, tmp_path / "low", dtype="bf16", only=["[!f]*"])
    assert command("diff", plain, tmp_path / "low") == 1
    text = capsys.readouterr().out
    assert (
        "only in A  frozen.weight" in text
        and "dtype      wide.bias: float32 in A, bfloat16 in B" in text
    )
    assert "values     wide.weight: " in text and "values     counts" not in text
    assert command("diff", plain, fsdp_dir / "fsdp", "--ema") == 1
    assert command("diff", zero_dir / "z2_bf16", zero_dir / "z2_later") == 1
    capsys.readouterr()
    assert command("diff", zero_dir / "z2_bf16", zero_dir / "z3_muon", "--optimizer") == 1
    lines = capsys.readouterr().out.splitlines()
    alone = [f"only in A  exp_avg_sq of {name}" for name in ("narrow.weight", "wide.weight")]
    assert sorted(line for line in lines if line.startswith("only in")) == alone
    assert any(line.startswith("values     exp_avg of wide.weight") for line in lines)
    assert command("diff", zero_dir / "z3_muon", zero_dir / "z3_muon", "--optimizer") == 0
    with pytest.raises(SystemExit):
        command("diff", plain)


def test_diff_counts_and_measures(tmp_path):
    nan, inf = float("nan"), float("inf")
    torch.save(
        {"x": torch.tensor([1.0, nan, -0.0, 4.0, inf]), "n": torch.tensor([2**60, 5])},
        tmp_path / "a.pt",
    )
    torch.save(
        {"x": torch.tensor([1.0, nan, 0.0, 4.5, inf]), "n": torch.tensor([2**60 + 1, 5])},
        tmp_path / "b.pt",
    )
    with (
        open_source(tmp_path / "a.pt", True).weights as a,
        open_source(tmp_path / "b.pt", True).weights as b,
    ):
        found = compare(a, b)
    assert found.values["x"] == (2, 0.5) and found.values["n"][0] == 1
