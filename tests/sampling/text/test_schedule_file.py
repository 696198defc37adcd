"""Schedules of passes in a file: the same back, and a clear error for every damage."""

from __future__ import annotations

import json

import pytest

from mmldlm.errors import UserError
from mmldlm.sampling.text.schedule_file import read_schedules, schedule_for, write_schedules

SCHEDULES = {5: {1: [5], 2: [1, 4], 3: [1, 1, 3]}, 12: {2: [3, 9]}}


def test_written_schedules_are_read_back(tmp_path):
    path = tmp_path / "new" / "schedule.json"
    write_schedules(path, SCHEDULES, "runs/a")
    assert read_schedules(path) == SCHEDULES
    assert json.loads(path.read_text())["model"] == "runs/a"
    assert schedule_for(SCHEDULES, 5, 3) == [1, 1, 3]
    # What needs no file: everything at once, and one position a pass.
    assert schedule_for(SCHEDULES, 7, 1) == [7] and schedule_for(SCHEDULES, 7, 7) == [1] * 7
    assert schedule_for(SCHEDULES, 5, 90) == [1] * 5


@pytest.mark.parametrize(
    "text",
    [
        '{"version": 2, "schedules": {}}',
        '{"version": 1}',
        '{"version": 1, "schedules": {"5": {"2": [2, 2]}}}',  # fills 4 of 5
        '{"version": 1, "schedules": {"5": {"3": [2, 3]}}}',  # 2 passes
        '{"version": 1, "schedules": {"5": {"2": [0, 5]}}}',
        '{"version": 1, "schedules": {"5": {"2": [1.5, 3.5]}}}',
        '{"version": 1, "schedules": {"5": [5]}}',
        '{"version": 1, "schedules": {"x": {"1": [5]}}}',
        "[]",
    ],
)
def test_damaged_files_are_refused(tmp_path, text):
    path = tmp_path / "schedule.json"
    path.write_text(text)
    with pytest.raises(UserError, match="schedule"):
        read_schedules(path)


@pytest.mark.parametrize(("length", "passes", "known"), [(6, 2, "5 to 12"), (12, 4, "2 passes")])
def test_a_missing_schedule_names_those_that_exist(length, passes, known):
    with pytest.raises(UserError) as error:
        schedule_for(SCHEDULES, length, passes)
    assert known in str(error.value)
