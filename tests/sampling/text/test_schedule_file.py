"""Schedules of passes in a file: the same back, and a clear error for every damage."""

from __future__ import annotations

import json

import pytest

from mmldlm.errors import UserError
from mmldlm.sampling.text.schedule_file import read_schedules, schedules_of, write_schedules
from mmldlm.sampling.text.strategies.schedule import names_passes, read_schedule

SCHEDULES = {5: {1: [5], 2: [1, 4], 3: [1, 1, 3]}, 12: {2: [3, 9]}}


def test_written_schedules_are_read_back(tmp_path):
    path = tmp_path / "new" / "schedule.json"
    write_schedules(path, SCHEDULES, "runs/a")
    assert read_schedules(path) == SCHEDULES
    assert json.loads(path.read_text())["model"] == "runs/a"
    assert schedules_of(SCHEDULES, 2) == {5: [1, 4], 12: [3, 9]}
    # What needs no file: everything at once, and one position a pass.
    assert schedules_of(SCHEDULES, 1) == {5: [5], 12: [12]}
    assert schedules_of(SCHEDULES, 12) == {5: [1] * 5, 12: [1] * 12}


def test_the_option_reads_every_form(tmp_path):
    path, plain = tmp_path / "schedule.json", tmp_path / "plain.json"
    write_schedules(path, SCHEDULES, "runs/a")
    plain.write_text('{"5": [1, 4]}')
    assert names_passes(str(path)) and not names_passes(str(plain)) and not names_passes("1,4")
    assert read_schedule(str(path), 2) == {5: [1, 4], 12: [3, 9]}
    assert read_schedule(str(plain)) == {5: [1, 4]} and read_schedule("1,4") == [1, 4]


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


@pytest.mark.parametrize("passes", [None, 3, 4])
def test_a_missing_number_of_passes_names_those_that_exist(passes):
    with pytest.raises(UserError, match="--num-steps") as error:
        schedules_of(SCHEDULES, passes)
    assert "1, 2, 3" in str(error.value)
