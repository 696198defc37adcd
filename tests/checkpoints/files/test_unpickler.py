"""The restricted pickle reader: what torch saves is described, everything else is refused and
nothing runs.

Lengths in pickles are held against their size; what picklers write passes.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections import OrderedDict

import numpy as np
import pytest

from mmldlm.checkpoints.files import unpickler
from mmldlm.checkpoints.files.unpickler import (
    OpaqueObject,
    RefusedPickle,
    TensorRef,
    check_lengths,
    read_pickle,
)
from mmldlm.checkpoints.formats.model_pt import ModelFile
from mmldlm.errors import UserError


class Runs:
    """Pickles into a call."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def torch_zip(path, pickled: bytes, **records: bytes):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{path.stem}/data.pkl", pickled)
        archive.writestr(f"{path.stem}/byteorder", b"little")
        for key, data in records.items():
            archive.writestr(f"{path.stem}/data/{key}", data)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_code_is_refused_by_name_and_never_runs(tmp_path, protocol):
    mark = tmp_path / "ran"
    hostile = pickle.dumps({"module": Runs(os.system, f"touch {mark}")}, protocol=protocol)
    with pytest.raises(RefusedPickle, match="system"):
        read_pickle(hostile)
    path = tmp_path / "model.pt"
    torch_zip(path, hostile)
    with pytest.raises(UserError, match="model.pt"):
        ModelFile.open(path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "code",
    [
        b"cbuiltins\neval\n(X\x05\x00\x00\x001+1+1tR.",
        b"cbuiltins\ngetattr\n(ccollections\nOrderedDict\nX\x08\x00\x00\x00fromkeystR.",
        b"\x80\x04\x8c\x08builtins\x8c\x04exec\x93.",
        # BUILD on a table entry
        b"ctorch\nFloatStorage\n}X\x05\x00\x00\x00dtypeX\x05\x00\x00\x00int64sb.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(N}X\x0c\x00\x00\x00__defaults__)st\x62.",
        b"garbage",
        b"",
        b"(" * 100,
    ],
)
def test_tricks_are_refused(code):
    before = {
        key: repr(getattr(value, "dtype", value)) for key, value in unpickler._GLOBALS.items()
    }
    with pytest.raises(RefusedPickle):
        read_pickle(code)
    assert before == {
        key: repr(getattr(value, "dtype", value)) for key, value in unpickler._GLOBALS.items()
    }


@pytest.mark.parametrize(
    "code",
    [
        b"cbuiltins\ngetattr\n(cpathlib\nPosixPath\nX\x03\x00\x00\x00mrotR.",
        b"cbuiltins\ngetattr\n(cdeepspeed.runtime.zero.config\nZeroStageEnum\nX\x03\x00\x00\x00mrotR.",
        b"ccollections\nOrderedDict.fromkeys\n(X\x01\x00\x00\x00atR.",
        b"ctorch._utils\n__builtins__\n.",
        b"cmmldlm.checkpoints.formats.torch_save.unpickler\nread_pickle\n(C\x02N.tR.",
        b"cfunctools\npartial\n(cbuiltins\nprint\ntRX\x01\x00\x00\x00a\x85R.",
        b"ccopyreg\n_reconstructor\n(cmy.module\nConfig\ncbuiltins\nobject\nNtR}X\x01\x00\x00\x00aK\x01sb.",
    ],
)
def test_other_names_are_inert(code):
    """conversion-trials P1: objects of a trainer's own classes lie beside the weights."""
    foreign = set()
    try:
        value = read_pickle(code, foreign)
    except RefusedPickle:  # an inert object is not callable
        return
    assert isinstance(value, OpaqueObject) or issubclass(value, OpaqueObject)


