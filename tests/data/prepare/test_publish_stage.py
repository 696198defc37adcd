"""The output folder of a preparation."""

from __future__ import annotations

import json

import pytest

from mmldlm.data.prepare.options import PrepareOptions
from mmldlm.data.prepare.publish_stage import check_output_free
from mmldlm.errors import UserError


def test_a_finished_store_of_other_options_says_which(tmp_path):
    plan = {"options": PrepareOptions("", "a.txt", max_tokens=30).identity(), "corpus": {}}
    (tmp_path / "manifest.json").write_text(json.dumps({"options": PrepareOptions("", "a.txt").identity()}))
    with pytest.raises(UserError, match="a store of other options: --max-tokens was 62, now 30"):
        check_output_free(tmp_path, False, plan)
    (tmp_path / "manifest.json").write_text(json.dumps({"options": plan["options"]}))
    with pytest.raises(UserError, match="corpus files have changed"):
        check_output_free(tmp_path, False, plan)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="a folder that is not a store"):
        check_output_free(tmp_path, False, plan)
