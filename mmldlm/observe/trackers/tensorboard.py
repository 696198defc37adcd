"""A run in TensorBoard's event files, by the package tensorboard or tensorboardX."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from mmldlm.errors import UserError
from mmldlm.observe.trackers.base import TrackedRun
from mmldlm.utils.run_files import TENSORBOARD


class TensorBoardTracker:
    """Event files in the run's folder `tensorboard`.

    A resumed run adds a file, which tells TensorBoard to drop what is repeated; so does a
    rollback.
    """

    def __init__(self, run: TrackedRun):
        self._folder = run.folder / TENSORBOARD
        self._writer_class = _import_writer()
        self._open(run.step + 1)
        # An evaluation that an interruption left over is that of the step the run resumes from.
        self._last_step = run.step

    def _open(self, first_step: int) -> None:
        """Start a file whose steps begin with first_step."""
        # tensorboardX names files by the second: one opened within it must not replace another.
        self._writer = self._writer_class(
            str(self._folder), purge_step=first_step, filename_suffix=f".{first_step}"
        )
        self._last_step = first_step

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step < self._last_step:
            self._writer.close()
            self._open(step)
        self._last_step = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        # Four spaces make it a literal block of Markdown, as which TensorBoard shows a text.
        literal = "\n".join(f"    {line}" for line in text.splitlines())
        self._writer.add_text(name, literal, step)

    def image(self, step: int, name: str, array: np.ndarray) -> None:
        self._writer.add_image(name, array, step, dataformats="HWC")

    def finish(self, exit_code: int) -> str | None:
        self._writer.close()
        return f"{self._folder}; `tensorboard --logdir {self._folder.parent.parent}` shows it"


def _import_writer() -> Any:
    """Return the class SummaryWriter of torch, which needs tensorboard, or of tensorboardX.

    Raises:
        UserError: neither is installed.
    """
    for package in ("torch.utils.tensorboard", "tensorboardX"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(package).SummaryWriter
    raise UserError(
        "the package tensorboard or tensorboardX for logging.trackers=[tensorboard]",
        "neither can be imported",
        "pip install tensorboard, or take tensorboard out of logging.trackers",
    )
