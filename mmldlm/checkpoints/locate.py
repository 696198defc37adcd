"""Which checkpoints a run has, and from which of them it can continue."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from mmldlm.checkpoints.manifest import MANIFEST, examine, read_manifest
from mmldlm.errors import UserError

CHECKPOINTS = "checkpoints"
LATEST = "latest"
_STEP = re.compile(r"step_(\d{8,})")


def recover_interrupted_commit(run_dir: Path) -> None:
    """Puts back a checkpoint that a crash caught moved aside, while its replacement was not in place yet."""
    for aside in (run_dir / CHECKPOINTS).glob(".replaced_step_*"):
        final = aside.with_name(aside.name.removeprefix(".replaced_"))
        if not os.path.lexists(final):
            try:
                os.rename(aside, final)
            except OSError:  # another process did it, or the run is read-only; verify() will tell
                pass


def read_latest(run_dir: Path) -> Path | None:
    """The folder that RUN/latest names, whether or not it exists; None without a `latest`."""
    latest = run_dir / LATEST
    if latest.is_symlink():
        return run_dir / os.readlink(latest)
    if latest.is_file():
        return run_dir / latest.read_text(errors="replace").strip()
    return None


def list_checkpoints(run_dir: Path | str) -> list[tuple[int, Path]]:
    """(step, folder) of every committed checkpoint of a run, oldest first, whole or not.

    Raises:
        UserError: their folder cannot be read.
    """
    parent = Path(run_dir) / CHECKPOINTS
    try:
        names = os.listdir(parent)
    except OSError as error:
        if isinstance(error, (FileNotFoundError, NotADirectoryError)) and not os.path.lexists(parent):
            return []
        raise cannot_read(run_dir, f"{parent}: {error.strerror or error}") from error
    return sorted((int(match[1]), parent / name) for name in names if (match := _STEP.fullmatch(name)))


def holds_checkpoints(run_dir: Path | str) -> bool:
    """Whether a run has saved anything, be it damaged, unreadable, or gone while `latest` still names it."""
    return bool(list_checkpoints(run_dir)) or read_latest(Path(run_dir)) is not None


def cannot_read(run_dir: Path | str, what: str) -> UserError:
    """The refusal to judge checkpoints that cannot be read."""
    return UserError(
        f"checkpoints in {run_dir} that can be read",
        what,
        "make it readable again (its owner and mode, its disk, its mount), or move it away to continue without it; "
        "nothing was changed",
    )


def is_rollback_candidate(path: Path) -> bool:
    """Whether a rollback may go there: saved amid skipped steps, the weights may be what made them bad."""
    return not (read_manifest(path).get("consecutive_skips") or 0)


def find_latest_valid(
    run_dir: Path | str,
    on_damaged: Callable[[str], None] = lambda message: None,
    checksums: bool = True,
    for_rollback: bool = False,
    below: int | None = None,
) -> Path | None:
    """The newest whole checkpoint of a run; None if there is none. `on_damaged` gets one line for each damaged one that
    is passed over, and for damaged files that hold no state of training.

    Call it on one rank, and report what it found to the others: with `checksums` it reads every byte.

    Args:
        for_rollback: of those that are fit for it. below: of steps before this one.

    Raises:
        UserError: a checkpoint newer than any whole one cannot be read, so that it may be whole; or all of them are
            gone, and `latest` still names one.
    """
    run_dir = Path(run_dir)
    recover_interrupted_commit(run_dir)
    steps = list_checkpoints(run_dir)
    if not steps and (latest := read_latest(run_dir)) is not None:
        raise UserError(
            f"the checkpoints of {run_dir}, as its `latest` names {latest.name}",
            f"none in {run_dir / CHECKPOINTS}",
            f"put them back, or mount their disk; to begin from scratch delete {run_dir / LATEST}",
        )
    for step, path in reversed(steps):
        if below is not None and step >= below:
            continue
        found = examine(path, checksums=checksums)
        if found.unreadable:
            raise cannot_read(run_dir, _first(found.unreadable))
        if found.damaged:
            on_damaged(f"checkpoint {path.name} is damaged and was skipped: {_first(found.damaged)}")
        elif not for_rollback or is_rollback_candidate(path):
            if found.descriptions:
                on_damaged(f"checkpoint {path.name} is used, its training state is whole: {_first(found.descriptions)}")
            return path
    return None


def _first(problems: list[str]) -> str:
    return problems[0] + (f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else "")


def locate_checkpoint(path: Path | str) -> Path:
    """The checkpoint folder for training.resume=PATH: a run, RUN/latest, RUN/checkpoints/step_N.

    Only presence and sizes of its files are checked.

    Raises:
        UserError: nothing there, no checkpoint there, one that is damaged or cannot be read (its file is named).
    """
    try:
        return _resolve(Path(path))
    except OSError as error:
        raise cannot_read(path, f"{error.filename or path}: {error.strerror or error}") from error


def _resolve(path: Path) -> Path:
    expected = f"a run, its `latest`, or a checkpoints/step_* folder at {path}"
    folder: Path | None = path
    if path.name == LATEST and (path.is_symlink() or path.is_file()):
        recover_interrupted_commit(path.parent)
        folder = read_latest(path.parent)
    elif path.is_dir() and not (path / MANIFEST).exists() and not _STEP.fullmatch(path.name):
        run_dir = path.parent if path.name == CHECKPOINTS else path
        recover_interrupted_commit(run_dir)
        folder = read_latest(run_dir)
        if folder is None:
            steps = list_checkpoints(run_dir)
            if not steps:
                inside = sorted(p.name for p in path.iterdir())[:5]
                raise UserError(
                    expected,
                    f"a folder without checkpoints ({', '.join(inside) or 'empty'})",
                    "check logging.save_dir and logging.run_name, or start without training.resume",
                )
            folder = steps[-1][1]
    if folder is None or not folder.is_dir():
        what = "nothing" if folder in (None, path) else f"a `latest` that names {folder}, which does not exist"
        raise UserError(expected, what, "check the path; training.resume=auto takes the newest whole checkpoint")
    check_whole(folder, checksums=False)
    return folder.resolve()


def check_whole(folder: Path, checksums: bool = True) -> list[str]:
    """Makes sure that a run can continue from a checkpoint; returns what is wrong with files that hold no state.

    Raises:
        UserError: it cannot.
    """
    found = examine(folder, checksums=checksums)
    if found.unreadable:
        raise cannot_read(folder, "; ".join(found.unreadable[:3]))
    if found.damaged:
        raise UserError(
            f"a whole checkpoint in {folder}",
            "; ".join(found.damaged[:3]),
            "training.resume=auto takes the newest whole checkpoint of the run",
        )
    return found.descriptions
