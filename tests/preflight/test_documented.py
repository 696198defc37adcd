"""docs/preflight.md lists every check, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from mmldlm.preflight import checks
from mmldlm.preflight.check import all_checks

DOC = Path(__file__).resolve().parents[2] / "docs" / "preflight.md"


def test_the_table_lists_every_check_with_its_level():
    rows = re.findall(r"^\| ([A-Z]+\d{3}) \| (\d) \|", DOC.read_text(), re.M)
    assert rows == [(check.id, str(check.level)) for check in all_checks()]


def test_every_file_of_checks_is_listed():
    files = {path.stem for path in Path(checks.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == set(checks.MODULES)
