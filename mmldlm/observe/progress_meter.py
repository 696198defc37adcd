"""How far a long measurement is: a bar with the time left on a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from mmldlm.utils.formatting import format_duration

Advance = Callable[[int, int], None]
"""Called with the work done so far and in all, in any unit."""


class Meter:
    """Prints what begins, and then shows how far it is.

        with Meter() as begin:
            sample_text(..., progress=begin("writing 1,000 texts"))

    The work in all may be known only at its first report. A bar stands on standard error where that is a terminal; else
    a line follows every `interval` seconds, so that a log shows that something happens.

    Args:
        say: prints the line of what begins. stream: for the progress (default: standard error). clock: in seconds.
    """

    def __init__(
        self,
        say: Callable[[str], None] = lambda line: print(line, flush=True),
        stream: TextIO | None = None,
        interval: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._say, self._stream = say, stream or sys.stderr
        self._interval, self._clock = interval, clock
        self._bar: Any = None
        self._task: Any = None
        self._began = self._shown_at = 0.0

    def __call__(self, line: str) -> Advance:
        """Say what begins; returns what to call as it advances."""
        self.close()
        self._say(line)
        self._began = self._shown_at = self._clock()
        return self._advance

    def _advance(self, done: int, total: int) -> None:
        if self._stream.isatty():
            self._draw(done, total)
            return
        now = self._clock()
        if now - self._shown_at >= self._interval and 0 < done < total:
            self._shown_at = now
            spent = now - self._began
            left = format_duration(spent / done * (total - done))
            print(f"  {done / total:.0%} after {format_duration(spent)}, {left} left", file=self._stream, flush=True)

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn, TimeRemainingColumn

            columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(file=self._stream), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=total)
        self._bar.update(self._task, completed=done, total=total)

    def close(self) -> None:
        """Take the bar away. May be called twice."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
