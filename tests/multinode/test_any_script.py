"""A training script that knows nothing of mmldlm on real hosts, through DeepSpeed's launcher."""

from __future__ import annotations

import sys

import pytest

from tests.support.helpers import LONG, ROOT
from tests.support.short_run import NODES

SCRIPT = str(ROOT / "examples" / "any_script" / "deepspeed_loop.py")
pytestmark = pytest.mark.long


@LONG
def test_a_deepspeed_loop_trains_on_two_hosts_and_its_fault_is_named(cluster, tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text(NODES)
    command = [sys.executable, "-m", "mmldlm.cli"]
    options = ["--hostfile", hostfile, "--master_port", "29555"]

    def run(verb, *words):
        line = [*command, verb, *options, *map(str, words)]
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return cluster["n1"].run(*line, env=env, timeout=600, cwd=tmp_path)

    checked = run("preflight", "--", SCRIPT)
    assert checked.returncode == 0, checked.stdout[-3000:]
    done = run("launch", "--level", "0", "--", SCRIPT, "--steps", "3")
    assert done.returncode == 0 and "step 3: loss" in done.stdout, done.stdout[-3000:]
    died = run("launch", "--level", "0", "--", SCRIPT, "--steps", "900", "--die-at", "2")
    assert died.returncode != 0 and "rank 1 on n2 ended first" in died.stdout, died.stdout[-3000:]
    assert "a fault of this rank" in died.stdout
    words = ["--level", "0", "--heartbeat-timeout", "10", "--", SCRIPT, "--hang-at", "3"]
    hung = run("launch", *words)
    assert hung.returncode == 1 and "ended: rank 1 on n2 (pid " in hung.stdout, hung.stdout[-3000:]
    assert "no progress since step 2" in hung.stdout and "deepspeed_loop.py" in hung.stdout
