"""Reading real DeepSpeed checkpoints: bit-equal to the live engine, and no damaged one is ever
read as a whole one.

Universal checkpoints: those of DeepSpeed's own tool are read right, and ours are what DeepSpeed
loads.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from mmldlm.checkpoints.convert import convert_state
from mmldlm.checkpoints.files.dtypes import DTYPES, bf16_to_fp32, fp32_to_bf16
from mmldlm.checkpoints.files.torch_writer import TensorSpec, TorchFileLayout, write_torch
from mmldlm.checkpoints.formats.deepspeed_reader import ZeroCheckpoint
from mmldlm.checkpoints.formats.model_pt import ModelFile
from mmldlm.checkpoints.formats.open import open_source
from mmldlm.checkpoints.formats.weight_source import ReadOptions
from mmldlm.checkpoints.resume import open_training_state
from mmldlm.errors import UserError
from tests.support.helpers import environment
from tests.support.make_zero import CASES

OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL3 = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
MODEL = "mp_rank_00_model_states.pt"


def read_all(path) -> dict[str, bytes]:
    with ZeroCheckpoint.open(path) as checkpoint:
        return {name: checkpoint.read(name).tobytes() for name in checkpoint.tensors}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_live_engine(zero_dir, case):
    truth = np.load(zero_dir / case / "truth.npz")
    index = json.loads((zero_dir / case / "truth.json").read_text())
    with ZeroCheckpoint.open(zero_dir / case) as checkpoint:
        assert checkpoint.stage == CASES[case]["stage"]
        assert checkpoint.world_size == 2
        assert checkpoint.step == CASES[case].get("steps", 2)
        assert set(checkpoint.tensors) == set(index)
        kinds = {name: info.kind for name, info in checkpoint.tensors.items()}
        assert (
            kinds["head.weight"] == "alias"
            and checkpoint.tensors["head.weight"].alias_of == "embed.weight"
        )
        assert {name for name in kinds if kinds[name] == "buffer"} == {"counts", "flag", "mean"}
        if case != "z0_fp32" and "frozen.weight" in kinds:
            assert {name for name in kinds if kinds[name] == "frozen"} == {
                "frozen.weight",
                "frozen.bias",
            }
        for name, expected in index.items():
            values = checkpoint.read(name)
            assert values.shape == tuple(expected["shape"]), name
            if case == "z2_robin" and kinds[name] == "trainable":
                # The live getter is wrong here (make_zero): what decides is that the rounded
                # master is the weight.
                assert fp32_to_bf16(values).tobytes() == truth[name].tobytes(), name
                continue
            if kinds[name] == "alias" and case == "z2_robin":
                continue
            assert checkpoint.tensors[name].dtype == expected["dtype"], name
            assert values.tobytes() == truth[name].tobytes(), name
        checkpoint.finish()


def test_masters_are_not_rounded(zero_dir):
    with ZeroCheckpoint.open(zero_dir / "z2_bf16") as checkpoint:
        master = checkpoint.read("wide.weight")
    assert not np.array_equal(master, bf16_to_fp32(fp32_to_bf16(master)))


@pytest.mark.parametrize("case", ["z2_nofrozen", "z2_bf16", "z1_bf16"])
def test_frozen_weights_that_were_excluded_are_a_note(zero_dir, case):
    """conversion-trials 1, P11; ZeRO-1 records them nowhere else than in its module."""
    with ZeroCheckpoint.open(zero_dir / case) as source:
        is_noted = any("exclude_frozen_parameters" in note for note in source.notes)
    assert is_noted == (case == "z2_nofrozen")


def test_tag_folder_and_latest_file(zero_copy):
    folder = zero_copy("z2_bf16")
    expected = read_all(folder)
    (folder.parent / "latest").write_text("zero")
    assert read_all(folder.parent) == expected
    (folder.parent / "latest").write_text("global_step7")
    with pytest.raises(UserError, match="global_step7"):
        ZeroCheckpoint.open(folder.parent)


# -- faults: each must be refused with the file's name --------------------------------------------


def swap(folder, first, second):
    a, b = (folder / first).read_bytes(), (folder / second).read_bytes()
    (folder / first).write_bytes(b)
    (folder / second).write_bytes(a)


def truncate(folder, name):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) * 2 // 3])


def from_other(zero_dir, other, folder, name):
    (folder / name).write_bytes((zero_dir / other / "zero" / name).read_bytes())


def refused(folder, *words):
    with pytest.raises(UserError) as caught:
        read_all(folder)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "case, name",
    [
        ("z2_bf16", OPTIM.format(1)),
        ("z2_bf16", OPTIM.format(0)),
        ("z3_bf16", OPTIM.format(1)),
        ("z3_bf16", MODEL3.format(1)),
    ],
)
def test_missing_rank_file(zero_copy, case, name):
    folder = zero_copy(case)
    (folder / name).unlink()
    refused(folder, "optim_states" if "optim" in name else "model_states", str(folder), "rank")


def test_missing_model_or_all_optimizer_files(zero_copy):
    folder = zero_copy("z2_bf16")
    model = (folder / MODEL).read_bytes()
    (folder / MODEL).unlink()
    refused(folder, MODEL)
    (folder / MODEL).write_bytes(model)
    for rank in (0, 1):
        (folder / OPTIM.format(rank)).unlink()
    refused(folder, "optim_states", "ZeRO-2")


@pytest.mark.parametrize("case", ["z2_bf16", "z3_bf16"])
def test_extra_rank_file(zero_copy, case):
    folder = zero_copy(case)
    (folder / OPTIM.format(2)).write_bytes((folder / OPTIM.format(0)).read_bytes())
    refused(folder, OPTIM.format(2))


@pytest.mark.parametrize(
    "case, name", [("z1_bf16", OPTIM.format(1)), ("z3_bf16", MODEL3.format(0)), ("z2_bf16", MODEL)]
)
@pytest.mark.parametrize(
    "damage", [truncate, lambda folder, name: (folder / name).write_bytes(b"")]
)
def test_truncated_and_empty(zero_copy, case, name, damage):
    folder = zero_copy(case)
    damage(folder, name)
    refused(folder, name)


@pytest.mark.parametrize(
    "case, pattern",
    [("z2_bf16", OPTIM), ("z3_bf16", OPTIM), ("z3_bf16", MODEL3), ("z1_bf16opt", OPTIM)],
)
def test_swapped_rank_files(zero_copy, case, pattern):
    folder = zero_copy(case)
    swap(folder, pattern.format(0), pattern.format(1))
    refused(folder, pattern.format(0), "swapped")


@pytest.mark.parametrize(
    "case, later, name",
    [
        ("z2_bf16", "z2_later", OPTIM.format(1)),
        ("z2_bf16", "z2_later", MODEL),
        ("z3_bf16", "z3_later", OPTIM.format(0)),
        ("z3_bf16", "z3_later", MODEL3.format(1)),
    ],
)
def test_mixed_steps(zero_dir, zero_copy, case, later, name):
    folder = zero_copy(case)
    from_other(zero_dir, later, folder, name)
    refused(folder, "_states.pt", "same save")


@pytest.mark.parametrize("case, later", [("z2_bf16", "z2_later"), ("z3_bf16", "z3_later")])
def test_all_optimizer_files_of_a_later_step(zero_dir, zero_copy, case, later):
    """Every optimizer file agrees with every other; the step count of the model files tells
    (trials 1, BAD 6).
    """
    folder = zero_copy(case)
    for rank in (0, 1):
        from_other(zero_dir, later, folder, OPTIM.format(rank))
    refused(folder, "optimizer step 4", "is at 2", "same save")


def test_all_optimizer_files_of_an_earlier_step(zero_dir, zero_copy):
    """As if the optimizer had been started anew: only the weights in the model file tell."""
    folder = zero_copy("z2_later")
    for rank in (0, 1):
        from_other(zero_dir, "z2_bf16", folder, OPTIM.format(rank))
    refused(folder, "master", MODEL, "same save")


def test_an_optimizer_behind_its_model_is_a_note(zero_dir, zero_copy):
    folder = zero_copy("z3_later")
    for rank in (0, 1):
        from_other(zero_dir, "z3_bf16", folder, OPTIM.format(rank))
    with open_source(folder).weights as source:
        assert any("made 2 steps" in note and "counts 4" in note for note in source.notes), (
            source.notes
        )


@pytest.mark.parametrize(
    "name, word",
    [
        ("mp_rank_01_model_states.pt", "mp_rank 1"),
        ("layer_00-model_00-model_states.pt", "pipeline"),
    ],
)
def test_model_parallel_is_refused(zero_copy, name, word):
    folder = zero_copy("z2_bf16")
    (folder / name).write_bytes((folder / MODEL).read_bytes())
    refused(folder, name, word)


def test_world_size_that_disagrees(zero_copy):
    """The files of one rank alone, as if the run had been of world size 1: partition_count is 2,
    one file.
    """
    folder = zero_copy("z3_bf16")
    (folder / OPTIM.format(1)).unlink()
    (folder / MODEL3.format(1)).unlink()
    refused(folder, "rank(s) 1")


@pytest.mark.parametrize("case", ["z0_bf16", "z2_bf16", "z3_bf16"])
def test_any_flipped_bit_is_refused_or_harmless(zero_copy, case):
    """Bits flipped all over the files: refused with the file's name, or the very same weights."""
    folder = zero_copy(case)
    expected = read_all(folder)
    chooser = random.Random(11)
    files = sorted(folder.glob("*_states.pt"))
    num_refused = 0
    for _ in range(60):
        path = chooser.choice(files)
        data = path.read_bytes()
        place = chooser.randrange(len(data))
        path.write_bytes(
            data[:place] + bytes([data[place] ^ (1 << chooser.randrange(8))]) + data[place + 1 :]
        )
        try:
            assert read_all(folder) == expected, (path.name, place)
        except UserError as error:
            num_refused += 1
            assert path.name in str(error) or str(folder) in str(error)
        path.write_bytes(data)
    assert num_refused > 5


