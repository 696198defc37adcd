"""The trackers that logging.trackers names, opened and fed together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

import numpy as np

from mmldlm.errors import MmldlmError, UserError
from mmldlm.observe.trackers.base import TrackedRun, Tracker
from mmldlm.observe.trackers.tensorboard import TensorBoardTracker
from mmldlm.observe.trackers.tracker_thread import TrackerError, TrackerThread
from mmldlm.observe.trackers.wandb import open_wandb
from mmldlm.utils.formatting import did_you_mean, first_line

GROUP = "mmldlm.trackers"
"""Group of the entry points by which packages add trackers: NAME = module:function, a function of
a TrackedRun that returns a Tracker."""
TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": open_wandb,
    "tensorboard": TensorBoardTracker,
}


class Trackers:
    """The trackers of a run; one that fails is reported once, and gets nothing more.

    Args:
        names: logging.trackers.
        run: The run.
        report: Function called with the name of a tracker that failed, and the reason.

    Raises:
        MmldlmError: an unknown name, or a tracker that cannot be opened.
    """

    def __init__(self, names: Sequence[str], run: TrackedRun, report: Callable[[str, str], None]):
        self._threads: list[TrackerThread] = []
        self._report = report
        functions = [find_tracker(name) for name in names]
        try:
            for name, function in zip(names, functions):
                self._threads.append(_open(name, function, run))
        except MmldlmError as error:
            self.finish(error.exit_code, stop=lambda: True)
            raise

    def log(self, record: Mapping[str, Any], prefix: str = "") -> None:
        """Record the numbers of a log's record.

        Args:
            record: `step`, and values of which the numbers are recorded.
            prefix: What is prepended to their names, as "eval/".
        """
        step = record["step"]
        values = {
            prefix + key: value
            for key, value in record.items()
            if key != "step" and isinstance(value, (int, float))
        }
        self._submit(lambda tracker: tracker.log(step, values))

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text of a step."""
        self._submit(lambda tracker: tracker.text(step, name, text))

    def image(self, step: int, name: str, array: np.ndarray) -> None:
        """Record an image of a step, [height, width, 3] uint8."""
        self._submit(lambda tracker: tracker.image(step, name, array))

    def finish(self, exit_code: int, stop: Callable[[], bool]) -> list[str]:
        """Close all; return "NAME: place" of each that says where its record is.

        Args:
            exit_code: Exit code of the run.
            stop: Whether the process was asked to end; then it takes a few seconds only.
        """
        places = []
        for thread in self._threads:
            try:
                place = thread.finish(exit_code, stop)
                places += [f"{thread.name}: {place}"] if place else []
            except TrackerError as error:
                self._report(thread.name, str(error))
        self._threads = []
        return places

    def _submit(self, call: Callable[[Tracker], object]) -> None:
        for thread in list(self._threads):
            try:
                thread.submit(call)
            except TrackerError as error:
                self._threads.remove(thread)
                self._report(thread.name, str(error))


def find_tracker(name: str) -> Callable[[TrackedRun], Tracker]:
    """Return the function that opens a tracker.

    Raises:
        UserError: neither mmldlm nor an installed package has it, or its import fails.
    """
    if name in TRACKERS:
        return TRACKERS[name]
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        known = [*TRACKERS, *sorted(found)]
        raise UserError(
            f"logging.trackers: names among {', '.join(known)}",
            f"{name}{did_you_mean(name, known)}",
            f"name one of them, or install the package that has {name} as entry point of {GROUP}",
        )
    try:
        return found[name].load()
    except (Exception, SystemExit) as error:
        raise UserError(
            f"the tracker {name} of logging.trackers",
            f"{found[name].value} cannot be imported ({first_line(error)})",
            f"correct its package, or take {name} out of logging.trackers",
        ) from error


def _open(name: str, function: Callable[[TrackedRun], Tracker], run: TrackedRun) -> TrackerThread:
    try:
        return TrackerThread(name, lambda: function(run))
    except (MmldlmError, KeyboardInterrupt):
        raise
    except BaseException as error:
        reason = str(error) if isinstance(error, TrackerError) else first_line(error)
        raise UserError(
            f"a run in the tracker {name}",
            reason,
            f"correct what it names, or take {name} out of logging.trackers",
        ) from error
