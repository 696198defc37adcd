"""docs/preflight.md lists every check, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from mmldlm.preflight.check import all_checks

DOC = Path(__file__).resolve().parents[2] / "docs" / "preflight.md"


def test_the_table_lists_every_check_with_its_level():
    rows = re.findall(r"^\| ([A-Z]+\d{3}) \| (\d) \|", DOC.read_text(), re.M)
    assert rows == [(check.id, str(check.level)) for check in all_checks()]
