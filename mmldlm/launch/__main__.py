"""`python -m mmldlm.launch`: the same as `mmldlm launch`."""

from __future__ import annotations

import sys

from mmldlm.commands import launch
from mmldlm.utils.entry_point import run_command


def run() -> int:
    """Parse the command line and run; return the exit code."""
    return run_command("mmldlm launch", "Preflight, then the launcher, then a watcher.", launch)


if __name__ == "__main__":
    sys.exit(run())
