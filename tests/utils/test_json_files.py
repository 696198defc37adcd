import json
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from mmldlm.utils.json_files import nonfinite_places, to_json, to_strict_json

VALUES = [
    (float("nan"), "nan"),
    (float("-inf"), "-inf"),
    (np.float32("inf"), "inf"),
    (np.float16(0.5), 0.5),
    (np.int64(3), 3),
    (np.bool_(True), True),
    (torch.tensor(2.0), 2.0),
    (np.array([[1.0, np.nan]]), [[1.0, "nan"]]),
    ({"b", "a"}, ["a", "b"]),
    (frozenset({2}), [2]),
    ((1, None, False), [1, None, False]),
    (10**30, hex(10**30)),
    (1 << 63, 1 << 63),
    (16**5000, hex(16**5000)),
    (Path("a/b"), "a/b"),
    (b"\xff", "\\xff"),
    (datetime(2026, 1, 2), "2026-01-02 00:00:00"),
    (1 + 2j, "(1+2j)"),
    (
        {1: [{2.5: float("nan")}], None: 0, False: 1},
        {"1": [{"2.5": "nan"}], "null": 0, "false": 1},
    ),
]


@pytest.mark.parametrize(
    ("value", "expected"), VALUES, ids=lambda value: str(type(value).__name__)
)
def test_any_value_is_strict_json(value, expected):
    assert json.loads(to_json({"value": value}), parse_constant=pytest.fail) == {"value": expected}
    if isinstance(value, (set, bytes, np.ndarray)) or expected != "nan":
        json.dumps(
            to_strict_json({"value": value, "list": [value], "deep": [[value]]}), allow_nan=False
        )


def test_a_name_that_is_not_utf8_stays_the_same(tmp_path):
    from mmldlm.utils.atomic_files import write_json

    write_json(tmp_path / "f", {"name": "caf\udce9"})
    assert json.loads((tmp_path / "f").read_text(encoding="utf-8")) == {"name": "caf\udce9"}


def test_places_of_figures_that_are_not_finite():
    report = {
        "model": {"nelbo": float("nan"), "se": 0.1},
        "claims": [{"value": 1.0}, {"value": float("inf")}],
    }
    assert nonfinite_places(report) == ["model.nelbo", "claims.1.value"]
