"""Array files whose headers lie are refused before any memory is asked for."""

import contextlib
import io
import os

import numpy as np
import pytest

from mmldlm.data.arrays import (
    UnreadableArrayError,
    map_array,
    read_array,
    read_npz,
    write_npz,
)
from mmldlm.data.store import Store
from mmldlm.errors import UserError


def content(shape, dtype="<f4", num_bytes=32) -> bytes:
    buffer = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue() + bytes(num_bytes)


@pytest.mark.parametrize(
    "raw",
    [
        content((9999999999999,)),
        content((1 << 62, 1 << 62)),
        content((-8,)),
        content((7,)),
        content((9,)),
        content((0, 1 << 70), num_bytes=0),
        content((8,), "|O"),
        content((8,))[:50],
        b"\x93NUMPY\x01\x00\xff\x7f" + b"(" * 0x7FFF,
        content((8,)).replace(b"(", b"\n").replace(b", }", b";))"),
        b"",
    ],
)
@pytest.mark.parametrize("read", [read_array, map_array])
def test_a_header_is_not_trusted(read, raw, tmp_path):
    (tmp_path / "x.npy").write_bytes(raw)
    with pytest.raises((UnreadableArrayError, ValueError)):
        read(tmp_path / "x.npy")


def test_good_arrays_are_read(tmp_path):
    fortran, empty = np.asfortranarray(np.ones((3, 2), np.float16)), np.ones((0, 4))
    for array in (np.arange(6.0).reshape(2, 3), fortran, empty, np.arange(3, dtype=">f4")):
        np.save(tmp_path / "x.npy", array)
        found = read_array(tmp_path / "x.npy")
        assert found.dtype == array.dtype and np.array_equal(found, array)


def test_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.npy")
    with pytest.raises(OSError, match="a FIFO"):
        read_array(tmp_path / "x.npy")


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [("latents", (1 << 50, 384), "<f4"), ("tokens", (1 << 60,), "<i4"), ("latents", None, "<i4")],
)
def test_a_store_whose_arrays_lie_is_refused(store_copy, name, shape, dtype):
    path = store_copy / "train" / f"{name}.npy"
    array, size = np.load(path), path.stat().st_size
    head = content(array.shape if shape is None else shape, dtype, 0)
    path.write_bytes(head + path.read_bytes()[len(head) :])
    assert path.stat().st_size == size  # so the sizes of the manifest are met
    with pytest.raises(UserError, match=f"{name}.*npy"):
        Store(store_copy)


@pytest.mark.parametrize("at", [b"PK\x01\x02", b"PK\x03\x04"])
def test_a_damaged_archive_is_named(tmp_path, at):
    write_npz(tmp_path / "x.npz", values=np.arange(3))
    raw = (tmp_path / "x.npz").read_bytes()
    method = raw.index(at) + (10 if at == b"PK\x01\x02" else 8)
    (tmp_path / "x.npz").write_bytes(raw[:method] + b"\x63" + raw[method + 1 :])
    with contextlib.suppress(UserError):
        read_npz(tmp_path / "x.npz", "values")
    with pytest.raises(UserError, match="x.npz"):
        read_npz(tmp_path / "x.npz", "other")
