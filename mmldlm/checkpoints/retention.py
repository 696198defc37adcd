"""Which checkpoints of a run stay: old ones are deleted, those of steps that a run has gone back from are set aside.

Only what can be read and is whole is ever deleted; what cannot be read is not even moved.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from mmldlm.checkpoints.commit import set_aside, update_latest
from mmldlm.checkpoints.locate import LATEST, cannot_read, is_rollback_candidate, list_checkpoints, read_latest
from mmldlm.checkpoints.manifest import examine


def set_aside_after(run_dir: Path | str, step: int) -> list[Path]:
    """Sets the checkpoints of later steps aside (checkpoints/.dropped_step_N), and `latest` to the newest one left.

    For a run that continues from `step`: theirs is a future that it has left, and `auto` must not find it. Call it on
    one rank. Returns where they are now.

    Raises:
        UserError: one of them cannot be read; none is moved.
    """
    run_dir = Path(run_dir)
    steps = list_checkpoints(run_dir)
    later = [path for found, path in steps if found > step]
    left = [path for found, path in steps if found <= step]
    for path in later:
        if unreadable := examine(path, checksums=False).unreadable:
            raise cannot_read(run_dir, unreadable[0])
    if later and left:  # first, so that a crash in between leaves a `latest` that exists
        update_latest(run_dir, left[-1])
    elif later:  # the run came from elsewhere, and has nothing of its own any more
        (run_dir / LATEST).unlink(missing_ok=True)
    return [set_aside(path) for path in later]


def prune(run_dir: Path | str, keep_last: int, keep_every: int = 0) -> list[Path]:
    """Deletes old checkpoints; call on rank 0 only, after a commit. Returns what was deleted.

    Kept: the `keep_last` newest whole ones that a rollback may go to (at least one), every step divisible by
    `keep_every` (if > 0), what `latest` names, others newer than the oldest of the former, and whatever is not whole
    or cannot be read. "Whole" means present with the right sizes.
    """
    run_dir = Path(run_dir)
    whole = [(step, path) for step, path in list_checkpoints(run_dir) if not examine(path, checksums=False).problems]
    newest = [step for step, path in whole if is_rollback_candidate(path)][-max(1, keep_last) :]
    if not newest:
        return []
    latest = read_latest(run_dir)
    deleted = []
    for step, path in whole:
        is_due = keep_every > 0 and step % keep_every == 0
        if step >= newest[0] or is_due or (latest is not None and path.name == latest.name):
            continue
        delete(path)
        deleted.append(path)
    return deleted


def delete(path: Path) -> None:
    """Removes a checkpoint. It is renamed first: what a crash leaves is nothing that looks like a checkpoint."""
    gone = path.with_name(f".deleting_{path.name}")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(path, gone)
    shutil.rmtree(gone)
