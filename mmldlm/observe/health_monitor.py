"""`mmldlm monitor RUN`: follows a run's structured log and its events, and says whether it is well."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from mmldlm.config.yaml_reader import read_yaml
from mmldlm.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from mmldlm.observe.console import format_step
from mmldlm.observe.jsonl_log import is_event, is_step, parse_line
from mmldlm.observe.loss_plots import LOG_NAME, find_log
from mmldlm.utils.formatting import for_screen, format_duration

_MAX_LINE = 1 << 20  # bytes; what is longer is no record
_KEPT_EVENTS = 10_000
_NONFINITE = "_nonfinite"  # ending of the key that JsonlLog writes next to a value that JSON cannot hold


@dataclass
class Health:
    """One verdict: the lines to show, and what is wrong (empty: healthy)."""

    lines: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    finished: bool = False


class LogTail:
    """Reads what was added to a log since the last call, whole lines only, in bounded memory.

    Args:
        path: the log. accepts: whether a record has the form that is counted on; others are unreadable.
        wanted: whether a record is kept. keep: so many of the newest; None: all.
    """

    def __init__(
        self,
        path: Path,
        accepts: Callable[[dict], bool] = is_step,
        wanted: Callable[[dict], bool] = lambda record: True,
        keep: int | None = None,
    ):
        self.path, self.accepts, self.wanted = path, accepts, wanted
        self.records: deque[dict[str, Any]] = deque(maxlen=keep)
        self.num_unreadable = self.num_skipped = 0
        self._offset, self._file_id = 0, None

    def read(self) -> int:
        """Take in new lines; returns how many records came. A resumed run replaces its log: all of it is read then."""
        stat = self.path.stat()
        if stat.st_ino != self._file_id or stat.st_size < self._offset:
            self.records.clear()
            self.num_unreadable = self.num_skipped = self._offset = 0
            self._file_id = stat.st_ino
        came = 0
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            while line := file.readline(_MAX_LINE):
                if not line.endswith(b"\n") and len(line) < _MAX_LINE:
                    break  # being written
                self._offset += len(line)
                came += self._take(line)
        return came

    def _take(self, line: bytes) -> bool:
        record = parse_line(line.decode("utf-8", errors="replace"))
        if record is None or not self.accepts(record):
            self.num_unreadable += 1
            return False
        self.num_skipped += bool(record.get("skipped"))
        if is_wanted := self.wanted(record):
            self.records.append(record)
        return is_wanted


def _is_judged(event: dict[str, Any]) -> bool:
    return event["event"] in ("save", "save_failed", "passed_over")


def _is_usable(event: dict[str, Any]) -> bool:
    return is_event(event) and ("step" in event or not _is_judged(event))


def assess(
    records: Sequence[dict[str, Any]],
    now: datetime,
    total_steps: int | None = None,
    window: int = 100,
    stall_seconds: float | None = None,
    num_unreadable: int = 0,
    events: Sequence[dict[str, Any]] = (),
    num_skipped: int | None = None,
) -> Health:
    """Judge the newest `window` steps against those before them.

    Unhealthy is: no step yet; no step for `stall_seconds` (None: 20 usual steps, at least 2 minutes) although the run
    is not at its end; a non-finite loss or gradient norm in an applied step of the window; more than 5 % of the window
    skipped, or of its samples bad; a gradient norm 10 times, or a loss 1.5 times, its usual height before; unreadable
    lines; a save that failed since the last one that did not; an end with another exit code than 0 and 5.

    Args:
        records: of steps, at least two windows of them and one more, or all that there are.
        events: records of events.jsonl, which knows of saves, of steps that a rollback passes over, and of the end.
        num_skipped: steps of the whole run that were skipped. None: those among records.
    """
    health = Health()
    if num_unreadable:
        health.faults.append(f"{num_unreadable} unreadable lines in the log")
    health.faults += _failed_saves(events)
    ended = _end(events)
    if ended is not None:
        health.lines.append(f"  ended with exit code {ended['exit_code']}: {ended.get('reason') or 'done'}")
        if ended["exit_code"] not in (EXIT_DONE, EXIT_INTERRUPTED):
            health.faults.append(f"the run ended with exit code {ended['exit_code']}")
    if not records:
        health.faults.append("no step has been logged yet")
        health.finished = ended is not None
        return health
    recent, earlier = records[-window:], records[:-window]
    last = records[-1]
    # A step that is passed over leaves no record of its own, only an event.
    since = last.get("time", "")
    passed = [e for e in events if e["event"] == "passed_over" and e["step"] > last["step"]]
    passed = [e for e in passed if e.get("time", "") > since]
    reached = max((event["step"] for event in passed), default=last["step"])
    health.finished = ended is not None or (total_steps is not None and reached >= total_steps)
    skipped = [record for record in recent if record.get("skipped")]
    applied = [record for record in recent if not record.get("skipped")]
    nonfinite = Counter(key.removesuffix(_NONFINITE) for r in applied for key in r if key.endswith(_NONFINITE))

    if num_skipped is None:
        num_skipped = sum(bool(record.get("skipped")) for record in records)
    health.lines.append(format_step(last, total_steps, num_skipped))
    for key in ("loss", "grad_norm"):
        here, before = _median(applied, key), _median(earlier[-window:], key)
        if here is None:
            continue
        trend = "" if before is None else f", {before:.4g} before"
        health.lines.append(f"  {key}: median of the last {len(applied)} applied steps {here:.4g}{trend}")
        limit = 10.0 if key == "grad_norm" else 1.5
        if before is not None and before > 0 and here > limit * before:
            health.faults.append(f"{key} rose from {before:.4g} to {here:.4g}")
    for key, count in nonfinite.items():
        if count:
            health.faults.append(f"{count} non-finite values of {key} in the last {len(recent)} steps")
    if skipped:
        health.lines.append(f"  skipped: {len(skipped)} of the last {len(recent)} steps")
    if len(skipped) > 0.05 * len(recent):
        health.faults.append(f"{len(skipped)} of the last {len(recent)} steps were skipped")
    if passed:
        health.lines.append(f"  passed over after a rollback: {len(passed)} steps since, up to {reached}")
    num_bad, num_samples = _bad_samples(recent, earlier)
    if num_bad:
        told = f"{num_bad} of the {num_samples} samples of the last {len(recent)} steps were bad"
        health.lines.append(f"  {told} (bad_sample in events.jsonl names them)")
        if num_bad > 0.05 * num_samples:
            health.faults.append(told)
    health.faults += _stall([*recent, *passed], now, stall_seconds, health)
    return health


def _end(events: Sequence[dict]) -> dict | None:
    """The event with which the run ended; None while it runs, or where it was killed."""
    turns = [event for event in events if event.get("event") in ("start", "resume", "end")]
    return turns[-1] if turns and turns[-1]["event"] == "end" and "exit_code" in turns[-1] else None


def _failed_saves(events: Sequence[dict]) -> list[str]:
    saves = [event for event in events if event["event"] in ("save", "save_failed")]
    since = len(saves) - next((n for n, event in enumerate(reversed(saves)) if event["event"] == "save"), len(saves))
    failed = saves[since:]
    if not failed:
        return []
    times = "once" if len(failed) == 1 else f"{len(failed)} times"
    step, reason = failed[-1]["step"], failed[-1].get("reason")
    return [f"saving has failed {times} since the last checkpoint, at step {step}: {reason}"]


def _bad_samples(recent: Sequence[dict], earlier: Sequence[dict]) -> tuple[int, int]:
    """Bad samples, and all samples, of the newest steps: `samples` counts them from the run's start."""
    if earlier:
        before = earlier[-1].get("samples", 0)
    elif recent[0]["step"] == 1:
        before = 0
    else:  # the log begins in the middle of a run: how many its first step had is not known
        before, recent = recent[0].get("samples", 0), recent[1:]
    num_bad = sum(record.get("bad_samples", 0) for record in recent)
    return num_bad, recent[-1].get("samples", 0) - before if recent else 0


