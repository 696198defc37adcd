"""The output folder of a preparation."""

from __future__ import annotations

import json

import pytest

from mmldlm.data.prepare.options import PrepareOptions
from mmldlm.data.prepare.work_dir import check_output_free
from mmldlm.errors import UserError


def test_a_finished_store_of_other_options_says_which(tmp_path):
    plan = {
        "options": PrepareOptions("", "a.txt", max_tokens=30).identity(),
        "corpus": {},
        "inputs": {"file a.txt": "3 bytes"},
    }
    (tmp_path / "manifest.json").write_text(
        json.dumps({"options": PrepareOptions("", "a.txt").identity()})
    )
    with pytest.raises(UserError, match="a store of other options: --max-tokens was 62, now 30"):
        check_output_free(tmp_path, False, plan)
    for inputs, found in (
        (
            {"inputs": {"file a.txt": "2 bytes"}},
            "have changed: .*file a.txt was 2 bytes, now 3 bytes",
        ),
        ({"inputs": plan["inputs"]}, "have changed: .*the order or the captions"),
        ({}, "does not name the files it read"),
    ):
        (tmp_path / "manifest.json").write_text(json.dumps({"options": plan["options"], **inputs}))
        with pytest.raises(UserError, match=found):
            check_output_free(tmp_path, False, plan)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="a folder that is not a store"):
        check_output_free(tmp_path, False, plan)
