"""Which checkpoints of a run are kept: delete old ones, set aside those of steps that a rollback
has abandoned, and point RUN/last_best to the one with the best validation figure.

Only readable, complete checkpoints are deleted; unreadable ones are not even renamed.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from mmldlm.checkpoints.commit import remove_link, set_aside, update_link
from mmldlm.checkpoints.locate import (
    is_rollback_candidate,
    list_checkpoints,
    read_link,
    recover_interrupted_commit,
    unreadable_error,
)
from mmldlm.checkpoints.manifest import EVALUATION, LINKS, examine, read_manifest
from mmldlm.utils.run_files import LAST_BEST, LATEST

_HIGHER_IS_BETTER = {"accuracy", "cosine", "gain"}


def set_aside_after(run_dir: Path | str, step: int) -> list[Path]:
    """Rename the checkpoints of later steps (to .dropped_step_N), and point `latest` to the newest
    remaining one; a `last_best` that names one of them is removed.

    For a run that continues from `step`, so that `auto` does not find the abandoned steps. Call it
    on one rank.

    Returns:
        The new paths.

    Raises:
        UserError: one of them cannot be read; none is renamed.
    """
    run_dir = Path(run_dir)
    recover_interrupted_commit(run_dir)
    steps = list_checkpoints(run_dir)
    later = [path for saved_step, path in steps if saved_step > step]
    remaining = [path for saved_step, path in steps if saved_step <= step]
    for path in later:
        if unreadable := examine(path, checksums=False).unreadable:
            raise unreadable_error(run_dir, unreadable[0])
    if read_link(run_dir, LAST_BEST) in later:
        remove_link(run_dir, LAST_BEST)
    # `latest` moves first, so that it exists after a crash in between.
    if later and remaining:
        update_link(run_dir, LATEST, remaining[-1])
    elif later:
        # The run resumed from another run and has no checkpoint of its own.
        remove_link(run_dir, LATEST)
    return [set_aside(path) for path in later]


def prune(run_dir: Path | str, keep_last: int, keep_every: int = 0) -> list[Path]:
    """Delete old checkpoints; call on rank 0 only, after a commit. Return the deleted paths.

    Kept: the `keep_last` newest complete ones that a rollback may use (at least one), all newer
    than the oldest of these, every step divisible by `keep_every` (if > 0), those that `latest`
    and `last_best` name, and all that are incomplete or unreadable. "Complete" means present with
    the right sizes.
    """
    checkpoints = list_checkpoints(Path(run_dir))
    # Newest first, and no more of them than needed: each has files of every rank to look at.
    usable = (
        step
        for step, path in reversed(checkpoints)
        if _is_complete(path) and is_rollback_candidate(path)
    )
    newest = list(itertools.islice(usable, max(1, keep_last)))
    if not newest:
        return []
    linked = {link.name for name in LINKS if (link := read_link(Path(run_dir), name)) is not None}
    deleted = []
    for step, path in checkpoints:
        is_due = keep_every > 0 and step % keep_every == 0
        is_kept = step >= newest[-1] or is_due or path.name in linked
        if not is_kept and _is_complete(path):
            delete(path)
            deleted.append(path)
    return deleted


def _is_complete(path: Path) -> bool:
    return not examine(path, checksums=False).problems


def delete(path: Path) -> None:
    """Remove a checkpoint.

    It is renamed first, so that a crash leaves nothing that looks like a checkpoint.
    """
    doomed = path.with_name(f".deleting_{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


# -- The best checkpoint (checkpoints.keep_best) --------------------------------------------------


def is_higher_better(figure: str) -> bool:
    """Return whether the best value of a figure is the highest: that of accuracies, cosines and
    gains, by their names.
    """
    return not _HIGHER_IS_BETTER.isdisjoint(figure.split("_"))


def figures_of(checkpoint: Path) -> dict[str, float] | None:
    """Return the figures of the evaluation at a checkpoint's step; None where there are none."""
    try:
        figures = read_manifest(checkpoint).get(EVALUATION)
    except ValueError:
        return None
    return figures if isinstance(figures, dict) else None


def figure_of(checkpoint: Path, figure: str) -> float | None:
    """Return a figure of the evaluation at a checkpoint's step; None where it is unknown or not
    finite.
    """
    value = (figures_of(checkpoint) or {}).get(figure)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def update_best(run_dir: Path, figure: str, candidates: Iterable[Path]) -> Path | None:
    """Point RUN/last_best to the best of the candidates and the checkpoint that it names; of equal
    ones it keeps the present one. Call it on one rank.

    Returns:
        The checkpoint, if it is another one now.
    """
    current = read_link(run_dir, LAST_BEST)
    known = {path: figure_of(path, figure) for path in (current, *candidates) if path is not None}
    figures = {path: value for path, value in known.items() if value is not None}
    if not figures:
        return None
    sign = -1 if is_higher_better(figure) else 1
    best = min(figures, key=lambda path: sign * figures[path])
    if best == current:
        return None
    update_link(run_dir, LAST_BEST, best)
    return best