def _stall(recent: Sequence[dict], now: datetime, limit: float | None, health: Health) -> list[str]:
    times = [datetime.fromisoformat(record["time"]) for record in recent if "time" in record]
    if not times:
        return []
    if limit is None:
        paces = [(b - a).total_seconds() for a, b in zip(times, times[1:])]
        limit = max(120.0, 20 * median(paces)) if paces else 600.0
    idle = max(0.0, (now - times[-1]).total_seconds())
    health.lines.append("  finished" if health.finished else f"  last step {format_duration(idle)} ago")
    if health.finished or idle <= limit:
        return []
    return [f"STALLED: no step for {format_duration(idle)} (limit {format_duration(limit)})"]


def _median(records: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [record[key] for record in records if isinstance(record.get(key), (int, float))]
    return median(values) if values else None


def _total_steps(run_dir: Path) -> int | None:
    path = run_dir / "config.yaml"
    if not path.is_file():
        return None
    training = read_yaml(path).get("training")
    total = training.get("num_train_steps") if isinstance(training, dict) else None
    return total if type(total) is int else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `mmldlm monitor`."""
    parser.add_argument("run", help="the run's folder: {logging.save_dir}/{logging.run_name}")
    parser.add_argument("--once", action="store_true", help="one report, then exit (1 where the run is unhealthy)")
    parser.add_argument("--interval", type=float, default=10.0, help="seconds between two looks (default 10)")
    parser.add_argument("--window", type=int, default=100, help="steps that are judged (default 100)")
    parser.add_argument("--stall-seconds", type=float, help="idle time that counts as stalled")


def main(args: argparse.Namespace) -> int:
    """Report until the run ends (or once); returns 0 healthy, 1 unhealthy at the last report."""
    run_dir = Path(args.run)
    tail = LogTail(find_log(run_dir, LOG_NAME), keep=2 * args.window + 1)
    events = LogTail(run_dir / "events.jsonl", _is_usable, _is_judged, keep=_KEPT_EVENTS)
    health, shown = Health(), None
    try:
        while True:
            came = tail.read() + (events.read() if events.path.is_file() else 0)
            total = _total_steps(run_dir)
            now = datetime.now(timezone.utc)
            unreadable = tail.num_unreadable + events.num_unreadable
            health = assess(
                list(tail.records), now, total, args.window, args.stall_seconds, unreadable, events.records,
                tail.num_skipped,
            )  # fmt: skip
            # Without news only a change of the verdict is worth a line.
            if came or shown != bool(health.faults):
                shown = bool(health.faults)
                verdict = "UNHEALTHY: " + "; ".join(health.faults) if health.faults else "HEALTHY"
                print(for_screen("\n".join([*health.lines, verdict]), sys.stdout), flush=True)
            if args.once or health.finished:
                break
            time.sleep(args.interval)
    except KeyboardInterrupt:
        pass
    return EXIT_FAILED if health.faults else EXIT_DONE
