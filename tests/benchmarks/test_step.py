"""benchmarks/step.py in its short form: what it says and counts; its times are the machine's."""

from __future__ import annotations

import json
import sys

import pytest
import step
from _reference_steps import missing_peers

from tests.support.helpers import ROOT, launch


def test_the_gpu_part_growth_and_checkpointing_run_on_a_cpu(tmp_path, monkeypatch):
    """The script is ready for the day a GPU is lent; without one it claims no utilization."""

    def run(*words: str, code: int = 0) -> dict:
        path = tmp_path / "report.json"
        monkeypatch.setattr(sys, "argv", ["step.py", *words, "--json", str(path)])
        assert step.main() == code
        return json.loads(path.read_text())

    report = run("--gpu-form", "--rounds", "1")
    (row,) = report["conditions"]["gpu_rows"]
    assert (
        report["claims"] == []
        and row["mfu"] is None
        and row["tokens_per_second"] > 0
        and row["saved_gib"] > 0
    )
    report = run("--gpu-form", "--rounds", "1", "--peak-tflops", "1", code=1)
    assert report["claims"][0]["id"] == "mfu" and 0 < report["claims"][0]["value"] < 1
    report = run("--growth", "--quick")
    assert [claim["id"] for claim in report["claims"]] == ["growth_batch"]
    report = run("--checkpointing", "--quick")
    assert [row["every"] for row in report["conditions"]["checkpointing"]] == [False, 4, 2, True]


def test_quick(tmp_path):
    missing, path = missing_peers(), tmp_path / "report.json"
    script = str(ROOT / "benchmarks" / "step.py")
    words = ["--quick", "--dtypes", "fp32", "--json", str(path)]
    done = launch([sys.executable, script, *words])
    assert done.returncode == (3 if missing else 0), done.stdout[-3000:]
    report = json.loads(path.read_text())
    if missing:
        assert (
            report["claims"] == [] and report["conditions"]["skipped"] and "bench" in done.stdout
        )
        pytest.skip("the extra `bench` is not installed; the script said so")
    claims = {claim["id"]: claim for claim in report["claims"]}
    assert set(claims) == {
        "speedup_mmldlm_padded",
        "speedup_mmldlm_dense",
        "speedup_sd3_dense",
        "times_gemm",
        "step_memory_ratio_mmldlm_padded",
        "memory_model_error",
        "aten_ops_depth24",
        "saved_bytes_ratio_mmldlm",
        "saved_bytes_ratio_sd3",
        "flop_model_error",
        "image_time_per_flop",
    }
    judged = {name for name, claim in claims.items() if not claim["measured"]}
    assert judged == {
        "aten_ops_depth24",
        "saved_bytes_ratio_mmldlm",
        "saved_bytes_ratio_sd3",
        "flop_model_error",
    }
