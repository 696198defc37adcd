"""Weights & Biases, when asked for; offline needs no network."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmldlm.errors import UserError

_ID_FILE = "wandb_id"


class WandbRun:
    """One run at Weights & Biases. Records carry their own `step`, so a resumed run may log a step again."""

    def __init__(self, run: Any):
        self._run = run
        run.define_metric("*", step_metric="step")

    @property
    def id(self) -> str:
        return self._run.id

    def log(self, record: Mapping[str, Any], prefix: str = "") -> None:
        """Log the numbers of a record; `prefix` ("eval/") goes before every key but `step`."""
        numbers = {key: value for key, value in record.items() if isinstance(value, (int, float))}
        self._run.log({key if key == "step" else prefix + key: value for key, value in numbers.items()})

    def finish(self, exit_code: int = 0) -> None:
        """Write out what is buffered and close the run."""
        self._run.finish(exit_code=exit_code)


def open_wandb(
    mode: str, project: str, name: str, dir: str | Path, config: Mapping[str, Any], resume: bool = False
) -> WandbRun | None:
    """Start (or continue) the run that belongs to a run folder. Call on rank 0 only.

    Args:
        mode: disabled (returns None and imports nothing), offline or online.
        project, name: what wandb calls the run.
        dir: the run's folder; wandb's files go to its `wandb` folder, the run's id to its `wandb_id` file.
        config: resolved config, shown beside the run.
        resume: continue the run whose id lies in `dir`, if there is one; otherwise a new id is made.

    Raises:
        UserError: wandb is not installed or does not start, or online was refused (no login, no network).
    """
    if mode == "disabled":
        return None
    if mode not in ("offline", "online"):
        raise UserError("logging.wandb.mode disabled, offline or online", repr(mode), "change logging.wandb.mode")
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            f"the package wandb for logging.wandb.mode={mode}",
            f"it cannot be imported ({error})",
            "pip install wandb, or logging.wandb.mode=disabled",
        ) from error

    folder = Path(dir)
    folder.mkdir(parents=True, exist_ok=True)
    id_file = folder / _ID_FILE
    if resume and id_file.exists():
        run_id = id_file.read_text().strip()
    else:
        run_id = uuid.uuid4().hex[:12]
        id_file.write_text(run_id + "\n")
    # console="off": the live line must not pass through wandb's capture of standard output.
    settings = wandb.Settings(console="off", silent=True)
    try:
        run = wandb.init(
            mode=mode,
            project=project,
            name=name,
            id=run_id,
            resume="allow",
            dir=str(folder),
            config=dict(config),
            settings=settings,
        )
        return WandbRun(run)
    except Exception as error:  # wandb's own process may fail in many ways; the ranks wait for rank 0's answer
        raise UserError(
            f"a run at Weights & Biases (logging.wandb.mode={mode})",
            str(error).strip() or type(error).__name__,
            "`wandb login`, or logging.wandb.mode=offline and `wandb sync` later",
        ) from error
