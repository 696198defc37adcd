"""Copy the small files beside weights into a conversion: regular files alone, never through a link
out of the source.

An unpacked archive may contain links to anything that its reader can read, and OUT is made to be
passed on. A cache of huggingface_hub is the exception: its snapshots/REVISION/* are links to
blobs/* of the same repository.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from mmldlm.checkpoints.formats.base import OpenedCheckpoint
from mmldlm.checkpoints.io.open_files import open_regular_descriptor
from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_os_error


def check_links(opened: OpenedCheckpoint) -> None:
    """Check that every file of weights is in the checkpoint. A single file that the user named may
    be a link.

    Raises:
        UserError: a link that leaves the checkpoint; the error names it.
    """
    weights = opened.weights
    root = opened.checkpoint or weights.path
    if not root.is_dir():  # one file, or an index with its shards
        root = root.parent
    for path in {file.path for file in weights.files} - {weights.path}:
        # accelerate keeps the optimizer in a folder beside that of the model.
        real_path(root if root in path.parents else root.parent, path)


def copy_file(root: Path, path: Path, out: Path) -> None:
    """Copy a regular file of the checkpoint in `root` to the new file `out`; make its folder.

    Raises:
        UserError: `path` is a link that leaves `root`, or no regular file. OSError: a failed
            write.
    """
    real = real_path(root, path)
    try:
        source = open(open_regular_descriptor(real), "rb")
    except OSError as error:
        raise _unusable(path, describe_os_error(error)) from error
    with source:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out, "xb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)


def copy_tree(root: Path, folder: Path, out: Path) -> None:
    """Copy a folder of the checkpoint in `root` with everything in it.

    Raises:
        UserError: as copy_file.
    """
    out.mkdir()
    for path in list_tree(root, folder):
        copy_file(root, path, out / path.relative_to(folder))


def list_tree(root: Path, folder: Path) -> list[Path]:
    """Return all files below a folder of the checkpoint in `root`, also those behind links that
    stay inside.

    Raises:
        UserError: a link that leaves `root`, or to a folder that contains it.
    """
    files = []
    for child in sorted(folder.iterdir()):
        real = real_path(root, child)
        if not real.is_dir():
            files.append(child)
        elif real in folder.resolve().parents or real == folder.resolve():
            raise _unusable(child, f"a link to {real}, which contains it")
        else:
            files += list_tree(root, child)
    return files


def real_path(root: Path, path: Path) -> Path:
    """Return a path without links.

    Raises:
        UserError: it leads out of `root`, nowhere, or in a circle.
    """
    try:
        real, real_root = path.resolve(strict=True), root.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        raise _unusable(path, getattr(error, "strerror", None) or "links in a circle") from error
    if real != real_root and real_root not in real.parents:
        if not any(blobs == real.parent for blobs in _hub_blobs(real_root)):
            raise UserError(
                f"a checkpoint in {root} without links to files outside it",
                f"{_link_of(root, path)}, which leads to {real}",
                "if you trust it, copy the checkpoint with its files (cp -rL) and convert the"
                " copy",
            )
    return real


def _hub_blobs(root: Path) -> Iterator[Path]:
    """Yield the folder of blobs for a folder inside snapshots/REVISION of a cache of
    huggingface_hub.
    """
    for revision in (root, *root.parents):
        if revision.parent.name == "snapshots":
            yield revision.parent.parent / "blobs"


def _link_of(root: Path, path: Path) -> Path:
    """Return the first link on the way from `root` to `path`."""
    inside = [part for part in (path, *path.parents) if root in part.parents]
    return next((part for part in reversed(inside) if part.is_symlink()), path)


def _unusable(path: Path, found: str) -> UserError:
    fix = "restore the file, or remove it from the checkpoint"
    return UserError(f"a regular file, or a link to one, at {path}", found, fix)
