"""The output folder of a conversion: checked first, written under a temporary name, renamed when
complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from mmldlm.errors import MmldlmError, UserError
from mmldlm.utils.atomic_files import fsync_path
from mmldlm.utils.formatting import describe_os_error, explain_os_error
from mmldlm.utils.input_files import read_bytes
from mmldlm.utils.paths import lock_file

# Files next to the weights in a Hugging Face folder, which belong to them in any format.
TOKENIZER_FILES = re.compile(
    r"config\.json|config\.yaml|generation_config\.json|tokenizer|tokenizer(_config)?\.json|tokenizer\.model"
    r"|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|spiece\.model"
    r"|sentencepiece\.bpe\.model|chat_template\.(jinja|json)|(pre)?processor_config\.json|pca_basis\.npy"
    r"|codebook\.npy"
)
# Files of a conversion: --force deletes only a folder without other files.
_OUTPUTS = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|config\.json|config\.yaml|tokenizer"
    r"|universal|latest_universal|pca_basis\.npy|codebook\.npy"
)
# These files may belong to a training run, and TOKENIZER_FILES to a model. They are deleted only
# next to the marker, which a conversion writes first.
_STATES = re.compile(
    r"model\.pt|optimizer\.pt|deepspeed\.pt|\.metadata|trainable\.json|__\d+_0\.distcp|zero|latest|checkpoints"
)
CONVERSION_MARKER = "converted.json"
# From this number of files on one syncfs is faster than an fsync per file.
_MANY_FILES = 32


def check_target(origin: Path, out: Path, force: bool) -> None:
    """Raise UserError if `out` cannot be written: it contains or is inside `origin`, or it
    exists.
    """
    origin, real = origin.resolve(), out.resolve()
    if real == origin or origin in real.parents or real in origin.parents:
        raise UserError(
            "an output folder outside the checkpoint",
            f"{out}, which contains or is inside {origin}",
            "give another folder",
        )
    if os.path.lexists(out):
        if not force:
            raise UserError(
                f"no file or folder at {out}",
                "one that exists",
                "give another folder, or --force to replace it",
            )
        check_replaceable(out)
    check_replaceable(partial_path(out))


def check_replaceable(path: Path) -> None:
    """Raise UserError unless `path` does not exist or is a folder with nothing but a
    conversion.
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise UserError(
            f"a folder that mmldlm convert made at {path}",
            "something else",
            "move it away or give another folder",
        )
    names = {child.name for child in path.iterdir()}
    is_marked = CONVERSION_MARKER in names
    others = sorted(
        name
        for name in names - {CONVERSION_MARKER}
        if not (
            _OUTPUTS.fullmatch(name)
            or is_marked
            and (_STATES.fullmatch(name) or TOKENIZER_FILES.fullmatch(name))
        )
    )
    if others:
        raise UserError(
            f"only files of an earlier conversion in {path}",
            ", ".join(others[:4]),
            "move it away or give another folder; it will not be deleted",
        )


def check_space(parent: Path, needed: int) -> None:
    """Raise UserError if the disk of `parent` has less than `needed` bytes free."""
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
    """Return the temporary name of `out`."""
    return out.with_name(out.name + ".partial")


