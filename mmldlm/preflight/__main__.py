"""`python -m mmldlm.preflight`: the same as `mmldlm preflight`."""

from __future__ import annotations

import sys

from mmldlm.commands import preflight
from mmldlm.utils.entry_point import run_command


def run() -> int:
    """Parse the command line and run; return the exit code."""
    return run_command(
        "mmldlm preflight", "Check whether a run will start, fit and finish.", preflight
    )


if __name__ == "__main__":
    sys.exit(run())
