"""Registry of the checks; docs/preflight.md lists every check, and no other."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from mmldlm.preflight import checks
from mmldlm.preflight.check import ERROR, Check, check, majority, run_check
from mmldlm.preflight.checks.config import DATA_CHECKS
from mmldlm.preflight.report import exit_code
from mmldlm.preflight.runner import CHECK_MODULES, all_checks
from tests.support.helpers import ROOT
from tests.support.preflight_context import CHECKS, make_context


def test_ids_are_unique_and_every_check_explains_itself():
    assert len(CHECKS) == len(all_checks()) >= 45
    assert all(found.function.__doc__.strip() for found in CHECKS.values())


def test_a_broken_check_is_an_error_of_the_tool():
    def breaks(context):
        """Breaks."""
        raise KeyError("facts")

    (result,) = run_check(Check("TST001", 0, "node", "t", breaks), make_context())
    assert result.status == ERROR and exit_code([result]) == 3


def test_an_id_cannot_be_taken_twice():
    with pytest.raises(AssertionError, match="taken"):

        @check("HOST001", 0, "head", "again")
        def again(context):
            """Again."""


def test_the_table_lists_every_check_with_level_and_title():
    page = (ROOT / "docs" / "preflight.md").read_text()
    rows = re.findall(r"^\| ([A-Z]+\d{3}) \| (\d) \| (.+?) \|", page, re.M)
    assert rows == [(check.id, str(check.level), check.title) for check in all_checks()]


def test_every_file_of_checks_is_listed():
    files = {path.stem for path in Path(checks.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == {module.__name__.rpartition(".")[2] for module in CHECK_MODULES}


def test_every_check_that_reads_the_data_probe_is_listed():
    """A check reads it itself or through functions of its file."""
    found = set()
    for module in CHECK_MODULES:
        functions = {
            node.name: {
                getattr(part, "attr", None) or getattr(part, "id", None) for part in ast.walk(node)
            }
            for node in ast.parse(inspect.getsource(module)).body
            if isinstance(node, ast.FunctionDef)
        }
        readers, before = {"data_facts", "data_probe_error"}, None
        while readers != before:
            before = set(readers)
            readers |= {name for name, used in functions.items() if used & before}
        found |= {
            check.id
            for check in all_checks()
            if check.function.__module__ == module.__name__ and check.function.__name__ in readers
        }
    assert found == DATA_CHECKS


def test_majority_prefers_the_first_node_of_a_tie():
    assert majority({"a": 1, "b": 2}) == 1 and majority({"a": 1, "b": 2, "c": 2}) == 2
