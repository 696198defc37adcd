"""Leftovers of earlier runs, on facts written by hand."""

from __future__ import annotations

import subprocess
import sys

from mmldlm.preflight.check import PASS, WARN
from mmldlm.preflight.checks.processes import processes
from tests.support.helpers import ROOT
from tests.support.preflight_context import make_context, run


def test_another_users_rank_is_not_to_be_killed():
    entry = {"pid": 7, "user": "eve", "age": 9, "command": "python mmldlm/train.py"}
    (own, other) = (
        run("PROC001", make_context(processes=[{**entry, "own": own}]))["a"]
        for own in (True, False)
    )
    assert "kill 7" in own.fix and "kill" not in other.fix and "ask eve" in other.fix


def test_leftover_ranks_of_a_users_own_script_are_seen():
    wrapper = ROOT / "mmldlm" / "launch" / "rank_wrapper.py"
    # The wrapper as a launch starts it, without what it needs: it ends by itself at once.
    code = "import sys; sys.stdout.write('here'); sys.stdout.flush(); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(wrapper), "an-id", "train.py"]
    rank = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        rank.stdout.read(4)
        assert rank.pid in [entry["pid"] for entry in processes({})]
    finally:
        rank.communicate()


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