def write_atomically(
    origin: Path,
    out: Path,
    force: bool,
    needed: int,
    write: Callable[[Path], None],
    marker: dict | None = None,
    fsync: bool = True,
) -> None:
    """Call write(temporary folder) and rename the folder to `out` when it is complete.

    Args:
        origin: Source; `out` must be outside it.
        out: New folder.
        force: Whether to replace `out` if it is a conversion.
        needed: Number of bytes that will be written.
        write: Function that fills the folder.
        marker: Content of converted.json; None for no such file.
        fsync: Whether to flush the folder to the disk before it is renamed.

    Raises:
        UserError: `out` cannot be written, or the disk has no space.
        MmldlmError: writing failed. In both cases, and if `write` raises, `out` is unchanged.
    """
    check_target(origin, out, force)
    with _only_writer(out):
        # Another conversion may just have ended.
        check_target(origin, out, force)
        partial = partial_path(out)
        # The leftovers of an interrupted conversion; check_target has verified that it is nothing
        # else.
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
        except OSError as error:
            raise _unwritable(partial, error) from error
        identity = _identity(partial)
        try:
            check_space(out.parent, needed)
            if marker is not None:
                (partial / CONVERSION_MARKER).write_text(json.dumps(marker, indent=1) + "\n")
            write(partial)
            if fsync:
                flush(partial)
            # File systems without locks let two processes reach this place.
            if _identity(partial) != identity:
                raise MmldlmError(
                    f"another process replaced {partial} while {out} was written: nothing was"
                    " published"
                )
            # Something may have appeared there meanwhile.
            check_target(origin, out, force)
            _publish(out, fsync)
        except BaseException as error:
            if _identity(partial) == identity:
                shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise MmldlmError(f"writing {out} failed: {explain_os_error(error)}") from error
            raise


@contextlib.contextmanager
def _only_writer(out: Path) -> Iterator[None]:
    """Hold the lock of an output: a file beside it that names this process. A killed holder leaves
    no lock.

    Raises:
        UserError: another process holds it, or the folder of `out` is not writable.
    """
    path = out.with_name(f".{out.name}.lock")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = open(lock_file(path), "r+b", buffering=0)
    except BlockingIOError:
        raise UserError(
            f"no other conversion at work on {out}",
            f"{_holder_of(path)} writes it and holds {path}",
            "wait for it, stop it, or give another folder",
        ) from None
    except OSError as error:
        # The check of free space comes later: it would report /proc as full.
        raise _unwritable(path, error) from error
    with file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}".encode())
        file.flush()
        try:
            yield
        finally:
            # The file goes before the lock ends, so that whoever waits for it sees that it is
            # gone.
            path.unlink(missing_ok=True)


def _holder_of(path: Path) -> str:
    try:
        text = read_bytes(path, 1024).decode()
    except (OSError, ValueError):
        text = ""
    return text if text.isprintable() and text else "another process"


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what distinguishes a folder from another one at the same path; None if there is
    none.
    """
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _unwritable(path: Path, error: OSError) -> UserError:
    # The "File exists" of mkdir would not say that a folder was needed.
    reason = (
        os.strerror(errno.ENOTDIR)
        if isinstance(error, FileExistsError)
        else describe_os_error(error)
    )
    return UserError("a writable output folder", f"{path}: {reason}", "give another folder")


def _publish(out: Path, fsync: bool) -> None:
    """Rename the partial folder."""
    partial = partial_path(out)
    if os.path.lexists(out):
        replaced = out.with_name(out.name + ".replaced")
        check_replaceable(replaced)
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(out, replaced)
        os.rename(partial, out)
        shutil.rmtree(replaced)
    else:
        os.rename(partial, out)
    if fsync:
        fsync_path(out.parent)


def flush(folder: Path) -> None:
    """Flush a folder and everything in it to the disk; many files with one call for their file
    system.
    """
    paths = [
        Path(base) / name
        for base, folders, names in os.walk(folder)
        for name in (*names, *folders)
    ]
    paths = [path for path in paths if not path.is_symlink()]
    if len(paths) > _MANY_FILES and sync_file_system(folder):
        return
    for path in [*paths, folder]:
        fsync_path(path)


def sync_file_system(folder: Path) -> bool:
    """Flush the file system of a folder to the disk; return False if the system has no such call.

    Raises:
        OSError: it could not be written.
    """
    try:
        syncfs = ctypes.CDLL(None, use_errno=True).syncfs
    except (AttributeError, OSError):
        # Only Linux has this call.
        return False
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if syncfs(ctypes.c_int(descriptor)):
            raise OSError(
                ctypes.get_errno(), f"syncfs of {folder}: {os.strerror(ctypes.get_errno())}"
            )
    finally:
        os.close(descriptor)
    return True
