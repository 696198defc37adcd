"""A run at Weights & Biases; mode offline needs no network."""

from __future__ import annotations

import html
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.errors import UserError
from mmldlm.observe.trackers.base import TrackedRun
from mmldlm.utils.atomic_files import write_text
from mmldlm.utils.formatting import first_line
from mmldlm.utils.input_files import read_text

_ID_FILE = "wandb_id"


class WandbTracker:
    """One run. Records carry their own `step`, so a resumed run may log a step again.

    Args:
        run: wandb's run.
        is_offline: Whether it is written to the run's folder only.
    """

    def __init__(self, run: Any, is_offline: bool):
        self._run, self._is_offline = run, is_offline
        run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def text(self, step: int, name: str, text: str) -> None:
        import wandb

        # Plain text in HTML, the only kind of text that wandb shows.
        self._run.log({"step": step, name: wandb.Html(_preformatted(text), inject=False)})

    def image(self, step: int, name: str, array: np.ndarray) -> None:
        import wandb

        self._run.log({"step": step, name: wandb.Image(array)})

    def finish(self, exit_code: int) -> str | None:
        self._run.finish(exit_code=exit_code)
        if not self._is_offline:
            return self._run.url
        # Every resume has written a folder of its own; wandb names them offline-run-TIME-ID.
        folders = Path(self._run.dir).parents[1].glob(f"offline-run-*-{self._run.id}")
        words = " ".join(str(folder) for folder in sorted(folders))
        return f"`wandb sync {words}` uploads it"


def _preformatted(text: str) -> str:
    return f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'


def open_wandb(run: TrackedRun) -> WandbTracker:
    """Start a run, or resume the one whose id is in the run's folder.

    wandb's files are in its folder `wandb`, the id in `wandb_id`.

    Raises:
        UserError: wandb is not installed, cannot be imported or does not start, or online mode
            fails (no login, no network).
    """
    settings = run.config.logging.wandb
    mode = settings.mode
    wandb = _import_wandb(mode)
    id_file = run.folder / _ID_FILE
    if run.is_resumed and id_file.exists():
        run_id = read_text(id_file, 1 << 10).strip()
    else:
        run_id = uuid.uuid4().hex[:12]
        write_text(id_file, run_id + "\n")
    # wandb may fail in many ways, SystemExit too, while the other ranks wait for rank 0.
    try:
        wandb_run = wandb.init(
            mode=mode,
            entity=settings.entity,
            project=settings.project,
            group=settings.group,
            tags=settings.tags,
            notes=settings.notes,
            name=run.config.logging.run_name,
            id=run_id,
            resume="allow",
            dir=str(run.folder),
            config=run.config.model_dump(),
            # wandb must not capture the live line on standard output.
            settings=wandb.Settings(console="off", silent=True),
        )
        return WandbTracker(wandb_run, mode == "offline")
    except BaseException as error:
        raise UserError(
            f"a run at Weights & Biases (logging.wandb.mode={mode})",
            str(error).strip() or type(error).__name__,
            "run `wandb login`, or set logging.wandb.mode=offline and run `wandb sync` later",
        ) from error


def _import_wandb(mode: str) -> Any:
    """Import wandb.

    Raises:
        UserError: it is not installed, its import fails, or another module has its name.
    """
    expected = f"the package wandb for logging.trackers=[wandb] (logging.wandb.mode={mode})"
    leave_out = "take wandb out of logging.trackers"
    try:
        import wandb
    except (Exception, SystemExit) as error:
        fix = f"install wandb with what it needs (pip install -U wandb), or {leave_out}"
        raise UserError(expected, f"it cannot be imported ({first_line(error)})", fix) from error
    if missing := [
        name for name in ("init", "Settings") if not callable(getattr(wandb, name, None))
    ]:
        file = getattr(wandb, "__file__", None) or ", ".join(getattr(wandb, "__path__", ()))
        raise UserError(
            expected,
            f"a module of that name without {' and '.join(missing)}: {file}",
            f"rename or remove it, or {leave_out}",
        )
    return wandb
