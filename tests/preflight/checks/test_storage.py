"""Stores and folders on facts written by hand."""

from __future__ import annotations

import hashlib
import json

import pytest

from mmldlm.preflight.check import FAIL, PASS
from mmldlm.preflight.checks import storage
from mmldlm.tasks.registry import build_config
from tests.support.preflight_context import make_context, run


def test_a_hung_probe_fails_on_its_node():
    context = make_context(
        checkpoints={
            "folder": "/x",
            "free": 1 << 40,
            "free_inodes": None,
            "file_system": "nfs",
            "bytes_per_second": 1e9,
        }
    )
    context.facts["b"]["checkpoints"] = {"error": "no answer within 15 s", "timeout": True}
    found = run("CKPT001", context)
    assert (
        found["b"].status == FAIL and "hangs on b" in found["b"].fix and found["a"].status == PASS
    )


def write_store(root, byte: bytes):
    (root / "train").mkdir(parents=True)
    (root / "train" / "tokens.npy").write_bytes(byte * 1000)
    entry = {"bytes": 1000, "sha256": hashlib.sha256(byte * 1000).hexdigest()}
    (root / "manifest.json").write_text(json.dumps({"files": {"train/tokens.npy": entry}}))


def test_every_store_of_a_mixture_is_checked(tmp_path):
    """As the probe finds them: one gone from a node, one cut short, one with another byte."""
    stores = [tmp_path / "one", tmp_path / "two"]
    for store, byte in zip(stores, (b"1", b"2")):
        write_store(store, byte)
    roots = [str(store) for store in stores]
    sound = storage.data({"data_roots": roots})
    path = stores[1] / "train" / "tokens.npy"
    path.write_bytes(b"2" * 999)
    short = storage.data({"data_roots": roots})
    path.write_bytes(b"2" * 999 + b"3")
    other = storage.data({"data_roots": roots})
    path.write_bytes(b"2" * 1000)
    context = make_context(data={"a": sound, "b": short, "c": other})
    context.config = build_config({"data": {"mixture": {roots[0]: 1.0, roots[1]: 2.0}}})
    present, same = run("DATA002", context), run("DATA003", context)
    assert [present[name].status for name in "abc"] == [PASS, FAIL, PASS]
    assert [same[name].status for name in "abc"] == [PASS, FAIL, FAIL]
    for result in (present["b"], same["c"]):
        assert (
            f"{roots[1]}/train/tokens.npy" in result.measured and roots[0] not in result.measured
        )

    stores[0].rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError) as gone:
        storage.data({"data_roots": roots})
    (tmp_path / "elsewhere").rename(stores[0])
    context.facts["b"]["data"] = {"error": str(gone.value)}
    result = run("DATA002", context)["b"]
    assert result.status == FAIL and roots[0] in result.measured and "to b," in result.fix


def test_a_single_store_is_named_by_its_own_files(tmp_path):
    write_store(tmp_path / "one", b"1")
    found = storage.data({"data_roots": [str(tmp_path / "one")]})
    assert set(found["files"]) == {"train/tokens.npy"}
    context = make_context(data=found)
    context.config = build_config({"data": {"latent_data_root": str(tmp_path / "one")}})
    assert {result.status for result in run("DATA003", context).values()} == {PASS}


def test_a_node_that_read_more_in_time_than_the_others_has_the_same_data():
    """Of a large store a fast disk reads blocks that slow ones do not reach."""
    few = {"manifest_sha256": ["x"], "bytes_total": 1 << 40, "bytes_read": 1, "files": {}}
    few["files"] = {"a": {"bytes": 1, "blocks": "0"}, "b": {"bytes": 1}}
    both = {**few, "files": {name: {"bytes": 1, "blocks": "0"} for name in "ab"}}
    context = make_context(data={"a": few, "b": few, "c": both})
    context.config = build_config({"data": {"latent_data_root": "absent"}})
    assert {result.status for result in run("DATA003", context).values()} == {PASS}
    other = {**few, "files": {"a": {"bytes": 1, "blocks": "1"}, "b": {"bytes": 1}}}
    context = make_context(data={"a": few, "b": other, "c": both})
    context.config = build_config({"data": {"latent_data_root": "absent"}})
    assert [run("DATA003", context)[name].status for name in "abc"] == [PASS, FAIL, PASS]
