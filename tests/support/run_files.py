"""What runs of several engines leave behind on the disk."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path


def drop_checkpoints(folder: str | Path, name: str) -> None:
    """Remove the checkpoints of a finished run that no test reads; the logs stay. All ranks call
    it, rank 0 acts.

    Fifty runs of a launch would otherwise keep 60 MB each until their test ends.
    """
    if os.environ.get("RANK", "0") == "0":
        shutil.rmtree(Path(folder) / name / "checkpoints")


def without_row(folder: Path, rows: Iterable[str]) -> list[str]:
    """Files below a folder that none of the names of a table like RUN_FILES stands for."""
    patterns = [
        re.escape(row).replace("DATE", r"[\d_]+").replace("N", r"\d+")
        + (".*" if row.endswith("/") else "")
        for row in rows
    ]
    # A link to a checkpoint is a name of its own.
    files = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    names = [path.relative_to(folder).as_posix() for path in files]
    return [name for name in names if not any(re.fullmatch(row, name) for row in patterns)]
