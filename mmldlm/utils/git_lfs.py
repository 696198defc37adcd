"""Recognize the pointers of Git LFS."""

from __future__ import annotations

from pathlib import Path

from mmldlm.errors import UserError
from mmldlm.utils.input_files import open_regular

_POINTER = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(path: Path) -> None:
    """Refuse a pointer of Git LFS, which stands where a clone without git-lfs has not fetched the
    file.

    Raises:
        UserError: the file is such a pointer.
    """
    with open_regular(path) as file:
        if file.read(len(_POINTER)) == _POINTER:
            fix = "install git-lfs and run git lfs pull in that clone"
            raise UserError(
                f"the content of {path}", "a pointer of Git LFS, not the file itself", fix
            )
