"""benchmarks/scale.py in its short form."""

from __future__ import annotations

import json
import sys

from tests.support.helpers import LONG, ROOT, launch


@LONG
def test_costs_are_printed_with_their_laws(tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "scale.py"), "--quick"]
    done = launch([*command, "--json", str(report)], timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]
    claims = {claim["id"]: claim for claim in json.loads(report.read_text())["claims"]}
    assert set(claims) == {
        "batch_ms_1024_ranks_accum_32",
        "slowest_rank0_step_seconds_1024",
        "resume_files_opened_per_rank_1024",
        "lengths_bytes_per_sample_and_node",
        "plan_seconds_1e9_samples",
        "plan_mib_1e9_samples",
        "preflight_head_cpu_seconds_1024_nodes",
        "preflight_head_mib_1024_nodes",
        "longest_line_of_the_report",
        "answer_bytes_about_1024_names",
        "plot_mib_per_gib_of_log",
    }
    assert sum("n^" in line for line in done.stdout.splitlines()) == 33
    assert "8B, fsdp, 1,024 ranks: 31.4 GiB (derived)" in done.stdout
