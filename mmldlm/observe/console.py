"""Show the progress of a run: a live line on a terminal, plain lines in pipes and in the
log file.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any, TextIO

from rich.console import RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mmldlm.tasks.base import Metric
from mmldlm.utils.formatting import fold, format_duration, printable
from mmldlm.utils.run_files import LATEST_LOG, LOGS
from mmldlm.utils.screen import PlainConsole, open_console

# Fields of a step's record in a line: key, label, format.
_FIELDS = (
    ("grad_norm", "grad_norm", "#.3g"),
    ("lr", "lr", ".1e"),
    ("tokens_per_second", "tok/s", ".0f"),
    ("images_per_second", "img/s", ".1f"),
    ("mfu", "mfu", ".1%"),
    ("data_share", "data wait", ".0%"),
)
_PACE_STEPS = 100  # steps from which the time left is estimated
_REFRESH_SECONDS = 0.1
_PLAIN_SECONDS = 30.0  # between two plain lines of an evaluation
_BAR_WIDTH = 16
_INDENT = " " * 9  # width of the label of a message: `model    `, `data     `


def train_log_path(run_dir: str | Path, node: int = 0) -> Path:
    """Return logs/train_YYYYMMDD_HHMMSS_node{n}.log in the run's folder, in local time."""
    return Path(run_dir) / LOGS / f"train_{datetime.now():%Y%m%d_%H%M%S}_node{node}.log"


def link_latest(log: Path) -> None:
    """Point logs/latest.log at the newest training log.

    Raises:
        OSError: the file system does not support links.
    """
    temporary = log.with_name(f".latest_{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(log.name)
    os.replace(temporary, log.with_name(LATEST_LOG))


class _SafeConsole(PlainConsole):
    """A rich console that raises when its output is closed, instead of ending the process."""

    def on_broken_pipe(self) -> None:
        raise  # the current BrokenPipeError


def _drop_output(stream: IO[str]) -> None:
    """Redirect a closed stream to /dev/null, so that Python's flush at exit does not raise
    again.
    """
    with contextlib.suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)


def format_step(
    record: Mapping[str, Any],
    total_steps: int | None,
    num_skipped: int,
    eta: float | None = None,
    metrics: Sequence[Metric] = (),
) -> str:
    """Format a step's record as one line for grep; missing fields and None are omitted."""
    parts = [f"step {record['step']}" + (f"/{total_steps}" if total_steps else "")]
    parts += [f"{label}: {value}" for label, value in _format_fields(record, metrics)]
    parts.append(f"skipped: {num_skipped}")
    if eta is not None:
        parts.append(f"eta: {format_duration(eta)}")
    return " | ".join(parts)


def _format_fields(
    record: Mapping[str, Any], metrics: Sequence[Metric]
) -> Iterator[tuple[str, str]]:
    losses = [
        ("loss", "loss"),
        *((metric.name, metric.label) for metric in metrics if metric.label),
    ]
    for key, label, form in (*((key, label, "#.4g") for key, label in losses), *_FIELDS):
        value = record.get(key)
        if value is not None:
            yield label, f"{value:{form}}"
        elif f"{key}_nonfinite" in record:
            yield label, record[f"{key}_nonfinite"]


def _format_live(
    record: Mapping[str, Any],
    total_steps: int,
    num_skipped: int,
    eta: float | None,
    metrics: Sequence[Metric],
) -> str:
    """Format a step's record in fewer columns; the time left comes first, because a narrow
    terminal cuts the end.
    """
    left = f" eta {format_duration(eta)}" if eta is not None else ""
    fields = "  ".join(f"{label} {value}" for label, value in _format_fields(record, metrics))
    return f"{record['step']}/{total_steps}{left}  {fields}  skipped {num_skipped}"


def with_mean_losses(
    record: Mapping[str, Any], recent: Sequence[Mapping[str, Any]], metrics: Sequence[Metric] = ()
) -> dict[str, Any]:
    """Return the record with the losses of a line replaced by their means over applied recent
    steps.

    If no step was applied, the losses of the record itself remain.
    """
    means = dict(record)
    for key in ("loss", *(metric.name for metric in metrics if metric.label)):
        values = [
            step[key] for step in recent if not step.get("skipped") and _is_finite(step.get(key))
        ]
        if values:
            means[key] = math.fsum(values) / len(values)
    return means


