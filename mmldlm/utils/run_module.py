"""Run a module without the working folder on the path: `python run_module.py MODULE ARG...`. Also:
the command line that does so.

`python -m MODULE` puts the working folder first, and the user's own random.py there would replace
Python's.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def module_command(module: str, *words: str) -> list[str]:
    """Return the command line of a module of this package, whose process finds nothing in the
    working folder.
    """
    return [sys.executable, "-u", __file__, module, *words]


if __name__ == "__main__":
    folder = str(Path(__file__).resolve().parents[2])
    sys.path[: 0 if getattr(sys.flags, "safe_path", False) else 1] = [folder]
    if not sys.argv[1].startswith("mmldlm."):
        # A launcher, which starts others with -m (heeded since Python 3.11).
        os.environ.setdefault("PYTHONSAFEPATH", "1")
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
