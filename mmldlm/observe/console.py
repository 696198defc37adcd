"""How a run shows itself: one live line in a terminal, plain lines in pipes and in the log file."""

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
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mmldlm.tasks.base import Metric
from mmldlm.utils.formatting import fold, format_duration

# What a line shows of a step's record: key, word on the screen, format.
_FIELDS = (
    ("grad_norm", "grad_norm", "#.3g"),
    ("lr", "lr", ".1e"),
    ("tokens_per_second", "tok/s", ".0f"),
    ("mfu", "mfu", ".1%"),
    ("data_share", "data wait", ".0%"),
)
LATEST_LOG = "latest.log"
_WINDOW = 100  # steps over which the pace is taken
_REFRESH_SECONDS = 0.1
_PLAIN_SECONDS = 30.0  # between two plain lines of one evaluation
_BAR_WIDTH = 16
_INDENT = " " * 9  # as wide as the word before a message: `model    `, `data     `


def train_log_path(run_dir: str | Path, node: int = 0) -> Path:
    """logs/train_YYYYMMDD_HHMMSS_node{n}.log under the run's folder, named by local time."""
    return Path(run_dir) / "logs" / f"train_{datetime.now():%Y%m%d_%H%M%S}_node{node}.log"


def link_latest(log: Path) -> None:
    """Point logs/latest.log at the newest training log.

    Raises:
        OSError: a file system without links.
    """
    beside = log.with_name(f".latest_{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(log.name)
    os.replace(beside, log.with_name(LATEST_LOG))


class _SafeConsole(Console):
    """rich ends the process when nobody reads its output any more; here that is the caller's to decide."""

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError being handled


def _drop_output(stream: TextIO) -> None:
    """What the stream still holds would raise again when Python flushes it at exit: it goes to /dev/null."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def format_step(
    record: Mapping[str, Any],
    total_steps: int | None,
    num_skipped: int,
    eta: float | None = None,
    metrics: Sequence[Metric] = (),
) -> str:
    """One grep-able line of a step's record; fields that the record lacks or holds as None are left out."""
    parts = [f"step {record['step']}" + (f"/{total_steps}" if total_steps else "")]
    parts += [f"{word}: {value}" for word, value in _format_fields(record, metrics)]
    parts.append(f"skipped: {num_skipped}")
    if eta is not None:
        parts.append(f"eta: {format_duration(eta)}")
    return " | ".join(parts)


def _format_fields(record: Mapping[str, Any], metrics: Sequence[Metric]) -> Iterator[tuple[str, str]]:
    losses = [("loss", "loss"), *((metric.name, metric.label) for metric in metrics if metric.label)]
    for key, word, form in (*((key, word, "#.4g") for key, word in losses), *_FIELDS):
        value = record.get(key)
        if value is not None:
            yield word, f"{value:{form}}"
        elif f"{key}_nonfinite" in record:
            yield word, record[f"{key}_nonfinite"]


def _format_live(
    record: Mapping[str, Any], total_steps: int, num_skipped: int, eta: float | None, metrics: Sequence[Metric]
) -> str:
    """The same in fewer columns, the time left near the front: a narrow terminal cuts the end."""
    left = f" eta {format_duration(eta)}" if eta is not None else ""
    figures = "  ".join(f"{word} {value}" for word, value in _format_fields(record, metrics))
    return f"{record['step']}/{total_steps}{left}  {figures}  skipped {num_skipped}"


class Console:
    """Shows the steps of a run and takes its messages.

    Args:
        total_steps: the last step of the run.
        enabled: whether this process writes to the screen (rank 0).
        log_freq: steps between two plain lines. A terminal shows every step in its live line instead.
        log_file: receives the plain lines and all messages, with the time of day; also where enabled is False.
        start_step: step after which this process begins (resume).
        stream: where to show (default: standard output).
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
        """Steps this process saw with a true `skipped`."""
        self._pace: deque[tuple[int, float]] = deque([(start_step, time.monotonic())], maxlen=_WINDOW + 1)
        self._shown_at = 0.0
        self._part_began = self._part_shown = 0.0
        self._file: TextIO | None = None
        self._file_fails = False
        if log_file is not None:
            Path(log_file).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(log_file, "a", encoding="utf-8", buffering=1)
        self._console: Console | None = None
        self._live: Live | None = None
        if enabled:
            self._console = _SafeConsole(file=stream or sys.stdout, highlight=False, markup=False, soft_wrap=True)
            if self._console.is_terminal:
                # Refreshed by hand: a refreshing thread would be copied into the data loader's forked workers.
                self._live = Live(console=self._console, auto_refresh=False)
                self._try_screen(self._live.start)
                # A run that ends by an error closes nothing, and would leave the terminal without its cursor.
                atexit.register(self.close)

    def update(self, record: Mapping[str, Any]) -> None:
        """Show one step. `record` is what training_log.jsonl gets: step, loss, grad_norm, skipped (bool), ..."""
        step = record["step"]
        self.num_skipped += bool(record.get("skipped"))
        self._pace.append((step, time.monotonic()))
        shown = (record, self.total_steps, self.num_skipped, self.eta(), self._metrics)
        due = step % self.log_freq == 0 or step == self.total_steps
        if due:
            line = format_step(*shown)
            self._to_file(line)
            if self._console is not None and self._live is None:
                self._show(line)
        if self._live is not None and (due or time.monotonic() - self._shown_at >= _REFRESH_SECONDS):
            self._shown_at = time.monotonic()
            line = self._line(_format_live(*shown), step)
            self._try_screen(lambda: self._live.update(line, refresh=True))

    def evaluation(self, step: int, done: int, total: int) -> None:
        """Show how far an evaluation is: in the live line, elsewhere a plain line every half minute.

        Args:
            done: batches that are done, from 0 on. total: batches of the evaluation.
        """
        now = time.monotonic()
        if done == 0:
            self._part_began = self._part_shown = now
        left = format_duration((now - self._part_began) / done * (total - done)) if done else "?"
        line = f"eval     step {step}: batch {done} of {total}, eta {left}"
        if now - self._part_shown >= _PLAIN_SECONDS:
            self._part_shown = now
            self._to_file(line)
            if self._live is None:
                self._show(line)
        if self._live is not None and (done == 0 or now - self._shown_at >= _REFRESH_SECONDS):
            self._shown_at = now
            self._try_screen(lambda: self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True))

    def eta(self) -> float | None:
        """Seconds left at the pace of the last steps (pauses for evaluation and checkpoints count), None at first."""
        (first, began), (last, now) = self._pace[0], self._pace[-1]
        if last <= first:
            return None
        left = max(0, self.total_steps - last)
        seconds = (now - began) / (last - first) * left
        return seconds if math.isfinite(seconds) else None

    def message(self, text: str) -> None:
        """Print a line of its own without breaking the live line."""
        self._to_file(text)
        self._show(text)

    def warning(self, text: str) -> None:
        """A message that begins with `warning:` and stands out in a terminal."""
        text = f"warning: {text}"
        self._to_file(text)
        self._show(Text(text, style="yellow"))

    def error(self, text: str, on_screen: bool = True) -> None:
        """A message that begins with `ERROR:`, the word that people search logs for.

        Args:
            on_screen: False where the screen shows it already.
        """
        text = f"ERROR: {text}"
        self._to_file(text)
        if on_screen:
            self._show(Text(text, style="red"))

    def close(self) -> None:
        """Leave the last line standing and give the terminal back. May be called twice."""
        live, self._live = self._live, None
        if live is not None:
            self._try_screen(live.stop)
            atexit.unregister(self.close)
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._say_lost(file, error)

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _to_file(self, text: str) -> None:
        """A full disk must not end the run: only rank 0 writes here, and the others would wait for it."""
        if self._file is None:
            return
        try:
            self._file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}\n")
            self._file_fails = False
        except OSError as error:
            self._say_lost(self._file, error)

    def _say_lost(self, file: TextIO, error: OSError) -> None:
        if not self._file_fails:
            self._file_fails = True
            self._show(Text(f"warning: {file.name} cannot be written (each line tries again): {error}", style="yellow"))

    def _show(self, text: str | Text) -> None:
        if self._console is None:
            return
        if self._console.is_terminal:  # a terminal alone would break inside words
            folded = fold(str(text), self._console.width, _INDENT)
            text = Text(folded, style=text.style) if isinstance(text, Text) else folded
        self._try_screen(lambda: self._console.print(text))

    def _try_screen(self, draw: Callable[[], object]) -> None:
        """A reader that has left (`| head`), a closed terminal, a full disk under a batch job's output: rank 0 alone
        sees them, and the run goes on without the screen."""
        try:
            draw()
        except (OSError, ValueError) as error:
            stream, self._console, live, self._live = self._console.file, None, self._live, None
            _drop_output(stream)
            if live is not None:
                atexit.unregister(self.close)
                with contextlib.suppress(OSError, ValueError):
                    live.stop()  # gives back sys.stdout and sys.stderr
            text = f"warning: nothing more is shown here ({type(error).__name__}: {error}); the run goes on"
            self._to_file(text)
            see = f", see {self._file.name}" if self._file is not None else ""
            with contextlib.suppress(OSError, ValueError):  # standard error may have another reader
                print(text + see, file=sys.stderr, flush=True)

    def _line(self, line: str, step: int) -> Table:
        table = Table.grid(padding=(0, 1))
        text = Text(line, no_wrap=True, overflow="ellipsis")
        # The bar is a comfort: it gives way where the figures need the width.
        if self._console is not None and self._console.width >= len(line) + _BAR_WIDTH + 1:
            table.add_row(text, ProgressBar(total=self.total_steps, completed=step, width=_BAR_WIDTH))
        else:
            table.add_row(text)
        return table
