"""benchmarks/fault_injection.py on two real ranks: every engine and every fault, half of them with
accumulation.

With MMLDLM_ALL_FAULTS=1 all 204 cells."""

from __future__ import annotations

import json
import os

import fault_injection
import pytest
from _injected_faults import ENGINES, FAULTS, ROLLED_BACK, SKIPPED

from tests.support.helpers import launch_benchmark

pytestmark = pytest.mark.long


def test_no_fault_reaches_the_weights_hangs_a_rank_or_goes_unnamed(store, tmp_path):
    report = tmp_path / "report.json"
    words = [] if os.environ.get("MMLDLM_ALL_FAULTS") else ["--quick"]
    done = launch_benchmark(
        "fault_injection.py", "--data", store, *words, "--json", report, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-6000:]
    answer = json.loads(report.read_text())
    left_out = set(answer["conditions"]["left_out"])  # what only root may do
    cells = fault_injection.cells_of(quick=bool(words))
    expected = sum(len(set(faults) - left_out) for _, _, faults in cells)
    assert answer["conditions"]["cells"] == expected
    assert (answer["claims"][0]["id"], answer["claims"][0]["value"]) == ("cells_failed", 0)


def test_the_short_form_has_every_engine_and_every_fault():
    full, quick = (fault_injection.cells_of(quick) for quick in (False, True))
    assert sum(len(faults) for _, _, faults in full) == 204
    for cells in (full, quick):
        assert {engine for engine, _, _ in cells} == set(ENGINES)
        assert {fault for _, _, faults in cells for fault in faults} == set(FAULTS)
    for engine, _, faults in quick:
        assert {SKIPPED, ROLLED_BACK} <= {FAULTS[fault][0] for fault in faults}, engine
