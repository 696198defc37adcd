"""benchmarks/sampling.py in its short form: what it says; its times are the machine's."""

from __future__ import annotations

import json
import sys

import pytest
from _reference_steps import missing_peers

from tests.support.helpers import ROOT, launch


def test_quick(tmp_path):
    report, missing = tmp_path / "report.json", missing_peers()
    words = [
        sys.executable,
        str(ROOT / "benchmarks" / "sampling.py"),
        "--quick",
        "--json",
        str(report),
    ]
    done = launch(words, timeout=240)
    assert done.returncode == (3 if missing else 0), done.stdout[-3000:]
    found = json.loads(report.read_text())
    if missing:
        assert found["claims"] == [] and found["conditions"]["skipped"] and "bench" in done.stdout
        pytest.skip("the extra `bench` is not installed; the script said so")
    claims = {claim["id"]: claim for claim in found["claims"]}
    assert set(claims) == {"sampling_speedup_mmldlm_wiring", "times_gemm_sampling"}
    assert all(claim["measured"] and claim["value"] > 0 for claim in claims.values())
    assert found["conditions"]["seconds"]["ours"] > 0 and "tokens per CPU second" in done.stdout
