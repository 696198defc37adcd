"""The form of launchers/gpu_check.sh on tiny models: one JSON and one page, continued where it
stopped.
"""

from __future__ import annotations

import json
import sys

import _gpu_check
import pytest

from tests.support.helpers import LONG, ROOT, launch


def command(out, data, *words):
    script = str(ROOT / "benchmarks" / "_gpu_check.py")
    return [script, "--device", "cpu", "--out", str(out), "--data", str(data), *words]


@pytest.fixture
def check(monkeypatch, capsys):
    """Function that runs the check in this process; returns its exit code and what it said."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", command(*words))
        return _gpu_check.main(), capsys.readouterr().out

    return run


def report(out):
    return json.loads((out / "gpu_check.json").read_text(encoding="utf-8"))


@LONG
def test_a_check_goes_on_where_an_earlier_call_stopped(check, store, tmp_path):
    words = tmp_path, store, "--parts", "environment", "sizes", "--minutes"
    code, said = check(*words, "1")
    assert code == 3 and "sizes: left for another call" in said
    assert list(report(tmp_path)["parts"]) == ["environment"]
    second = launch([sys.executable, *command(*words, "8")], timeout=300)
    assert second.returncode == 0, second.stdout
    assert "environment: ended well in an earlier call" in second.stdout
    (row,) = report(tmp_path)["parts"]["sizes"]["rows"]
    assert row["preset"] == "tiny" and row["tokens_per_second"] > 0 and row["loss"] > 0
    page = (tmp_path / "gpu_check.html").read_text(encoding="utf-8")
    assert "tokens per second" in page and "http://" not in page and "https://" not in page


def test_a_part_that_fails_is_told_and_ends_no_other(check, tmp_path):
    code, _ = check(tmp_path, tmp_path / "no store", "--parts", "sizes", "environment")
    assert code == 1
    parts = report(tmp_path)["parts"]
    assert parts["sizes"]["verdict"] == "failed" and "no store" in parts["sizes"]["error"]
    assert parts["environment"]["verdict"] == "ended well"
