"""benchmarks/trainers.py and benchmarks/soak.py in short forms: what they claim besides times and
memory.
"""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.support.helpers import LONG, launch_benchmark

pytestmark = pytest.mark.long


def claims_of(name: str, tmp_path, *words: str, codes=(0,)) -> dict[str, dict]:
    report = tmp_path / "report.json"
    done = launch_benchmark(name, *words, "--json", report)
    assert done.returncode in codes, done.stdout[-4000:]
    if done.returncode:
        return {}
    return {claim["id"]: claim for claim in json.loads(report.read_text())["claims"]}


def test_four_trainers_have_the_same_losses(tmp_path):
    if importlib.util.find_spec("accelerate") is None:
        assert claims_of("trainers.py", tmp_path, "--quick", codes=(3,)) == {}
        pytest.skip("accelerate (the extra `bench`) is not installed; the script said so")
    claims = claims_of("trainers.py", tmp_path, "--quick")
    assert claims["trainers_loss_difference"]["value"] <= 1e-5
    assert {"mmldlm_over_bare_deepspeed", "hf_trainer_over_mmldlm"} <= set(claims)


@LONG
def test_a_stopped_and_killed_run_logs_every_step_once(store, tmp_path):
    words = ("--data", str(store), "--quick", "--steps", "40", "--engines", "zero2")
    claims = claims_of("soak.py", tmp_path, *words)
    for name in ("open_files_growth", "threads_growth", "steps_not_logged_once"):
        assert claims[name]["value"] == 0
    names = {"rss_growth_mib_per_10k_steps", "heap_growth_mib_per_10k_steps", "step_time_drift"}
    assert names <= set(claims)
