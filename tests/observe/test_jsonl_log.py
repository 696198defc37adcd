import json
import math

import numpy as np
import pytest

from mmldlm.observe.jsonl_log import JsonlLog, iterate_records, parse_line
from mmldlm.utils.json_files import to_strict_json


def read_records(path):
    """All records of a log, and the number of lines that are none."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    records = list(iterate_records(path))
    return records, len(lines) - len(records)


def write(path, steps):
    with JsonlLog(path) as log:
        for step in steps:
            log.write({"step": step, "loss": step / 2})


def test_every_line_is_strict_json_and_nonfinite_values_say_why(tmp_path):
    path = tmp_path / "run" / "training_log.jsonl"
    with JsonlLog(path) as log:
        log.write(
            {"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": -math.inf, "skipped": True}
        )
        log.write(
            {
                "step": 2,
                "loss": np.float32(0.5),
                "by_mode": {"l2t": math.nan},
                "ranks": [1.0, math.inf],
            }
        )

    def refuse(word):
        raise AssertionError(f"{word} in a log that is to be strict JSON")

    first, second = (
        json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()
    )
    assert (first["loss"], first["grad_norm"], first["lr"]) == (None, None, None)
    assert (first["loss_nonfinite"], first["grad_norm_nonfinite"], first["lr_nonfinite"]) == (
        "nan",
        "inf",
        "-inf",
    )
    assert first["skipped"] is True and "T" in first["time"]
    assert second["loss"] == 0.5 and "loss_nonfinite" not in second
    assert second["by_mode"] == {"l2t": None, "l2t_nonfinite": "nan"}
    assert second["ranks"] == [1.0, None] and second["ranks_nonfinite"] == [None, "inf"]


def test_torch_scalars_become_numbers():
    torch = pytest.importorskip("torch")
    record = to_strict_json(
        {
            "loss": torch.tensor(float("nan")),
            "tokens": torch.tensor(7),
            "bf16": torch.tensor(1.5).bfloat16(),
        }
    )
    assert record == {"loss": None, "loss_nonfinite": "nan", "tokens": 7, "bf16": 1.5}


def test_a_value_json_cannot_hold_is_logged_as_its_text(tmp_path):
    path = tmp_path / "log.jsonl"
    with JsonlLog(path) as log:
        log.write({"step": 1})
        log.write({"step": 2, "what": {1, 2}, "path": tmp_path, "huge": 10**5000})
        log.write({"step": 3})
    records, unreadable = read_records(path)
    assert [record["step"] for record in records] == [1, 2, 3] and unreadable == 0
    assert records[1]["what"] == [1, 2] and records[1]["path"] == str(tmp_path)


def test_a_line_is_readable_before_the_log_is_closed(tmp_path):
    path = tmp_path / "log.jsonl"
    log = JsonlLog(path)
    log.write({"step": 1})
    assert read_records(path)[0][0]["step"] == 1
    log.close()


def test_resume_moves_later_steps_aside_and_loses_none(tmp_path):
    path = tmp_path / "training_log.jsonl"
    write(path, range(1, 11))
    before = path.read_text()
    with JsonlLog(path, resume_step=6) as log:
        log.write({"step": 7, "loss": 0.0})
    assert [record["step"] for record in read_records(path)[0]] == [1, 2, 3, 4, 5, 6, 7]
    dropped = tmp_path / "training_log.dropped-1.jsonl"
    kept = "".join(path.read_text().splitlines(keepends=True)[:6])
    assert kept + dropped.read_text() == before

    with JsonlLog(path, resume_step=2):
        pass
    assert len(read_records(tmp_path / "training_log.dropped-2.jsonl")[0]) == 5
    assert len(read_records(dropped)[0]) == 4, "the first side file was overwritten"


def test_resume_at_the_end_touches_nothing(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, range(1, 4))
    before = path.read_bytes()
    JsonlLog(path, resume_step=3).close()
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3, "loss": 1.5}', "\x00\x00\x00"])
def test_a_half_written_last_line_does_not_spoil_the_next(tmp_path, torn):
    path = tmp_path / "log.jsonl"
    write(path, [1, 2])
    with open(path, "a", encoding="utf-8") as file:
        file.write(torn)
    with JsonlLog(path) as log:
        log.write({"step": 3})
    records, unreadable = read_records(path)
    assert [record["step"] for record in records] == [1, 2, 3] and unreadable == 0
    assert torn in (tmp_path / "log.dropped-1.jsonl").read_text()


def test_records_without_a_step_stay(tmp_path):
    path = tmp_path / "events.jsonl"
    with JsonlLog(path) as log:
        log.write({"event": "start"})
        log.write({"event": "save", "step": 5})
    with JsonlLog(path, resume_step=0):
        pass
    assert [record["event"] for record in read_records(path)[0]] == ["start"]


@pytest.mark.parametrize("line", ["", "{", "[1]", '{"loss": NaN}', '{"loss": -Infinity}', "7"])
def test_only_strict_objects_are_records(line):
    assert parse_line(line) is None
