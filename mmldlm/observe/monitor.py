"""Follow a run's log and events, and report whether the run is healthy."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

from mmldlm.config.yaml_reader import read_yaml
from mmldlm.errors import EXIT_DONE, EXIT_INTERRUPTED
from mmldlm.observe.console import format_step
from mmldlm.observe.jsonl_log import LogTail, is_event
from mmldlm.observe.plots import find_log
from mmldlm.utils.formatting import for_screen, format_duration
from mmldlm.utils.run_files import CONFIG, EVENTS, STEPS

_MAX_EVENTS = 10_000
# Suffix of the key that JsonlLog writes next to a value that JSON cannot hold.
_NONFINITE = "_nonfinite"
# A median this many times its earlier value is a problem.
_MAX_RISE = {"loss": 1.5, "grad_norm": 10.0}
_MAX_CLOCK_DIFFERENCE = 10.0  # seconds between two hosts that are not worth a line
_MAX_BAD_FRACTION = 0.05  # fraction of steps skipped, or of samples bad


@dataclass
class Health:
    """One assessment.

    Attributes:
        messages: Lines to print.
        problems: Sentences on what is wrong; empty if the run is healthy.
        finished: Whether the run has ended.
    """

    messages: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    finished: bool = False


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
    """Assess the newest `window` steps in comparison with those before them.

    Problems are: no step yet; neither a step nor a start or resume for `stall_seconds` (None: 20
    usual steps, at least 2 minutes) in an unfinished run, or ten times that behind its last step;
    a non-finite loss or gradient norm in an applied step of the window; more than 5 % of the
    window skipped, or of its samples bad; a median gradient norm 10 times, or loss 1.5 times, its
    earlier value; unreadable lines; failed saves since the last successful one; an exit code other
    than 0 and 5.

    Args:
        records: Step records, at least 2 * window + 1, or all.
        events: Records of events.jsonl: saves, steps excluded after a rollback, the end of the
            run.
        num_skipped: Number of skipped steps of the entire run; None counts those in records.
    """
    health = Health()
    if num_unreadable:
        health.problems.append(f"{num_unreadable} unreadable lines in the log")
    health.problems += _failed_saves(events)
    turns = [event for event in events if event.get("event") in ("start", "resume", "end")]
    has_ended = _assess_end(turns, health)
    if not records:
        health.problems.append("no step has been logged yet")
        health.finished = has_ended
        return health
    recent, earlier = records[-window:], records[:-window]
    last = records[-1]
    excluded = _excluded_steps(events, last)
    reached = max((event["step"] for event in excluded), default=last["step"])
    # The last step is followed by an evaluation, a checkpoint and the event `end`, which a log
    # without any such event cannot tell.
    is_last = total_steps is not None and reached >= total_steps
    health.finished = has_ended or (is_last and not turns)
    if num_skipped is None:
        num_skipped = sum(bool(record.get("skipped")) for record in records)
    health.messages.append(format_step(last, total_steps, num_skipped))
    _assess_metrics(recent, earlier[-window:], health)
    _assess_skips(recent, health)
    if excluded:
        health.messages.append(
            f"  excluded after a rollback: {len(excluded)} steps since, up to {reached}"
        )
    _assess_samples(recent, earlier, health)
    _assess_pace([*recent, *excluded], events, now, stall_seconds, health, is_last)
    return health


def _assess_end(turns: Sequence[dict], health: Health) -> bool:
    """Report how the run ended; return False while it runs, or if it was killed.

    Args:
        turns: The events of its starts and ends.
    """
    if not turns or turns[-1]["event"] != "end" or "exit_code" not in turns[-1]:
        return False
    code = turns[-1]["exit_code"]
    health.messages.append(f"  ended with exit code {code}: {turns[-1].get('reason') or 'done'}")
    if code not in (EXIT_DONE, EXIT_INTERRUPTED):
        health.problems.append(f"the run ended with exit code {code}")
    return True


def _excluded_steps(events: Sequence[dict], last: dict) -> list[dict]:
    """Return the events of steps excluded since the last record; such a step has no record of its
    own.
    """
    since = last.get("time", "")
    excluded = [
        event
        for event in events
        if event["event"] == "passed_over" and event["step"] > last["step"]
    ]
    return [event for event in excluded if event.get("time", "") > since]


def _assess_metrics(recent: Sequence[dict], earlier: Sequence[dict], health: Health) -> None:
    applied = [record for record in recent if not record.get("skipped")]
    for key, max_rise in _MAX_RISE.items():
        value, before = _median(applied, key), _median(earlier, key)
        if value is None:
            continue
        trend = "" if before is None else f", {before:.4g} before"
        health.messages.append(
            f"  {key}: median of the last {len(applied)} applied steps {value:.4g}{trend}"
        )
        if before is not None and before > 0 and value > max_rise * before:
            health.problems.append(f"{key} rose from {before:.4g} to {value:.4g}")
    nonfinite = Counter(key for record in applied for key in record if key.endswith(_NONFINITE))
    for key, count in nonfinite.items():
        metric = key.removesuffix(_NONFINITE)
        health.problems.append(
            f"{count} non-finite values of {metric} in the last {len(recent)} steps"
        )


def _assess_skips(recent: Sequence[dict], health: Health) -> None:
    num_skipped = sum(bool(record.get("skipped")) for record in recent)
    if num_skipped:
        health.messages.append(f"  skipped: {num_skipped} of the last {len(recent)} steps")
    if num_skipped > _MAX_BAD_FRACTION * len(recent):
        health.problems.append(f"{num_skipped} of the last {len(recent)} steps were skipped")


def _assess_samples(recent: Sequence[dict], earlier: Sequence[dict], health: Health) -> None:
    num_bad, num_samples = _bad_samples(recent, earlier)
    if not num_bad:
        return
    message = f"{num_bad} of the {num_samples} samples of the last {len(recent)} steps were bad"
    health.messages.append(f"  {message} (see bad_sample in events.jsonl)")
    if num_bad > _MAX_BAD_FRACTION * num_samples:
        health.problems.append(message)


def _bad_samples(recent: Sequence[dict], earlier: Sequence[dict]) -> tuple[int, int]:
    """Return (bad, all) samples of the newest steps; the field `samples` counts from the start of
    the run.
    """
    if earlier:
        before = earlier[-1].get("samples", 0)
    elif recent[0]["step"] == 1:
        before = 0
    else:
        # The log begins in the middle of a run: the samples of its first step are unknown.
        before, recent = recent[0].get("samples", 0), recent[1:]
    num_bad = sum(record.get("bad_samples", 0) for record in recent)
    return num_bad, recent[-1].get("samples", 0) - before if recent else 0


def _failed_saves(events: Sequence[dict]) -> list[str]:
    saves = [event for event in events if event["event"] in ("save", "save_failed")]
    since = len(saves) - next(
        (n for n, event in enumerate(reversed(saves)) if event["event"] == "save"), len(saves)
    )
    failed = saves[since:]
    if not failed:
        return []
    times = "once" if len(failed) == 1 else f"{len(failed)} times"
    step, reason = failed[-1]["step"], failed[-1].get("reason")
    return [f"saving has failed {times} since the last checkpoint, at step {step}: {reason}"]


def _assess_pace(
    recent: Sequence[dict],
    events: Sequence[dict],
    now: datetime,
    limit: float | None,
    health: Health,
    is_last: bool,
) -> None:
    times = _times(recent)
    if not times:
        return
    if limit is None:
        intervals = [(b - a).total_seconds() for a, b in zip(times, times[1:])]
        limit = max(120.0, 20 * median(intervals)) if intervals else 600.0
        if is_last:  # an evaluation, a save, plots and uploads follow
            limit *= 10
    since_step = max(0.0, (now - times[-1]).total_seconds())
    health.messages.append(
        "  finished" if health.finished else f"  last step {format_duration(since_step)} ago"
    )
    # A run that was just taken up has not had the time for a step.
    starts = _times([event for event in events if event["event"] in ("start", "resume")])
    idle = (now - max([times[-1], *starts])).total_seconds()
    if not health.finished and idle > limit:
        health.problems.append(
            f"STALLED: no step for {format_duration(idle)} (limit {format_duration(limit)})"
        )


def _times(records: Sequence[dict]) -> list[datetime]:
    return [datetime.fromisoformat(record["time"]) for record in records if "time" in record]


def _median(records: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [record[key] for record in records if isinstance(record.get(key), (int, float))]
    return median(values) if values else None


def _is_monitored(event: dict[str, Any]) -> bool:
    return event["event"] in ("save", "save_failed", "passed_over", "start", "resume", "end")


def _is_valid(event: dict[str, Any]) -> bool:
    return is_event(event) and (
        "step" in event or event["event"] not in ("save", "save_failed", "passed_over")
    )


def _total_steps(run_dir: Path) -> int | None:
    path = run_dir / CONFIG
    if not path.is_file():
        return None
    training = read_yaml(path).get("training")
    total = training.get("num_train_steps") if isinstance(training, dict) else None
    return total if type(total) is int else None


def _now_of_the_run(*tails: LogTail) -> datetime:
    """Return the present time by the clock of the run's host: that of the last record of a log,
    and the age of the log.

    The age is taken from one clock, that of the file system: between the log's last change and a
    file written now. A log that changed after its last record, as one that a resume cut, gives an
    earlier time; the latest counts.
    """
    present = time.time()
    with (
        contextlib.suppress(OSError),
        tempfile.NamedTemporaryFile(dir=tails[0].path.parent, prefix=".clock_") as probe,
    ):
        present = os.stat(probe.name).st_mtime
    times = [
        last + timedelta(seconds=max(present - tail.path.stat().st_mtime, 0))
        for tail in tails
        for last in _times(tail.records)[-1:]
    ]
    return max(times, default=datetime.now(UTC))


def follow(
    run_dir: Path,
    once: bool = False,
    interval: float = 10.0,
    window: int = 100,
    stall_seconds: float | None = None,
) -> Health:
    """Print assessments until the run ends, or one; return the last.

    Args:
        interval: Seconds between two reads of the log.

    Raises:
        UserError: the folder is not that of a run.
    """
    tail = LogTail(find_log(run_dir, STEPS), keep=2 * window + 1)
    events = LogTail(run_dir / EVENTS, _is_valid, _is_monitored, keep=_MAX_EVENTS)
    health, was_unhealthy = Health(), None
    try:
        while True:
            num_new = tail.read() + (events.read() if events.path.is_file() else 0)
            now = _now_of_the_run(tail, events)
            health = assess(
                list(tail.records),
                now,
                _total_steps(run_dir),
                window,
                stall_seconds,
                tail.num_unreadable + events.num_unreadable,
                events.records,
                tail.num_skipped,
            )
            difference = (now - datetime.now(UTC)).total_seconds()
            if abs(difference) > _MAX_CLOCK_DIFFERENCE:
                direction = "ahead of" if difference > 0 else "behind"
                health.messages.append(
                    f"  the clock of the run's host is {format_duration(abs(difference))}"
                    f" {direction} this one, or the log was copied"
                )
            # Without new records, only a changed assessment is printed.
            if num_new or was_unhealthy != bool(health.problems):
                was_unhealthy = bool(health.problems)
                summary = (
                    "UNHEALTHY: " + "; ".join(health.problems) if health.problems else "HEALTHY"
                )
                print(for_screen("\n".join([*health.messages, summary]), sys.stdout), flush=True)
            if once or health.finished:
                break
            time.sleep(interval)
    except KeyboardInterrupt:
        pass
    return health
