"""Which tests of `mmldlm launch` run with the suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    """Whole launches have not been shown to hold yet (issue 5)."""
    if os.environ.get("MMLDLM_MULTINODE") == "1":
        return
    for item in items:
        if (
            item.path.parent == Path(__file__).parent
            and item.path.name == "test_command.py"
            and "store" in item.fixturenames
        ):
            item.add_marker(
                pytest.mark.skip(reason="whole launches, not shown to hold yet: run with MMLDLM_MULTINODE=1")
            )
