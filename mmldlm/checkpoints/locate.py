"""Find a run's checkpoints, and those from which it can continue."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from mmldlm.checkpoints.files.file_io import read_json_object
from mmldlm.checkpoints.manifest import (
    LINKS,
    MANIFEST,
    SKIPS,
    Examination,
    examine,
    read_manifest,
)
from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_os_error, join_some
from mmldlm.utils.input_files import read_bytes
from mmldlm.utils.paths import path_inside
from mmldlm.utils.run_files import CHECKPOINTS, LATEST

# With pydantic, a third of the start of `mmldlm convert`.
if TYPE_CHECKING:
    from mmldlm.config.schema import Config

STEP_FOLDER = re.compile(r"step_\d{8,}")
# A checkpoint while a commit puts another one of its step in its place.
_REPLACED = ".replaced_"


def replaced_path(final: Path) -> Path:
    """Return where a commit keeps the checkpoint that it replaces, until the new one is there."""
    return final.with_name(_REPLACED + final.name)


def recover_interrupted_commit(run_dir: Path) -> None:
    """Restore a checkpoint that was renamed by a commit that crashed before its replacement was in
    place. Call it on one rank of the run: readers find the checkpoint where it is.

    Raises:
        OSError: it cannot be renamed; it may be the only one.
    """
    for replaced in (run_dir / CHECKPOINTS).glob(f"{_REPLACED}step_*"):
        final = replaced.with_name(replaced.name.removeprefix(_REPLACED))
        if not os.path.lexists(final):
            os.rename(replaced, final)


def read_link(run_dir: Path, name: str = LATEST) -> Path | None:
    """Return the folder that one of LINKS in a run names, existing or not; None without the link.

    A text file that names anything but a folder inside the run yields its own path, which is not a
    folder. A copied link (see is_copied_link) yields the newest checkpoint if it is `latest`, or
    else that of the step in its manifest; its own path where the run has no such checkpoint.
    """
    link = run_dir / name
    if link.is_symlink():
        return run_dir / os.readlink(link)
    if link.is_file():
        try:
            return path_inside(run_dir, read_bytes(link, 1 << 16).decode(errors="replace").strip())
        except (OSError, ValueError):
            return link
    if is_copied_link(link):
        checkpoints = list_checkpoints(run_dir)
        if name == LATEST:
            return checkpoints[-1][1] if checkpoints else link
        step = read_json_object(link / MANIFEST).get("step")
        return next((path for number, path in checkpoints if number == step), link)
    return None


def is_copied_link(path: Path) -> bool:
    """Return whether one of LINKS is a folder: the copy of a checkpoint that scp -r, cp -rL and
    clients of object stores make of a link, beside the checkpoints of the run.
    """
    is_named_so = path.name in LINKS and not path.is_symlink()
    return is_named_so and (path / MANIFEST).is_file() and (path.parent / CHECKPOINTS).is_dir()


def list_checkpoints(run_dir: Path | str) -> list[tuple[int, Path]]:
    """Return (step, folder) of every committed checkpoint of a run, oldest first, complete or
    damaged. One that is being replaced is listed where it is meanwhile.

    Raises:
        UserError: their folder cannot be read.
    """
    parent = Path(run_dir) / CHECKPOINTS
    try:
        names = os.listdir(parent)
    except OSError as error:
        if isinstance(error, (FileNotFoundError, NotADirectoryError)) and not os.path.lexists(
            parent
        ):
            return []
        raise unreadable_error(run_dir, f"{parent}: {describe_os_error(error)}") from error
    # The name of a step before it: what is in place counts.
    listed = {name.removeprefix(_REPLACED): parent / name for name in sorted(names)}
    return sorted(
        (int(name.removeprefix("step_")), path)
        for name, path in listed.items()
        if STEP_FOLDER.fullmatch(name)
    )


def is_of_run(checkpoint: Path, run_dir: Path) -> bool:
    """Return whether a checkpoint is one of a run's, whose folder of checkpoints may be a link."""
    return checkpoint.parent.resolve() == (run_dir / CHECKPOINTS).resolve()


def holds_checkpoints(run_dir: Path | str) -> bool:
    """Return whether a run has saved anything, even if damaged, unreadable, or missing while
    `latest` names it.
    """
    return bool(list_checkpoints(run_dir)) or read_link(Path(run_dir)) is not None


def used_folder_error(config: Config) -> UserError:
    """Return the error for a new run in a folder that has checkpoints of another one."""
    run_dir = config.run_dir()
    number = next(n for n in count(2) if not os.path.lexists(f"{run_dir}-{n}"))
    return UserError(
        f"a new folder for the run, or training.resume to continue the one in {run_dir}",
        f"{run_dir} already holds checkpoints",
        "add training.resume=auto to continue that run, or"
        f" logging.run_name={config.logging.run_name}-{number} to start another",
    )


def unreadable_error(run_dir: Path | str, found: str) -> UserError:
    """Return the error for checkpoints that cannot be read."""
    return UserError(
        f"readable checkpoints in {run_dir}",
        found,
        "make it readable again (its owner and mode, its disk, its mount), or move it away to"
        " continue without it; nothing was changed",
    )


def is_rollback_candidate(path: Path) -> bool:
    """Return whether a rollback may use it: weights saved amid skipped steps may be what caused
    the skips.
    """
    return not (read_manifest(path).get(SKIPS) or 0)


