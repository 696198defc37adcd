"""Closed standard streams: a finished run exits with 0, and no file takes their numbers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.helpers import environment

CODE = """
import os, subprocess, sys
from mmldlm.distributed.error_reporting import exit_without_teardown
from mmldlm.utils.streams import open_standard_streams
open_standard_streams()
for stream in (sys.stdout, sys.stderr):
    print("text", file=stream, flush=True)
assert sys.stdin is not None and os.open("/", os.O_RDONLY) > 2
child = "import sys; sys.exit(None in (sys.stdin, sys.stdout, sys.stderr))"
assert subprocess.run([sys.executable, "-c", child]).returncode == 0  # what a launcher starts has them, too
exit_without_teardown(0)
"""  # noqa: E501


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_streams_become_the_null_device(closed):
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, CODE]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_exit_code_survives_closed_streams():
    code = (
        "from mmldlm.distributed.error_reporting import exit_without_teardown as leave; leave(0)"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec "{sys.executable}" -c "{code}" >&- 2>&-'], env=environment()
    )
    assert done.returncode == 0
