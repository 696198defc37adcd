"""The seam between a run and a tracker, a service that records it beside the run's own logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from mmldlm.config.schema import Config


class Tracker(Protocol):
    """One run in a tracker. All calls come from one thread of rank 0.

    A call may take long and may raise anything: neither delays or ends the run.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers of a step. A step may come again after a rollback."""

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text of a step."""

    def image(self, step: int, name: str, array: np.ndarray) -> None:
        """Record an image of a step, [height, width, 3] uint8."""

    def finish(self, exit_code: int) -> str | None:
        """Write what is left, and close the record.

        Args:
            exit_code: Exit code of the run.

        Returns:
            Where the record is, in words for the screen; None: nothing to say.
        """


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of the run that it opens.

    Attributes:
        folder: Folder of the run.
        step: Last step that is done; records of later ones belong to a part that is repeated.
        is_resumed: Whether the run continues one of this folder.
        config: Resolved config.
    """

    folder: Path
    step: int
    is_resumed: bool
    config: Config