def find_latest_valid(
    run_dir: Path | str,
    on_damaged: Callable[[str], None] = lambda message: None,
    checksums: bool = True,
    for_rollback: bool = False,
    below: int | None = None,
) -> Path | None:
    """Return the newest complete checkpoint of a run; None if there is none.

    Call it on one rank and broadcast the result: with `checksums` it reads every byte.

    Args:
        run_dir: Folder of the run.
        on_damaged: Callback with one line per damaged checkpoint that is skipped, and for damaged
            files without training state.
        checksums: Whether to compare every byte, not only presence and sizes.
        for_rollback: Whether to consider only checkpoints that a rollback may use.
        below: Step before which checkpoints are considered; None for all.

    Raises:
        UserError: a newer checkpoint cannot be read, so that it may be complete; or `latest` names
            one, and all checkpoints are missing.
    """
    run_dir = Path(run_dir)
    steps = list_checkpoints(run_dir)
    if not steps and (latest := read_link(run_dir)) is not None:
        raise UserError(
            f"the checkpoints of {run_dir}, as its `latest` names {latest.name}",
            f"none in {run_dir / CHECKPOINTS}",
            f"put them back, or mount their disk; to start from scratch delete {run_dir / LATEST}",
        )
    for step, path in reversed(steps):
        if below is not None and step >= below:
            continue
        examination = examine_with_state(path, checksums)
        if examination.unreadable:
            raise unreadable_error(run_dir, _first(examination.unreadable))
        if examination.damaged:
            on_damaged(
                f"checkpoint {path.name} is damaged and was skipped: {_first(examination.damaged)}"
            )
        elif not for_rollback or is_rollback_candidate(path):
            if examination.descriptions:
                on_damaged(
                    f"checkpoint {path.name} is used, its training state is complete:"
                    f" {_first(examination.descriptions)}"
                )
            return path
    return None


def examine_with_state(folder: Path, checksums: bool = True) -> Examination:
    """Compare a checkpoint folder with its manifest, and check the values of its training state as
    well.
    """
    examination = examine(folder, checksums)
    if not examination.problems:
        try:
            from mmldlm.checkpoints.training_state import read_training_state

            read_training_state(folder)
        except ValueError as error:
            examination.damaged.append(str(error))
        except OSError as error:
            examination.unreadable.append(
                f"{error.filename or folder}: {describe_os_error(error)}"
            )
    return examination


def _first(problems: list[str]) -> str:
    return problems[0] + (f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else "")


def locate_checkpoint(path: Path | str) -> Path:
    """Return the checkpoint folder for training.resume=PATH: a run, RUN/latest,
    RUN/checkpoints/step_N.

    Only presence and sizes of its files are checked.

    Raises:
        UserError: nothing there, no checkpoint, or one that is damaged or unreadable (the error
            names the file).
    """
    try:
        return _locate(Path(path))
    except OSError as error:
        raise unreadable_error(
            path, f"{error.filename or path}: {describe_os_error(error)}"
        ) from error


def _locate(path: Path) -> Path:
    folder: Path | None = path
    if path.name in LINKS and (path.is_symlink() or path.is_file() or is_copied_link(path)):
        folder = read_link(path.parent, path.name)
    elif path.is_dir() and not (path / MANIFEST).exists() and not STEP_FOLDER.fullmatch(path.name):
        run_dir = path.parent if path.name == CHECKPOINTS else path
        steps = list_checkpoints(run_dir)
        folder = read_link(run_dir) or (steps[-1][1] if steps else None)
    if folder is not None and not os.path.lexists(folder) and replaced_path(folder).is_dir():
        folder = replaced_path(folder)
    if folder is None or not folder.is_dir():
        raise _no_checkpoint_error(path, folder)
    check_complete(folder, checksums=False)
    # The folder of checkpoints may be a link to another disk; the path through it names the run.
    through_run = Path(os.path.abspath(folder))
    return through_run if through_run.parent.name == CHECKPOINTS else folder.resolve()


def _no_checkpoint_error(path: Path, named: Path | None) -> UserError:
    """Return the error for a path that leads to no checkpoint, but to `named`, if it is a link."""
    if named not in (None, path):
        link = path.name if path.name in LINKS else LATEST
        found = f"a `{link}` that names {named}, which does not exist"
    elif path.is_dir():
        found = f"a folder without checkpoints ({join_some(sorted(os.listdir(path))) or 'empty'})"
    else:
        found = "a file, not a run or a checkpoint" if path.exists() else "nothing"
    return UserError(
        f"a run, its `{LATEST}`, or a checkpoints/step_* folder at {path}",
        found,
        "give a run (of a folder of runs, one of its runs); training.resume=auto takes the newest"
        f" complete checkpoint of this run, training.init_from={path} weights without the"
        " optimizer and the step",
    )


def check_complete(
    folder: Path, checksums: bool = True, with_state: bool = False, tails: bool = False
) -> list[str]:
    """Check that a run can continue from a checkpoint; return the problems of files without
    training state.

    Args:
        with_state: Whether to check also the values in training_state.json, from which a run
            continues.
        tails: Whether to compare the end of every file (without `with_state`; see examine).

    Raises:
        UserError: it cannot continue.
    """
    examination = (
        examine_with_state(folder, checksums) if with_state else examine(folder, checksums, tails)
    )
    if examination.unreadable:
        raise unreadable_error(folder, "; ".join(examination.unreadable[:3]))
    if examination.damaged:
        raise UserError(
            f"a complete checkpoint in {folder}",
            "; ".join(examination.damaged[:3]),
            "take an older one; training.resume=auto takes the newest complete one of the run",
        )
    return examination.descriptions
