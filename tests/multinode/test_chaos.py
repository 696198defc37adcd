"""The short chaos run, and its evaluation, which must detect problems."""

from __future__ import annotations

import json
import random
import sys
from types import SimpleNamespace

import pytest

from tests.support.helpers import ROOT, launch
from tests.support.virtual_cluster import reason_to_skip

sys.path.insert(0, str(ROOT / "benchmarks"))

import chaos  # noqa: E402
from _chaos_faults import CONTINUES, ENDED, FAULTS, RETRIED, Struck  # noqa: E402
from _chaos_run import End, Training  # noqa: E402


def test_six_faults_leave_the_run_as_if_undisturbed(store, tmp_path):
    if reason := reason_to_skip():
        pytest.skip(reason)
    words = [
        "--quick",
        "--data",
        str(store),
        "--json",
        str(tmp_path / "report.json"),
        "--keep",
        str(tmp_path / "keep"),
    ]
    done = launch([sys.executable, str(ROOT / "benchmarks" / "chaos.py"), *words], timeout=1200)
    assert done.returncode == 0, done.stdout[-6000:]
    report = json.loads((tmp_path / "report.json").read_text())
    claims = {claim["id"]: claim for claim in report["claims"]}
    assert claims["faults_struck"]["value"] >= 6
    for name in (
        "runs_ended_wrongly",
        "hangs",
        "steps_lost_beyond_promise",
        "final_loss_rel_diff_to_undisturbed",
    ):
        assert claims[name]["value"] == 0, done.stdout
    assert {fault["kind"] for fault in report["conditions"]["faults"]} == {
        *chaos.QUICK,
        "interrupted",
    }


# -- its evaluation -------------------------------------------------------------------------------


