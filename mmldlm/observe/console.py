"""Show the progress of a run: a live line on a terminal, plain lines in pipes and in the
log file.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any, TextIO

from mmldlm.tasks.base import Metric
from mmldlm.utils.formatting import for_screen, format_duration, printable
from mmldlm.utils.run_files import LATEST_LOG, LOGS
from mmldlm.utils.streams import ERASE_LINE, is_terminal

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
_INDENT = " " * 9  # width of the label of a message: `model    `, `data     `
_STYLES = {"warning": "\x1b[33m", "ERROR": "\x1b[31m"}  # yellow and red
_PLAIN = "\x1b[0m"


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
    """Format a step's record as one line for grep; missing fields and None are omitted.

    The time left stands in front, because a narrow terminal cuts the end.
    """
    parts = [f"step {record['step']}" + (f"/{total_steps}" if total_steps else "")]
    if eta is not None:
        parts.append(f"eta: {format_duration(eta)}")
    parts += [f"{label}: {value}" for label, value in _format_fields(record, metrics)]
    parts.append(f"skipped: {num_skipped}")
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
        log_file: File to which the plain lines and all messages are appended with a timestamp,
            even if enabled is False.
        start_step: Step after which this process starts (resume).
        stream: Output stream (default: standard output).
        metrics: Metrics of the task, of which those with a label are shown.
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
        self._evaluation_printed = 0.0
        self._file: TextIO | None = None
        self._file_fails = False
        if log_file is not None:
            Path(log_file).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(
                log_file, "a", encoding="utf-8", errors="backslashreplace", buffering=1
            )
        self._screen = (stream or sys.stdout) if enabled else None
        self._is_live = self._screen is not None and is_terminal(self._screen)
        self._is_drawn = False  # whether the live line stands on the terminal

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
        due = step % self.log_freq == 0 or step == self.total_steps
        if due:
            since_line = [recent for recent in self._recent if recent["step"] > self._line_step]
            self._line_step = step
            line = self._format_means(since_line)
            self._write_file(line)
            if not self._is_live:
                self._print(line)
        if self._is_live and (due or time.monotonic() - self._drawn_at >= _REFRESH_SECONDS):
            self._draw_live(self._format_means(self._recent))

    def _format_means(self, steps: Sequence[Mapping[str, Any]]) -> str:
        means = with_mean_losses(self._recent[-1], steps, self._metrics)
        return format_step(means, self.total_steps, self.num_skipped, self.eta(), self._metrics)

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
            self._evaluation_printed = now
        line = f"eval     step {step}: batch {done} of {total}"
        if now - self._evaluation_printed >= _PLAIN_SECONDS:
            self._evaluation_printed = now
            self._write_file(line)
            if not self._is_live:
                self._print(line)
        if self._is_live and (done == 0 or now - self._drawn_at >= _REFRESH_SECONDS):
            self._draw_live(line)

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
        self.message(f"warning: {text}")

    def error(self, text: str, on_screen: bool = True) -> None:
        """Print a message that begins with `ERROR:`, for searching logs.

        Args:
            on_screen: False if the screen shows it already.
        """
        text = printable(f"ERROR: {text}")
        self._write_file(text)
        if on_screen:
            self._print(text)

    def end_live(self) -> None:
        """Leave a plain line of the last step in place of the live one, which an evaluation may
        have overwritten. May be called twice.
        """
        if self._is_live and self._recent:
            self._print(self._format_means(self._recent))
        self._is_live = False

    def close(self) -> None:
        """End the live line and close the log file. May be called twice."""
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
                f"warning: cannot write to {file.name}; will retry with the next line: {error}"
            )

    def _print(self, text: str) -> None:
        """Print a line on the screen, above the live line; on a terminal in its color."""
        if self._screen is None:
            return
        # A terminal would break lines inside words.
        text = for_screen(text, self._screen, _INDENT)
        style = _STYLES.get(text.partition(":")[0]) if is_terminal(self._screen) else None
        self._write_screen((f"{style}{text}{_PLAIN}" if style else text) + "\n")

    def _draw_live(self, line: str) -> None:
        """Show a line in place of the live one."""
        self._drawn_at = time.monotonic()
        self._write_screen(printable(line)[: shutil.get_terminal_size().columns - 1])
        self._is_drawn = True

    def _write_screen(self, text: str) -> None:
        """Write in place of the live line, where one stands; after an error, continue the run
        without the screen.

        Such errors are a closed pipe (`| head`) or terminal, or a full disk under a batch job's
        output.
        """
        screen, erase = self._screen, ERASE_LINE if self._is_drawn else ""
        if screen is None:
            return
        self._is_drawn = False
        try:
            screen.write(erase + text)
            screen.flush()
        except (OSError, ValueError) as error:
            self._screen, self._is_live = None, False
            _drop_output(screen)
            text = (
                f"warning: output to this terminal or pipe ends ({type(error).__name__}: {error});"
                " the run continues"
            )
            self._write_file(text)
            see = f", see {self._file.name}" if self._file is not None else ""
            with contextlib.suppress(OSError, ValueError):  # standard error may still be open
                print(text + see, file=sys.stderr, flush=True)
