"""The folder that a conversion writes: checked before, written beside, renamed when it is whole."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from mmldlm.checkpoints.commit import fsync_path
from mmldlm.checkpoints.formats.detect import TOKENIZER_FILES
from mmldlm.checkpoints.io.parallel import sync_file_system
from mmldlm.errors import MmldlmError, UserError

# What a conversion may consist of: only a folder of nothing else is ever deleted by --force.
_OUTPUTS = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|config\.json|config\.yaml|tokenizer"
    r"|universal|latest_universal"
)
# These could belong to a training run, and TOKENIZER_FILES to a model: they are deleted only next to the marker, which
# a conversion writes first.
_STATES = re.compile(r"model\.pt|optimizer\.pt|\.metadata|trainable\.json|__\d+_0\.distcp|zero|latest|checkpoints")
CONVERSION_MARKER = "converted.json"
_MANY = 32  # files


def check_target(origin: Path, out: Path, force: bool) -> None:
    """Raises UserError where `out` cannot be written: inside `origin` or around it, or in the way of something."""
    origin, real = origin.resolve(), out.resolve()
    if real == origin or origin in real.parents or real in origin.parents:
        raise UserError(
            "an output folder apart from the checkpoint",
            f"{out}, which holds or lies in {origin}",
            "give another folder",
        )
    if os.path.lexists(out):
        if not force:
            raise UserError(
                f"no file or folder at {out}", "one that exists", "give another folder, or --force to replace it"
            )
        check_replaceable(out)
    check_replaceable(partial_path(out))


def check_replaceable(path: Path) -> None:
    """Raises UserError unless `path` is absent or a folder in which nothing but a conversion lies."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise UserError(
            f"a folder that mmldlm convert made at {path}", "something else", "move it away or give another folder"
        )
    names = {child.name for child in path.iterdir()}
    is_marked = CONVERSION_MARKER in names
    others = sorted(
        name
        for name in names - {CONVERSION_MARKER}
        if not (_OUTPUTS.fullmatch(name) or is_marked and (_STATES.fullmatch(name) or TOKENIZER_FILES.fullmatch(name)))
    )
    if others:
        raise UserError(
            f"only files of an earlier conversion in {path}",
            ", ".join(others[:4]),
            "it will not be deleted: move it away or give another folder",
        )


def check_space(parent: Path, needed: int) -> None:
    """Raises UserError where the disk of `parent` has less than `needed` bytes free."""
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise UserError(
            f"{needed / 2**20:.0f} MiB of free space on the disk of {parent}",
            f"{free / 2**20:.0f} MiB",
            "free some space, give a folder on another disk, or use --dtype bf16",
        )


def partial_path(out: Path) -> Path:
    """Where `out` is written before it is whole."""
    return out.with_name(out.name + ".partial")


def write_atomically(
    origin: Path,
    out: Path,
    force: bool,
    needed: int,
    write: Callable[[Path], None],
    marker: dict | None = None,
    is_flushed: bool = True,
) -> None:
    """Calls write(folder beside `out`) and gives the folder its name when it is whole.

    Args:
        origin: what is converted; `out` must lie apart from it. force: replace `out` if it is a conversion.
        needed: bytes that will be written.
        marker: what converted.json will say; None: no such file.
        is_flushed: flush it to the disk before it gets its name.

    Raises:
        UserError: `out` cannot be written, or there is no space. MmldlmError: writing failed. In both cases, and where
            `write` raises, `out` is as it was before.
    """
    check_target(origin, out, force)
    partial = partial_path(out)
    # What an interrupted conversion left there; check_target has seen that it is nothing else.
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:  # before the space is asked for: /proc has none, and that is not what is wrong with it
        raise UserError("an OUT that can be written", f"{partial}: {error.strerror}", "give another folder") from error
    try:
        check_space(out.parent, needed)
        if marker is not None:
            (partial / CONVERSION_MARKER).write_text(json.dumps(marker, indent=1) + "\n")
        write(partial)
        publish(out, is_flushed)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise MmldlmError(f"writing {out} failed: {error}") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def publish(out: Path, is_flushed: bool = True) -> None:
    """Flushes the partial folder to the disk, if it should, and gives it its name."""
    partial = partial_path(out)
    if is_flushed:
        flush(partial)
    if os.path.lexists(out):
        aside = out.with_name(out.name + ".replaced")
        check_replaceable(aside)
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(out, aside)
        os.rename(partial, out)
        shutil.rmtree(aside)
    else:
        os.rename(partial, out)
    if is_flushed:
        fsync_path(out.parent)


def flush(folder: Path) -> None:
    """Flushes a folder and all in it to the disk.

    Many files: their file system as a whole, because an fsync of each would wait for the journal as often.
    """
    paths = [Path(base) / name for base, folders, names in os.walk(folder) for name in (*names, *folders)]
    paths = [path for path in paths if not path.is_symlink()]
    if len(paths) > _MANY and sync_file_system(folder):
        return
    for path in [*paths, folder]:
        fsync_path(path)
