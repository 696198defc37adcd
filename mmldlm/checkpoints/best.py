"""RUN/last_best: the checkpoint with the best validation figure (checkpoints.keep_best)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from mmldlm.checkpoints.commit import update_link
from mmldlm.checkpoints.locate import read_link
from mmldlm.checkpoints.manifest import read_manifest
from mmldlm.utils.run_files import LAST_BEST

EVALUATION = "evaluation"
"""Entry of a manifest: the figures of the evaluation at the checkpoint's step."""
_HIGHER_IS_BETTER = {"accuracy", "cosine", "gain"}


def is_higher_better(figure: str) -> bool:
    """Return whether the best value of a figure is the highest: that of accuracies, cosines and
    gains, by their names.
    """
    return not _HIGHER_IS_BETTER.isdisjoint(figure.split("_"))


def figure_of(checkpoint: Path, figure: str) -> float | None:
    """Return a figure of the evaluation at a checkpoint's step; None where it is unknown or not
    finite.
    """
    try:
        figures = read_manifest(checkpoint).get(EVALUATION)
    except ValueError:
        return None
    value = figures.get(figure) if isinstance(figures, dict) else None
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
