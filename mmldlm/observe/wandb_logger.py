"""Optional logging to Weights & Biases; mode offline needs no network."""

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
        """Log the numbers of a record; `prefix` ("eval/") is prepended to every key except `step`."""
        numbers = {key: value for key, value in record.items() if isinstance(value, (int, float))}
        self._run.log({key if key == "step" else prefix + key: value for key, value in numbers.items()})

    def finish(self, exit_code: int = 0) -> None:
        """Flush buffers and close the run."""
        self._run.finish(exit_code=exit_code)


def open_wandb(
    mode: str, project: str, name: str, dir: str | Path, config: Mapping[str, Any], resume: bool = False
) -> WandbRun | None:
    """Start or resume the wandb run of a run folder. Call on rank 0 only.

    Args:
        mode: disabled (returns None and imports nothing), offline or online.
        project: wandb's project.
        name: wandb's name of the run.
        dir: the run's folder; wandb's files are stored in `wandb`, the id of the run in `wandb_id`.
        config: resolved config.
        resume: continue the run whose id is stored in `dir`, if any; otherwise a new id is generated.

    Raises:
        UserError: wandb is not installed or does not start, or online mode fails (no login, no network).
    """
    if mode == "disabled":
        return None
    if mode not in ("offline", "online"):
        raise UserError(
            "logging.wandb.mode disabled, offline or online", repr(mode), "set logging.wandb.mode to one of them"
        )
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            f"the package wandb for logging.wandb.mode={mode}",
            f"it cannot be imported ({error})",
            "pip install wandb, or set logging.wandb.mode=disabled",
        ) from error

    folder = Path(dir)
    folder.mkdir(parents=True, exist_ok=True)
    id_file = folder / _ID_FILE
    if resume and id_file.exists():
        run_id = id_file.read_text().strip()
    else:
        run_id = uuid.uuid4().hex[:12]
        id_file.write_text(run_id + "\n")
    # console="off": wandb must not capture the live line on standard output.
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
    except Exception as error:  # wandb may fail in many ways; the other ranks wait for rank 0
        raise UserError(
            f"a run at Weights & Biases (logging.wandb.mode={mode})",
            str(error).strip() or type(error).__name__,
            "run `wandb login`, or set logging.wandb.mode=offline and run `wandb sync` later",
        ) from error