def test_every_byte_of_a_weight_is_guarded(zero_copy):
    folder = zero_copy("z3_bf16")
    path = folder / OPTIM.format(0)
    with ZeroCheckpoint.open(folder) as checkpoint:
        part = checkpoint.parts["wide.weight"][0]
        place = part.file.records[f"data/{part.ref.key}"].start + 4 * part.start + 1
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))
    with ZeroCheckpoint.open(folder) as checkpoint, pytest.raises(UserError, match="CRC"):
        checkpoint.read("wide.weight")


def test_nonfinite_weights(zero_dir, tmp_path):
    """A NaN in a master, with the zip's CRC made right again: the sums are fine, the weight is
    not.
    """
    folder = tmp_path / "zero"
    folder.mkdir()
    for path in (zero_dir / "z3_bf16" / "zero").glob("*_states.pt"):
        (folder / path.name).write_bytes(path.read_bytes())
    with ZeroCheckpoint.open(folder) as checkpoint:
        part = checkpoint.parts["wide.weight"][0]
        key, start = part.ref.key, 4 * part.start
        intact = checkpoint.read("wide.weight")
    path = folder / OPTIM.format(0)
    with zipfile.ZipFile(path) as archive:
        entries = [(info, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for info, data in entries:
            if info.filename.endswith(f"/data/{key}"):
                data = data[:start] + np.float32("nan").tobytes() + data[start + 4 :]
            archive.writestr(info.filename, data)
    with ZeroCheckpoint.open(folder) as checkpoint, pytest.raises(UserError, match="wide.weight"):
        checkpoint.read("wide.weight")
    with ZeroCheckpoint.open(folder, ReadOptions(allow_nonfinite=True)) as checkpoint:
        values = checkpoint.read("wide.weight")
    assert np.isnan(values.reshape(-1)[0]) and np.array_equal(
        values.reshape(-1)[1:], intact.reshape(-1)[1:]
    )


UNIVERSAL_CASES = ("z2_bf16", "z3_bf16")
CODE = """
import sys
from deepspeed.checkpoint import ds_to_universal
source, out, cases = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
for case in cases:
    sys.argv = ["x", "--input_folder", f"{source}/{case}/zero", "--output_folder", f"{out}/{case}/universal",
                "--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    ds_to_universal.main(ds_to_universal.parse_arguments())
"""  # noqa: E501


@pytest.fixture(scope="module")
def universal_dir(zero_dir, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("universal")
    command = [sys.executable, "-c", CODE, str(zero_dir), str(out), ",".join(UNIVERSAL_CASES)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.parametrize("case", UNIVERSAL_CASES)
def test_weights_frozen_and_buffers(zero_dir, universal_dir, case):
    truth = np.load(zero_dir / case / "truth.npz")
    index = json.loads((zero_dir / case / "truth.json").read_text())
    with (
        ZeroCheckpoint.open(universal_dir / case / "universal") as universal,
        ZeroCheckpoint.open(zero_dir / case) as source,
    ):
        assert list(universal.tensors.values()) == list(source.tensors.values())
        assert universal.step == source.step and universal.stage == source.stage
        for name, expected in index.items():
            assert universal.tensors[name].dtype == expected["dtype"]
            assert universal.read(name).tobytes() == truth[name].tobytes(), name
        universal.finish()


@pytest.mark.parametrize("case", UNIVERSAL_CASES)
def test_moments(zero_dir, universal_dir, case):
    with (
        open_training_state(universal_dir / case / "universal") as universal,
        open_training_state(zero_dir / case) as source,
    ):
        assert universal.has_moments
        for name in source.names:
            count = int(np.prod(source.shape(name)))
            if source.kind(name) == "trainable":
                for what in ("weight", "exp_avg", "exp_avg_sq"):
                    expected = source.read(name, what, 0, count)
                    assert np.array_equal(universal.read(name, what, 0, count), expected), (
                        name,
                        what,
                    )


@pytest.mark.parametrize("gone", ["fp32.pt", "exp_avg_sq.pt"])
def test_a_missing_state_is_named(universal_dir, tmp_path, gone):
    folder = tmp_path / "universal"
    shutil.copytree(universal_dir / "z2_bf16" / "universal", folder)
    (folder / "zero" / "wide.weight" / gone).unlink()
    with pytest.raises(UserError, match=gone) as caught:
        open_training_state(folder)
    assert "wide.weight" in str(caught.value)


# -- our own writer -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written_dir(zero_dir, tmp_path_factory) -> Path:
    """The same checkpoints, and others that DeepSpeed's tool gets wrong, through `mmldlm convert
    --to universal`.
    """
    out = tmp_path_factory.mktemp("written")
    for case in (*UNIVERSAL_CASES, "z1_bf16opt", "z2_robin", "z3_subgroups"):
        convert_state(zero_dir / case, out / case, "universal")
    return out


@pytest.mark.parametrize("case", UNIVERSAL_CASES)
def test_writes_what_ds_to_universal_writes(zero_dir, universal_dir, written_dir, case):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    theirs, ours = universal_dir / case / "universal", written_dir / case / "universal"
    names = sorted(path.relative_to(theirs) for path in theirs.rglob("*.pt"))
    assert names == sorted(path.relative_to(ours) for path in ours.rglob("*.pt"))
    for name in names:
        if name.name.endswith("model_states.pt"):
            assert (ours / name).read_bytes() == (theirs / name).read_bytes()
        elif name.name != "optimizer_state.pt":
            expected = torch.load(theirs / name, weights_only=True)
            found = torch.load(ours / name, weights_only=True, mmap=True)
            if name.parent.name == "head.weight":
                # Theirs is the tied weight rounded to bf16, ours the master.
                expected = {
                    "param": torch.load(theirs / "zero" / "embed.weight" / "fp32.pt")["param"]
                }
            pairs = (
                zip(expected.items(), found.items())
                if isinstance(expected, dict)
                else [((0, expected), (0, found))]
            )
            for (key, one), (other_key, two) in pairs:
                assert key == other_key
                assert (
                    torch.equal(one, two) and one.shape == two.shape
                    if torch.is_tensor(one)
                    else one == two
                ), name
    # DeepSpeed's own file.
    known = torch.load(theirs / "zero" / "optimizer_state.pt", weights_only=False)
    state = torch.load(ours / "zero" / "optimizer_state.pt", weights_only=True)
    assert state["param_groups"] == known["param_groups"] and state["ds_version"]
    if case.startswith("z3"):
        assert state["optimizer_state_dict"]["state"][0]["step"] == 2
    assert (written_dir / case / "latest_universal").read_text() == "universal"


@pytest.mark.parametrize("case", [*UNIVERSAL_CASES, "z1_bf16opt", "z2_robin", "z3_subgroups"])
def test_written_state_reads_back(zero_dir, written_dir, case):
    with (
        open_training_state(written_dir / case / "universal") as written,
        open_training_state(zero_dir / case) as source,
    ):
        assert set(written.names) == set(source.names)
        for name in source.names:
            assert written.kind(name) == source.kind(name)
            if source.kind(name) != "trainable":
                assert (
                    written.read_tensor(name)[0].tobytes() == source.read_tensor(name)[0].tobytes()
                )
                continue
            count = int(np.prod(source.shape(name)))
            for what in ("weight", "exp_avg", "exp_avg_sq"):
                expected = source.read(name, what, 0, count)
                assert np.array_equal(written.read(name, what, 0, count), expected), (name, what)


@pytest.mark.parametrize(
    "case, word", [("z0_fp32", "trained"), ("z2_step0", "stepped"), ("z2_elastic", "elastic")]
)
def test_sources_that_cannot_become_universal(zero_dir, tmp_path, case, word):
    with pytest.raises(UserError, match=word):
        convert_state(zero_dir / case, tmp_path / "out", "universal")
    assert not list(tmp_path.iterdir())


def test_a_flipped_bit_in_the_optimizer_is_refused(zero_copy, tmp_path):
    folder = zero_copy("z3_bf16")
    with ZeroCheckpoint.open(folder, ReadOptions(with_moments=True)) as source:
        part = source.moments["exp_avg_sq"]["wide.weight"][0]
        place = part.file.position_of(part.ref, part.start)
    data = bytearray(part.file.path.read_bytes())
    data[place] ^= 1
    part.file.path.write_bytes(data)
    with pytest.raises(UserError, match=part.file.path.name):
        convert_state(folder, tmp_path / "out", "universal")


def test_torch_reads_every_dtype_and_shape_we_write(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensors = {
        "matrix": torch.arange(6.0).reshape(2, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "half": torch.tensor([1.5, -2.0], dtype=torch.float16),
        "low": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "large": torch.tensor([2**60 + 1, -(2**60)]),
    }
    value = {"plain": [1, -300, 2**70, 0.5, "ü", None, True, (1, ("a",))], 3: {}}
    for name, tensor in tensors.items():
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        dtype = str(tensor.dtype).removeprefix("torch.")
        elements = raw.view(DTYPES[dtype].raw)
        value[name] = TensorSpec(dtype, tuple(tensor.shape), [elements[:1], elements[1:]])
    path = tmp_path / "file.pt"
    write_torch(path, value)
    for mmap in (False, True):
        read = torch.load(path, weights_only=True, mmap=mmap)
        assert read["plain"] == value["plain"] and read[3] == {}
        for name, tensor in tensors.items():
            assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name
    with ModelFile.open(path) as source:
        assert source.read("matrix").tobytes() == tensors["matrix"].numpy().tobytes()
    with pytest.raises(TypeError, match="set"):
        write_torch(tmp_path / "other.pt", {1})


def test_records_beyond_4_gib(tmp_path):
    """Headers and directory of a file whose tensors were never written: 5 GiB of a sparse file,
    then one behind it.
    """
    torch = pytest.importorskip("torch", reason="torch is not installed")
    large, behind = TensorSpec("float32", (1280 << 20,)), TensorSpec("float32", (3,))
    layout = TorchFileLayout({"large": large, "behind": behind}, "file")
    values = np.arange(3, dtype=np.float32)
    with open(tmp_path / "file.pt", "wb") as file:
        file.truncate(layout.size)
        for record, data in [*layout.small, (layout.records[1], values.tobytes())]:
            record.written.add(0, data)
            file.seek(record.start)
            file.write(data)
        layout.records[0].written._runs = {large.nbytes: (0, 7)}
        for place, data in layout.headers():
            file.seek(place)
            file.write(data)
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        entry = archive.getinfo("file/data/0")
        assert (entry.file_size, entry.CRC) == (large.nbytes, 7)
        assert archive.read("file/data/1") == values.tobytes()
    state = torch.load(tmp_path / "file.pt", weights_only=True, mmap=True)
    assert state["large"].shape == large.shape and state["behind"].tolist() == [0, 1, 2]
    with ModelFile.open(tmp_path / "file.pt") as source:
        assert source.tensors["large"].shape == large.shape and source.read("behind").tolist() == [
            0,
            1,
            2,
        ]
