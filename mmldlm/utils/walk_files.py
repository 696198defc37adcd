"""Find the files below a folder, also behind links, and account for everything that is not
read.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_os_error

MACOS = "files of macOS"
DANGLING = "links to nothing"
READ_ALREADY = "folders reached twice"
NOT_REGULAR = "FIFOs, sockets and devices"
OTHER_KIND = "files of another kind"
_NUM_NAMED = 3


@dataclass
class LeftOut:
    """Files that are not read: their number and the first names, by reason."""

    counts: Counter = field(default_factory=Counter)
    names: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, name: object) -> None:
        """Count one file."""
        self.counts[reason] += 1
        named = self.names.setdefault(reason, [])
        if len(named) < _NUM_NAMED:
            named.append(str(name))

    def update(self, others: Iterable[LeftOut]) -> LeftOut:
        """Add the files that others have left out; return this object."""
        for other in others:
            self.counts.update(other.counts)
            for reason, names in other.names.items():
                own = self.names.setdefault(reason, [])
                own += names[: _NUM_NAMED - len(own)]
        return self

    def entry(self) -> dict[str, Any]:
        """Return the manifest's entry: reason -> number and some names; empty if everything was
        read.
        """
        found = {
            r: {"number": n, "such_as": self.names[r]} for r, n in sorted(self.counts.items())
        }
        return {"not_read": found} if found else {}


def is_of_macos(name: str) -> bool:
    """Whether a path is one that macOS adds to folders and archives: AppleDouble, Finder's files,
    __MACOSX.
    """
    parts = name.split("/")
    return "__MACOSX" in parts or parts[-1].startswith("._") or parts[-1] == ".DS_Store"


def walk_files(folder: Path, left_out: LeftOut | None = None) -> list[Path]:
    """Return the regular files below a folder and below the folders that links in it name, sorted
    by path.

    A folder that is reached twice, such as by a link to its parent, is read once, under its own
    name.

    Args:
        left_out: receives what is not returned: links to nothing, files of macOS, FIFOs.

    Raises:
        UserError: a folder cannot be read.
    """
    left_out = LeftOut() if left_out is None else left_out
    files: list[Path] = []
    seen: set[tuple[int, int]] = set()
    folders: deque[Path] = deque([folder])
    linked: deque[Path] = deque()
    while folders or linked:
        current = (
            folders or linked
        ).popleft()  # links last, so that a folder is found under its own name
        try:
            state = os.stat(current)
            if (state.st_dev, state.st_ino) in seen:
                left_out.add(READ_ALREADY, current.relative_to(folder))
                continue
            seen.add((state.st_dev, state.st_ino))
            with os.scandir(current) as entries:
                found = sorted((entry.name, entry.is_symlink()) for entry in entries)
        except OSError as error:
            raise UserError(
                f"a readable folder {current}", describe_os_error(error), "check its permissions"
            ) from None
        for name, is_link in found:
            path = current / name
            if is_of_macos(name):
                left_out.add(MACOS, path.relative_to(folder))
            elif path.is_dir():
                (linked if is_link else folders).append(path)
            elif path.is_file():
                files.append(path)
            else:
                left_out.add(NOT_REGULAR if path.exists() else DANGLING, path.relative_to(folder))
    return sorted(files)
