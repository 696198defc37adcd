"""Records of skipped steps: read back with types and bounds."""

from __future__ import annotations

import json
import math
import os

import pytest

from mmldlm.errors import UserError
from mmldlm.stability import skipped_steps
from mmldlm.stability.skipped_steps import load_skipped_step, save_skipped_step
from tests.trials.test_run_records import WRONG_RECORDS

CASE = {
    "step": 3,
    "reason": "non-finite loss (NaN)",
    "loss": math.nan,
    "grad_norm": math.inf,
    "epoch": 0,
    "batch_in_epoch": 2,
    "global_batch": 8,
    "world_size": 2,
    "accum": 1,
    "dtype": "bf16",
    "loss_scale": 1.0,
    "lr_scale": 0.5,
    "passed_over": [[1, 2]],
    "config": {"task": "translation"},
    "micro_batches": [{"rank": 1, "host": "a", "micro": 0, "loss": -math.inf, "ids": [5, 6]}],
}


def test_what_was_written_is_read(tmp_path):
    save_skipped_step(tmp_path, CASE)
    (tmp_path / "forensics" / "step_abc.json").write_text("{}")
    found = load_skipped_step(tmp_path, "last")
    assert math.isnan(found.pop("loss")) and found["grad_norm"] == math.inf and found["epoch"] == 0
    assert found["micro_batches"] == CASE["micro_batches"] and found["passed_over"] == [(1, 2)]
    assert {key: found[key] for key in ("dtype", "config", "lr_scale")} == {
        key: CASE[key] for key in ("dtype", "config", "lr_scale")
    }


def test_the_newest_records_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(skipped_steps, "MAX_RECORDS", 3)
    for age, step in enumerate((5, 9, 100_000_000, 7, 8)):  # a rollback before the last two
        path = save_skipped_step(tmp_path, CASE | {"step": step})
        os.utime(path, (age, age))
    found = {path.name for path in (tmp_path / "forensics").iterdir()}
    assert found == {f"step_{step}.json" for step in ("100000000", "00000007", "00000008")}


def test_the_last_skip_is_not_the_highest_step_after_a_rollback(tmp_path):
    steps = (101, 120, 81, 90)
    for step in steps:
        save_skipped_step(tmp_path, CASE | {"step": step})
    assert load_skipped_step(tmp_path, "last")["step"] == 120  # without a log
    lines = [{"event": "skip", "step": step} for step in (*steps, 95)]  # that of 95 is not there
    lines += [{"event": "save", "step": 101}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert load_skipped_step(tmp_path, "last")["step"] == 90


@pytest.mark.parametrize(
    "key, value",
    [
        ("step", 4),
        ("step", "x"),
        ("world_size", 0),
        ("world_size", 1),
        ("accum", 10**30),
        ("micro_batches", []),
        ("micro_batches", {}),
        ("micro_batches", [{"rank": 0}]),
        ("config", []),
        ("dtype", "fp8"),
        ("lr_scale", "x"),
        ("loss_scale", 0),
        ("passed_over", [[1]]),
        ("loss", "high"),
        ("reason", None),
    ],
)
def test_wrong_values_are_named(key, value, tmp_path):
    """trials-3 BAD 13."""
    (tmp_path / "forensics").mkdir()
    micro_batches = [CASE["micro_batches"][0] | {"loss": 1.0}]
    case = json.dumps(
        CASE | {"loss": "nan", "grad_norm": "inf", "micro_batches": micro_batches} | {key: value}
    )
    (tmp_path / "forensics" / "step_00000003.json").write_text(case)
    with pytest.raises(UserError, match=r"step_00000003.json(.|\n)*damaged file: "):
        load_skipped_step(tmp_path, "3")


@pytest.mark.parametrize("kind", WRONG_RECORDS)
def test_damaged_files_are_named(kind, tmp_path):
    """trials-3 BAD 13."""
    (tmp_path / "forensics").mkdir()
    path = tmp_path / "forensics" / "step_00000003.json"
    path.write_text(WRONG_RECORDS[kind], errors="surrogateescape")
    with pytest.raises(UserError, match="step_00000003.json"):
        load_skipped_step(tmp_path, "3")
