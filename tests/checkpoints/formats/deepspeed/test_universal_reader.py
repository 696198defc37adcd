"""Universal checkpoints: those of DeepSpeed's own tool are read right, and ours are what DeepSpeed
loads.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from mmldlm.checkpoints.formats.deepspeed.reader import ZeroCheckpoint
from mmldlm.checkpoints.formats.dtypes import DTYPES
from mmldlm.checkpoints.formats.model_pt.reader import ModelFile
from mmldlm.checkpoints.formats.torch_save.pickler import TensorSpec
from mmldlm.checkpoints.formats.torch_save.writer import TorchFileLayout, write_torch
from mmldlm.checkpoints.resume_reader import open_training_state
from mmldlm.convert.to_checkpoint import convert_state
from mmldlm.errors import UserError
from tests.support.helpers import environment

CASES = ("z2_bf16", "z3_bf16")
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
    command = [sys.executable, "-c", CODE, str(zero_dir), str(out), ",".join(CASES)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.parametrize("case", CASES)
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


@pytest.mark.parametrize("case", CASES)
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


# -- our own writer
# -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written_dir(zero_dir, tmp_path_factory) -> Path:
    """The same checkpoints, and others that DeepSpeed's tool gets wrong, through `mmldlm convert
    --to universal`.
    """
    out = tmp_path_factory.mktemp("written")
    for case in (*CASES, "z1_bf16opt", "z2_robin", "z3_subgroups"):
        convert_state(zero_dir / case, out / case, "universal")
    return out


@pytest.mark.parametrize("case", CASES)
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
            if (
                name.parent.name == "head.weight"
            ):  # theirs is the tied weight rounded to bf16, ours the master
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
    known = torch.load(
        theirs / "zero" / "optimizer_state.pt", weights_only=False
    )  # DeepSpeed's own file
    state = torch.load(ours / "zero" / "optimizer_state.pt", weights_only=True)
    assert state["param_groups"] == known["param_groups"] and state["ds_version"]
    if case.startswith("z3"):
        assert state["optimizer_state_dict"]["state"][0]["step"] == 2
    assert (written_dir / case / "latest_universal").read_text() == "universal"


@pytest.mark.parametrize("case", [*CASES, "z1_bf16opt", "z2_robin", "z3_subgroups"])
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
    with ZeroCheckpoint.open(folder, with_moments=True) as source:
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