STORAGE = (
    b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
)
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K\x00(K\x02t(K\x01ttR"


@pytest.mark.parametrize(
    "value", [STORAGE, TENSOR, b"ctorch\nfloat32\n", b"ctorch._utils\n_rebuild_parameter\n"]
)
@pytest.mark.parametrize(
    "state",
    [b"}X\x05\x00\x00\x00dtypeX\x05\x00\x00\x00int64s", b"N}\x86", b"](X\x01\x00\x00\x00ae"],
)
def test_no_attribute_can_be_set(value, state):
    """BUILD on descriptions: dataclasses must not get a __setstate__ that obeys it."""
    assert read_pickle(b"\x80\x02" + value + b".") is not None
    with pytest.raises(RefusedPickle, match="modify the reader"):
        read_pickle(b"\x80\x02" + value + state + b"b.")


def test_objects_that_checkpoints_carry_are_inert():
    import argparse
    import pathlib

    value = {
        "args": argparse.Namespace(lr=1),
        "set": {1, 2},
        "scalar": np.float64(3),
        "path": pathlib.PurePosixPath("a"),
        "order": OrderedDict(a=1),
    }
    read = read_pickle(pickle.dumps(value, protocol=2))
    assert set(read) == set(value) and read["order"] == {"a": 1}
    assert read["args"].kind == "argparse.Namespace"


def test_torch_tensors_of_every_form(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed: nothing to save")
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = OrderedDict(
        scalar=torch.tensor(3.5),
        empty=torch.zeros(0, 3),
        transposed=base.t(),
        view=base[1:3],
        half=torch.tensor([1.5, -2.0], dtype=torch.float16),
        bf16=torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        bits=torch.tensor([True, False, True]),
        big=torch.tensor([2**60 + 1, -(2**60)]),
        u16=torch.tensor([1, 65535], dtype=torch.uint16),
        fp8=torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        fp8_scale=torch.tensor([1.0, 2.0]).to(torch.float8_e8m0fnu),
        parameter=torch.nn.Parameter(torch.ones(3)),
        complex=torch.polar(torch.ones(3), torch.arange(3.0)),
        negative=torch.polar(torch.ones(3, 2), torch.arange(6.0).reshape(3, 2)).conj().imag,
        conjugate=torch.polar(torch.ones(3), torch.arange(3.0)).conj(),
        half_negative=torch._neg_view(torch.tensor([1.5, -0.0]).bfloat16()),
    )
    state["attributed"] = torch.nn.Parameter(torch.ones(2))
    state["attributed"].tensor_model_parallel = True
    state["negated_view"] = torch._neg_view(state["view"])
    state["tied"] = state["view"]
    torch.save(state, tmp_path / "model.pt")
    with ModelFile.open(tmp_path / "model.pt") as source:
        assert list(source.tensors) == list(state)
        assert source.tensors["tied"].alias_of == "view"
        for name, tensor in state.items():
            info = source.tensors[name]
            assert info.shape == tuple(tensor.shape) and f"torch.{info.dtype}" == str(
                tensor.dtype
            ), name
            raw = (
                tensor.detach()
                .resolve_conj()
                .resolve_neg()
                .contiguous()
                .reshape(-1)
                .view(torch.uint8)
                .numpy()
                .tobytes()
            )
            assert source.read(name).tobytes() == raw, name
        source.finish()


def test_impossible_tensors_are_refused(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed: nothing to save")
    path = tmp_path / "model.pt"
    torch.save({"w": torch.ones(4, 4)}, path)
    with zipfile.ZipFile(path) as archive:
        names = {info.filename: archive.read(info) for info in archive.infolist()}
    short = {name: data[:-4] if name.endswith("data/0") else data for name, data in names.items()}
    for broken in (
        short,
        {name: data for name, data in names.items() if not name.endswith("data/0")},
    ):
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in broken.items():
                archive.writestr(name, data)
        with pytest.raises(UserError, match="model.pt"):
            ModelFile.open(path)


def test_old_torch_format_is_named(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed: nothing to save")
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match="old format"):
        ModelFile.open(tmp_path / "model.pt")


def test_negative_sizes_are_refused():
    with pytest.raises(RefusedPickle):
        unpickler._tensor(unpickler.StorageRef("float32", "0", 4), -1, (2,), (1,))
    assert TensorRef("float32", (2, 3), (1, 2), "0", 0, 6).extent == 6


def test_members_of_enums_as_the_python_of_debian_12_pickles_them():
    """Python 3.11.2 writes getattr(class, name): no ZeRO checkpoint could be resumed or converted
    there.
    """
    stage = b"cdeepspeed.runtime.zero.config\nZeroStageEnum\n"
    by_name = read_pickle(b"cbuiltins\ngetattr\n(" + stage + b"X\x09\x00\x00\x00gradientstR.")
    by_value = read_pickle(stage + b"(K\x02tR.")
    assert (by_name.kind, by_name.args) == (by_value.kind, by_value.args)
    old = read_pickle(b"c__builtin__\ngetattr\n(" + stage + b"X\x07\x00\x00\x00weightstR.")
    assert old.args == (3,)


VALUE = {
    "a": [
        1,
        2.5,
        "x" * 300,
        b"y" * 70_000,
        (1, 2),
        10**40,
        2**3000,
        None,
        True,
        {1},
        frozenset([2]),
        bytearray(9),
    ],
    "many": {number: str(number) for number in range(3000)},
    "é\n\\": print,
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_picklers_write(protocol):
    data = pickle.dumps(VALUE, protocol)
    check_lengths(data)
    for end in (1, len(data) // 2, len(data) - 1):
        with pytest.raises(ValueError):
            check_lengths(data[:end])


@pytest.mark.parametrize(
    "data",
    [
        b"}r\xff\xff\xff\x7f.",
        b"}p2147483647\n.",
        b"p" + b"9" * 40 + b"\n.",
        b"\x8e" + bytes(7) + b"\x01.",
        b"B\xff\xff\xff\x7f.",
        b"\x96" + bytes(6) + b"\x01\0.",
        b"\x8b\xff\xff\xff\x7f.",
        b"T\xff\xff\xff\xff.",
        b"",
        b"}",
        b"\xfe.",
        b"cmodule\nname",
    ],
)
def test_claims_without_bytes(data):
    with pytest.raises(ValueError):
        check_lengths(data)