class Scene(Training):
    """A training whose screen and logs the test writes."""

    def __init__(self, folder):
        super().__init__(None, None, folder)
        self.run_dir.mkdir(parents=True)
        self.launches = [SimpleNamespace(lines=[], ends=[], code=lambda: None)]

    def write(self, name: str, *records: dict) -> None:
        with open(self.run_dir / name, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


def evaluate(scene, struck: Struck, *lines: str, ends: tuple[End, ...] = ()) -> list[str]:
    """Return the problems found with these lines and ends after a fault."""
    chaos_run = chaos.Chaos(scene, random.Random(0), None)
    row, before = chaos.Row(1, 0.0, "kind", chaos.TRAINING, 0), chaos.Snapshot.of(scene)
    scene.launch.lines.extend(lines)
    scene.launch.ends.extend(ends)
    chaos_run.evaluate(struck, before, row)
    return row.problems


KILLED = Struck("rank on n2", RETRIED, (137,), ("rank 1 on n2 ended first, with status 137",))


def test_an_end_with_the_right_code_and_reason_is_right(scene):
    reason = "rank 1 on n2 ended first, with status 137 (signal 9)"
    assert (
        evaluate(
            scene,
            KILLED,
            f"ended: {reason} (exit 137)",
            "attempt 2 of 5",
            ends=(End(reason, 137),),
        )
        == []
    )


@pytest.mark.parametrize(
    ("struck", "lines", "ends", "expected"),
    [
        (Struck("agent", CONTINUES), (), (End("n2 is lost: timed out", 1),), "ended: n2 is lost"),
        (
            KILLED,
            ("ended: rank 0 on n1 ended first",),
            (End("rank 0 on n1 ended first", 1),),
            "exit 1, not 137",
        ),
        (
            KILLED,
            ("ended: rank 0 on n1 ended first",),
            (End("rank 0 on n1 ended first", 137),),
            "the screen does not",
        ),
        (KILLED, (*KILLED.words,), (End("rank 1", 137), End("rank 0", 1)), "ended again: rank 0"),
        (
            KILLED,
            (*KILLED.words, "Traceback (most recent call last):"),
            (End("rank 1", 137),),
            "a traceback",
        ),
        (Struck("head", ENDED, (5,)), ("attempt 2 of 5",), (End("rank 1", 5),), "started again"),
    ],
)
def test_what_ends_wrongly_is_seen(scene, struck, lines, ends, expected):
    assert any(expected in problem for problem in evaluate(scene, struck, *lines, ends=ends))


def test_a_run_that_does_not_move_is_a_hang_and_is_started_again(scene, monkeypatch):
    monkeypatch.setattr(chaos, "IDLE_LIMIT", 0.3)
    monkeypatch.setattr(chaos, "START_LIMIT", 0.1)
    done = []
    for name in ("kill", "start"):
        monkeypatch.setattr(scene, name, lambda name=name: done.append(name))
    monkeypatch.setattr(scene, "ranks", lambda: 0)
    chaos_run, row = (
        chaos.Chaos(scene, random.Random(0), None),
        chaos.Row(1, 0.0, "kind", chaos.TRAINING, 0),
    )
    chaos_run.wait_for_recovery(
        Struck("agent", CONTINUES), chaos.Snapshot.of(scene), row, then_start=False
    )
    assert row.hang and done == ["kill", "start"] and "nothing moved" in row.problems[0]


def test_a_launch_that_goes_away_without_a_reason_is_a_problem(scene, monkeypatch):
    scene.launch.code = lambda: 1
    monkeypatch.setattr(scene, "ranks", lambda: 0)
    monkeypatch.setattr(scene, "start", lambda: None)
    chaos_run, row = (
        chaos.Chaos(scene, random.Random(0), None),
        chaos.Row(1, 0.0, "kind", chaos.TRAINING, 0),
    )
    chaos_run.restart(Struck("agent", CONTINUES), row)
    assert row.problems == ["the launch ended with 1 after 0 of 5 attempts"]


@pytest.mark.parametrize(
    ("graceful", "lost", "problems"), [(False, 40, 0), (False, 41, 1), (True, 0, 0), (True, 1, 1)]
)
def test_steps_that_are_lost_beyond_the_promise_are_counted(scene, graceful, lost, problems):
    """Two times save_freq after a crash; none after a signal."""
    chaos_run, row = (
        chaos.Chaos(scene, random.Random(0), None),
        chaos.Row(1, 0.0, "kind", chaos.TRAINING, 0),
    )
    scene.write("events.jsonl", {"event": "start", "step": 0, "time": chaos.iso(1000)})
    scene.write("events.jsonl", {"event": "save", "step": 20, "time": chaos.iso(1010)})
    scene.write("events.jsonl", {"event": "resume", "step": 20, "time": chaos.iso(1100)})
    if lost:
        scene.write("training_log.dropped-1.jsonl", *({"step": 21 + n} for n in range(lost)))
    chaos_run.strikes.append((1050, graceful))
    chaos_run.count_lost_steps(row)
    assert (
        row.steps_lost == lost
        and len(row.problems) == problems
        and chaos_run.excess_lost_steps == problems
    )


def test_a_step_that_differs_from_the_undisturbed_run_is_seen(scene, tmp_path, monkeypatch):
    monkeypatch.setattr(
        chaos.subprocess,
        "run",
        lambda *a, **k: SimpleNamespace(returncode=0, stdout="", stderr=""),
    )
    other = tmp_path / "undisturbed"
    other.mkdir()
    records = [{"step": step, "loss": 2.0 + step, "lr": 0.1} for step in (1, 2, 3)]
    (other / "training_log.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    scene.write("training_log.jsonl", *records)
    assert chaos.compare(scene, other) == (0.0, [])
    scene.write("training_log.dropped-1.jsonl", {"step": 3, "loss": 5.000001, "lr": 0.1})
    worst, problems = chaos.compare(scene, other)
    assert 0 < worst < 1e-6 and problems == ["loss of step 3 differs"]


def test_every_kind_comes_up_and_the_plan_is_that_of_its_seed():
    kinds = tuple(fault.kind for fault in FAULTS)
    plans = []
    for _ in range(2):
        plan = chaos.choose(random.Random(3), kinds)
        plans.append([next(plan) for _ in range(2 * len(FAULTS))])
    assert plans[0] == plans[1]
    assert {fault.kind for fault, _ in plans[0][: len(FAULTS)]} == set(kinds)
    assert all(moment in fault.moments for fault, moment in plans[0])


def test_nan_lies_where_a_start_does_not_look(store, tmp_path):
    import numpy as np
    from _chaos_store import plant_nan

    from mmldlm.data.run_data import ROWS_CHECKED
    from mmldlm.data.store import Store, check_latents

    folder, bad = plant_nan(store, tmp_path, random.Random(1))
    train = Store(folder, "train")
    for _, block in train.latent_blocks(ROWS_CHECKED):
        check_latents(block, "here")
    latents = np.load(folder / "train" / "latents.npy", mmap_mode="r")
    assert len(bad) > 100 and set(np.flatnonzero(np.isnan(latents[:, 3]))) == set(bad)
    assert train.text(len(Store(store, "train")) + 2) == Store(store, "train").text(2)
