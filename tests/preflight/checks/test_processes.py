"""Leftovers of earlier runs, on facts written by hand."""

from __future__ import annotations

from mmldlm.preflight.check import PASS, WARN
from tests.support.preflight_context import make_context, run


def test_another_users_rank_is_not_to_be_killed():
    entry = {"pid": 7, "user": "eve", "age": 9, "command": "python mmldlm/train.py"}
    (own, other) = (
        run("PROC001", make_context(processes=[{**entry, "own": own}]))["a"]
        for own in (True, False)
    )
    assert "kill 7" in own.fix and "kill" not in other.fix and "ask eve" in other.fix


def test_a_build_cache_on_a_network_file_system_warns():
    place = {"TORCH_EXTENSIONS_DIR": {"folder": "/data/x", "file_system": "ext4"}}
    found = run(
        "JIT002",
        make_context(
            caches={
                n: place
                | (
                    {"TRITON_CACHE_DIR": {"folder": "/h", "file_system": "nfs4"}}
                    if n == "b"
                    else {}
                )
                for n in "abc"
            }
        ),
    )
    assert (
        found["b"].status == WARN
        and "TRITON_CACHE_DIR" in found["b"].fix
        and found["a"].status == PASS
    )
