"""studies/speedrun/speedrun.py: its search for the shortest length, what it counts, and its
short form.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from studies.speedrun import speedrun
from studies.speedrun.recipes import Result
from tests.support.helpers import LONG, ROOT, launch

WORSE = Result(
    1,
    9,
    nelbo=5.0,
    gain=0.5,
    error=0.5,
    cosine=0.6,
    model_flops=1.0,
    optimizer_flops=0.5,
    cpu_seconds=1.0,
)
TARGET = (4.18, 1.15, 0.746)  # nats at most, nats and cosine at least


@pytest.mark.parametrize("first", [30, 260, 333, 520, 521, 1200, 1300])
def test_the_search_finds_the_first_length_that_holds_the_target(monkeypatch, first):
    lengths = []

    def fake_run(recipe, store, folder, steps):
        lengths.append(steps)
        good = {"nelbo": 4.1, "gain": 1.2, "cosine": 0.75} if steps >= first else {}
        return replace(WORSE, steps=steps, **good)

    monkeypatch.setattr(speedrun, "run", fake_run)
    _, found = speedrun.shortest(None, "", Path(), TARGET, 364, 1300)
    assert first <= found.steps <= 1.04 * first + 1
    assert len(lengths) == len(set(lengths)) <= 16


def test_a_recipe_that_never_holds_the_target(monkeypatch):
    monkeypatch.setattr(
        speedrun, "run", lambda recipe, store, folder, steps: replace(WORSE, steps=steps)
    )
    last, found = speedrun.shortest(None, "", Path(), TARGET, 364, 1300)
    assert found is None and last.steps == 1300


@pytest.mark.parametrize("change", [{"nelbo": 4.19}, {"gain": 1.14}, {"cosine": 0.7454}])
def test_every_figure_of_the_target_counts(change):
    good = replace(WORSE, nelbo=4.18, gain=1.15, cosine=0.7455)
    assert speedrun.holds(good, TARGET) and not speedrun.holds(replace(good, **change), TARGET)


@LONG
def test_quick_continues_from_finished_runs(store, tmp_path, monkeypatch):
    report = tmp_path / "report.json"
    words = [
        "--quick",
        "--data",
        str(store),
        "--out",
        str(tmp_path / "out"),
        "--json",
        str(report),
    ]
    command = [sys.executable, str(ROOT / "studies" / "speedrun" / "speedrun.py"), *words]
    done = launch(command, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]
    answer = json.loads(report.read_text())
    assert {claim["id"] for claim in answer["claims"]} == {
        "flops_to_target_ratio", "nelbo_at_reference_flops_nats", "gain_at_reference_flops_nats",
    }  # fmt: skip
    reference = answer["conditions"]["runs"]["reference"]
    num_validation = json.loads((Path(store) / "manifest.json").read_text())["splits"][
        "validation"
    ]["num_samples"]
    assert reference["samples"] == num_validation  # more than an evaluation in training takes
    assert (
        reference["steps"] == 4
        and reference["model_flops"] > 30 * reference["optimizer_flops"] > 0
    )
    results = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("result.json")}
    monkeypatch.setattr(sys, "argv", command[1:])
    assert len(results) == 3 and speedrun.main() == 0
    assert results == {
        path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("result.json")
    }