def _is_finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)


class Console:
    """Show the steps and messages of a run.

    Losses are means over the applied steps since the last line (in the live line, over the last
    log_freq steps); other fields are those of the last step.

    Args:
        total_steps: Last step of the run.
        enabled: Whether this process writes to the screen (rank 0).
        log_freq: Steps between two plain lines. A terminal shows a live line instead.
        log_file: Stream for the plain lines and all messages with a timestamp, even if enabled is
            False.
        start_step: Step after which this process starts (resume).
        stream: Output stream (default: standard output).
    """

    def __init__(
        self,
        total_steps: int,
        enabled: bool = True,
        log_freq: int = 10,
        log_file: str | Path | None = None,
        start_step: int = 0,
        stream: TextIO | None = None,
        metrics: Sequence[Metric] = (),
    ):
        self._metrics = metrics
        self.total_steps, self.log_freq = total_steps, log_freq
        self.num_skipped = 0
        """Number of skipped steps in this process."""
        self._pace: deque[tuple[int, float]] = deque(
            [(start_step, time.monotonic())], maxlen=_PACE_STEPS + 1
        )
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=max(log_freq, 1))
        self._line_step = start_step  # of the last plain line
        self._drawn_at = 0.0
        self._evaluation_started = self._evaluation_printed = 0.0
        self._file: TextIO | None = None
        self._file_fails = False
        if log_file is not None:
            Path(log_file).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(
                log_file, "a", encoding="utf-8", errors="backslashreplace", buffering=1
            )
        self._console: PlainConsole | None = None
        self._live: Live | None = None
        if enabled:
            self._console = open_console(stream, soft_wrap=True, kind=_SafeConsole)
            if self._console.is_terminal:
                # No refresh thread: it would be copied into the data loader's forked workers.
                self._live = Live(console=self._console, auto_refresh=False, transient=True)
                self._draw_safely(self._live.start)
                # A run that ends with an error would leave the terminal without its cursor.
                atexit.register(self.close)

    def update(self, record: Mapping[str, Any]) -> None:
        """Show one step.

        Args:
            record: Record of the step in training_log.jsonl: step, loss, grad_norm, skipped
                (bool), ...
        """
        step = record["step"]
        if self._recent and step <= self._recent[-1]["step"]:
            # A rollback: what it has repeated, or left for good, is no part of a mean or a pace.
            self._recent.clear()
            self._pace.clear()
            self._line_step = step - 1
        self.num_skipped += bool(record.get("skipped"))
        self._pace.append((step, time.monotonic()))
        self._recent.append(record)
        progress = (self.total_steps, self.num_skipped, self.eta(), self._metrics)
        due = step % self.log_freq == 0 or step == self.total_steps
        if due:
            since_line = [recent for recent in self._recent if recent["step"] > self._line_step]
            self._line_step = step
            line = format_step(with_mean_losses(record, since_line, self._metrics), *progress)
            self._write_file(line)
            if self._console is not None and self._live is None:
                self._print(line)
        if due or time.monotonic() - self._drawn_at >= _REFRESH_SECONDS:
            means = with_mean_losses(record, self._recent, self._metrics)
            self._draw_live(lambda: self._live_line(_format_live(means, *progress), step))

    def evaluation(self, step: int, done: int, total: int) -> None:
        """Show the progress of an evaluation: in the live line, elsewhere a plain line every half
        minute.

        Args:
            step: Step of the evaluation.
            done: Number of batches done; 0 starts the evaluation.
            total: Number of batches.
        """
        now = time.monotonic()
        if done == 0:
            self._evaluation_started = self._evaluation_printed = now
        left = (
            format_duration((now - self._evaluation_started) / done * (total - done))
            if done
            else "?"
        )
        line = f"eval     step {step}: batch {done} of {total}, eta {left}"
        if now - self._evaluation_printed >= _PLAIN_SECONDS:
            self._evaluation_printed = now
            self._write_file(line)
            if self._live is None:
                self._print(line)
        if done == 0 or now - self._drawn_at >= _REFRESH_SECONDS:
            self._draw_live(lambda: Text(line, no_wrap=True, overflow="ellipsis"))

    def eta(self) -> float | None:
        """Return the seconds left at the pace of the last steps, with pauses; None at first."""
        (first, began), (last, now) = self._pace[0], self._pace[-1]
        if last <= first:
            return None
        left = max(0, self.total_steps - last)
        seconds = (now - began) / (last - first) * left
        return seconds if math.isfinite(seconds) else None

    def message(self, text: str) -> None:
        """Print a line above the live line."""
        text = printable(text)
        self._write_file(text)
        self._print(text)

    def warning(self, text: str) -> None:
        """Print a message that begins with `warning:`, colored on a terminal."""
        text = printable(f"warning: {text}")
        self._write_file(text)
        self._print(Text(text, style="yellow"))

    def error(self, text: str, on_screen: bool = True) -> None:
        """Print a message that begins with `ERROR:`, for searching logs.

        Args:
            on_screen: False if the screen shows it already.
        """
        text = printable(f"ERROR: {text}")
        self._write_file(text)
        if on_screen:
            self._print(Text(text, style="red"))

    def end_live(self) -> None:
        """Leave a plain line of the last step in place of the live one, which an evaluation may
        have overwritten. May be called twice.
        """
        live, self._live = self._live, None
        if live is None:
            return
        atexit.unregister(self.close)
        self._draw_safely(live.stop)
        if self._recent:
            means = with_mean_losses(self._recent[-1], self._recent, self._metrics)
            self._print(
                format_step(means, self.total_steps, self.num_skipped, None, self._metrics)
            )

    def close(self) -> None:
        """Release the terminal and close the log file. May be called twice."""
        self.end_live()
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except (OSError, ValueError) as error:
                self._report_lost_file(file, error)

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_file(self, text: str) -> None:
        """Write to the log file.

        A full disk must not end the run: only rank 0 writes, and the others would wait.
        """
        if self._file is None:
            return
        try:
            self._file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}\n")
            self._file_fails = False
        except (OSError, ValueError) as error:
            self._report_lost_file(self._file, error)

    def _report_lost_file(self, file: TextIO, error: Exception) -> None:
        if not self._file_fails:
            self._file_fails = True
            self._print(
                Text(
                    f"warning: cannot write to {file.name}; will retry with the next line:"
                    f" {error}",
                    style="yellow",
                )
            )

    def _print(self, text: str | Text) -> None:
        console = self._console
        if console is None:
            return
        # A terminal would break lines inside words.
        if console.is_terminal:
            folded = fold(str(text), console.width, _INDENT)
            text = Text(folded, style=text.style) if isinstance(text, Text) else folded
        self._draw_safely(lambda: console.print(text))

    def _draw_live(self, draw: Callable[[], RenderableType]) -> None:
        """Show something in the live line, where there is one."""
        live = self._live
        if live is not None:
            self._drawn_at = time.monotonic()
            content = draw()
            self._draw_safely(lambda: live.update(content, refresh=True))

    def _draw_safely(self, draw: Callable[[], object]) -> None:
        """Draw; after an error, continue the run without the screen.

        Such errors are a closed pipe (`| head`) or terminal, or a full disk under a batch job's
        output.
        """
        try:
            draw()
        except Exception as error:
            console, self._console, live, self._live = self._console, None, self._live, None
            if console is not None:
                _drop_output(console.file)
            if live is not None:
                atexit.unregister(self.close)
                with contextlib.suppress(Exception):
                    live.stop()  # restores sys.stdout and sys.stderr
            text = (
                f"warning: output to this terminal or pipe ends ({type(error).__name__}: {error});"
                " the run continues"
            )
            self._write_file(text)
            see = f", see {self._file.name}" if self._file is not None else ""
            with contextlib.suppress(OSError, ValueError):  # standard error may still be open
                print(text + see, file=sys.stderr, flush=True)

    def _live_line(self, line: str, step: int) -> Table:
        table = Table.grid(padding=(0, 1))
        text = Text(line, no_wrap=True, overflow="ellipsis")
        # The bar is shown only if the fields leave room for it.
        if self._console is not None and self._console.width >= len(line) + _BAR_WIDTH + 1:
            table.add_row(
                text, ProgressBar(total=self.total_steps, completed=step, width=_BAR_WIDTH)
            )
        else:
            table.add_row(text)
        return table
