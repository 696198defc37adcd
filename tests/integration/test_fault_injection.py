"""benchmarks/fault_injection.py on two real ranks: every engine once, half of them with
accumulation.

With MMLDLM_ALL_FAULTS=1 all 204 cells."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests.support.helpers import ROOT, launch

pytestmark = pytest.mark.long


def test_no_fault_reaches_the_weights_hangs_a_rank_or_goes_unnamed(store, tmp_path):
    report = tmp_path / "report.json"
    script = str(ROOT / "benchmarks" / "fault_injection.py")
    words = [] if os.environ.get("MMLDLM_ALL_FAULTS") else ["--quick"]
    done = launch(
        [sys.executable, script, "--data", str(store), *words, "--json", str(report)], timeout=1800
    )
    assert done.returncode == 0, done.stdout[-6000:]
    answer = json.loads(report.read_text())
    left_out = len(answer["conditions"]["left_out"])  # what only root may do
    assert answer["conditions"]["cells"] == (
        6 * 11 + 2 + 2 * (4 - left_out) if words else 6 * 2 * (17 - left_out)
    )
    assert (answer["claims"][0]["id"], answer["claims"][0]["value"]) == ("cells_failed", 0)
