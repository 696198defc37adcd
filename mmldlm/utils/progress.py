"""The progress display of long commands: one line updated in place on a terminal, a line now and
then in a log.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable
from typing import IO

from mmldlm.utils.formatting import for_screen, format_bytes, format_duration
from mmldlm.utils.streams import ERASE_LINE

ProgressCallback = Callable[[int, int], None]
"""Called with the work done so far and the total, both from the start of the stage and in any
unit.
"""

_REDRAW_SECONDS = 0.1


class ProgressBar:
    """Report the work done, its rate and the time left of one stage after another.

        with ProgressBar("converting", unit="B") as progress:
            convert(..., on_bytes=progress)

        with ProgressBar() as progress:
            sample_text(..., progress=progress.start("writing 1,000 texts"))

    A terminal shows one line that is erased at the end of the stage. Any other stream gets a line
    every `interval` seconds. A stream that cannot be written to is ignored: the display never ends
    the work.

    Args:
        label: Name of the stage.
        unit: What is counted, for the rate; "B" for bytes; empty for a percentage only.
        stream: Output (default: standard error).
        interval: Seconds between two lines where the stream is not a terminal.
        delay: Seconds before the first display on a terminal.
        enabled: False displays nothing (ranks other than 0).
        log: Function that prints the message of `start`.
        clock: Function that returns seconds.
    """

    def __init__(
        self,
        label: str = "",
        unit: str = "",
        *,
        stream: IO[str] | None = None,
        interval: float = 15.0,
        delay: float = 0.5,
        enabled: bool = True,
        log: Callable[[str], None] = lambda line: print(for_screen(line, sys.stdout), flush=True),
        clock: Callable[[], float] = time.monotonic,
    ):
        self.label, self.unit = label, unit
        self._stream, self._interval, self._delay = stream or sys.stderr, interval, delay
        self._enabled, self._log, self._clock = enabled, log, clock
        self._is_terminal = self._stream.isatty()
        self._is_drawn = False
        self._started = self._printed = clock()

    def start(self, message: str) -> ProgressCallback:
        """Print a message and start a stage without a label; return the callback of its
        progress.
        """
        self.close()
        self._log(message)
        self.label = ""
        self._started = self._printed = self._clock()
        return self

    def __call__(self, done: int, total: int) -> None:
        """Display the progress, unless the last display is recent."""
        if not self._enabled:
            return
        now = self._clock()
        elapsed = now - self._started
        if self._is_terminal:
            if elapsed < self._delay or (
                self._is_drawn and now - self._printed < _REDRAW_SECONDS and done < total
            ):
                return
            self._is_drawn, self._printed = True, now
            width = shutil.get_terminal_size().columns - 1
            self._write(ERASE_LINE + self._format(done, total, elapsed)[:width])
        elif now - self._printed >= self._interval and 0 < done < total:
            self._printed = now
            self._write(f"  {self._format(done, total, elapsed)}\n")

    def _format(self, done: int, total: int, elapsed: float) -> str:
        fraction = min(done / total, 1.0) if total else 0.0
        label = f"{self.label}: " if self.label else ""
        parts = [f"{label}{fraction:.0%} after {format_duration(elapsed)}"]
        if done:
            parts.append(f"{format_duration(elapsed / done * max(total - done, 0))} left")
        if self.unit:
            rate = done / max(elapsed, 1e-9)
            parts.append(
                f"{format_bytes(rate)}/s" if self.unit == "B" else f"{rate:,.0f} {self.unit}/s"
            )
            parts.append(f"{self._count(done)} of {self._count(total)}")
        return ", ".join(parts)  # a narrow terminal cuts the end

    def _count(self, value: int) -> str:
        return format_bytes(value) if self.unit == "B" else f"{value:,}"

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # no reader, a full disk, a closed stream
            self._stream.write(text)
            self._stream.flush()

    def close(self) -> None:
        """Erase the line of a terminal. May be called twice."""
        if self._is_drawn:
            self._is_drawn = False
            self._write(ERASE_LINE)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def hidden_progress() -> ProgressBar:
    """Return a display that shows nothing."""
    return ProgressBar(enabled=False, log=lambda line: None)
