"""What runs of several engines leave behind on the disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def drop_checkpoints(folder: str | Path, name: str) -> None:
    """Remove the checkpoints of a finished run that no test reads; the logs stay. All ranks call
    it, rank 0 acts.

    Fifty runs of a launch would otherwise keep 60 MB each until their test ends.
    """
    if os.environ.get("RANK", "0") == "0":
        shutil.rmtree(Path(folder) / name / "checkpoints")
