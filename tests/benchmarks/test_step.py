"""benchmarks/step.py in its short form: what it says and counts; its times are the machine's."""

from __future__ import annotations

import json
import sys

import pytest
from _reference_steps import missing_peers

from tests.support.helpers import ROOT, launch


def run(tmp_path, *words: str, codes=(0,)) -> tuple[dict, str]:
    report = tmp_path / "report.json"
    done = launch(
        [sys.executable, str(ROOT / "benchmarks" / "step.py"), *words, "--json", str(report)],
        timeout=240,
    )
    assert done.returncode in codes, done.stdout[-3000:]
    return json.loads(report.read_text()), done.stdout


def test_the_gpu_part_growth_and_checkpointing_run_on_a_cpu(tmp_path):
    """The script is ready for the day a GPU is lent; without one it claims no utilization."""
    report, output = run(tmp_path, "--gpu-form", "--rounds", "1")
    (row,) = report["conditions"]["gpu_rows"]
    assert (
        report["claims"] == []
        and row["mfu"] is None
        and row["tokens_per_second"] > 0
        and row["saved_gib"] > 0
    )
    report, _ = run(tmp_path, "--gpu-form", "--rounds", "1", "--peak-tflops", "1", codes=(1,))
    assert report["claims"][0]["id"] == "mfu" and 0 < report["claims"][0]["value"] < 1
    report, _ = run(tmp_path, "--growth", "--quick")
    assert [claim["id"] for claim in report["claims"]] == ["growth_batch"]
    report, _ = run(tmp_path, "--checkpointing", "--quick")
    assert [row["every"] for row in report["conditions"]["checkpointing"]] == [False, 4, 2, True]


def test_quick(tmp_path):
    missing = missing_peers()
    report, output = run(tmp_path, "--quick", "--dtypes", "fp32", codes=(3 if missing else 0,))
    if missing:
        assert report["claims"] == [] and report["conditions"]["skipped"] and "bench" in output
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
