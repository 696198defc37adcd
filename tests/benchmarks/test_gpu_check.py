"""The form of launchers/gpu_check.sh on tiny models: one JSON and one page, continued where it
stopped.
"""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.helpers import ROOT


def check(out, data, *words):
    command = [sys.executable, "benchmarks/_gpu_check.py", "--device", "cpu", "--out", str(out)]
    command += ["--data", str(data), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def report(out):
    return json.loads((out / "gpu_check.json").read_text(encoding="utf-8"))


def test_a_check_goes_on_where_an_earlier_call_stopped(store, tmp_path):
    first = check(tmp_path, store, "--parts", "environment", "sizes", "--minutes", "1")
    assert first.returncode == 3 and "sizes: left for another call" in first.stdout
    assert list(report(tmp_path)["parts"]) == ["environment"]
    second = check(tmp_path, store, "--parts", "environment", "sizes", "--minutes", "8")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "environment: ended well in an earlier call" in second.stdout
    (row,) = report(tmp_path)["parts"]["sizes"]["rows"]
    assert row["preset"] == "tiny" and row["tokens_per_second"] > 0 and row["loss"] > 0
    page = (tmp_path / "gpu_check.html").read_text(encoding="utf-8")
    assert "tokens per second" in page and "http://" not in page and "https://" not in page


def test_a_part_that_fails_is_told_and_ends_no_other(tmp_path):
    done = check(tmp_path, tmp_path / "no store", "--parts", "sizes", "environment")
    assert done.returncode == 1
    parts = report(tmp_path)["parts"]
    assert parts["sizes"]["verdict"] == "failed" and "no store" in parts["sizes"]["error"]
    assert parts["environment"]["verdict"] == "ended well"
