"""Logs with one strict-JSON object per line (training_log.jsonl, eval_log.jsonl, events.jsonl):
append, read, and follow a log that is being written.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mmldlm.utils.atomic_files import atomic_file
from mmldlm.utils.input_files import open_append, open_regular, open_text
from mmldlm.utils.json_files import to_strict_json

# Fields of a step's record that readers compute with; others are only displayed.
_COUNTS = ("step", "samples", "bad_samples")
_NUMBERS = ("loss", "grad_norm", "lr", "tokens_per_second", "mfu", "data_share")


class JsonlLog:
    """A log whose complete lines stay valid if the run is interrupted.

    A non-finite number becomes null with a second key: `{"loss": null, "loss_nonfinite": "nan"}`.
    A record without `time` gets the current one (ISO 8601, UTC). Only one process may write a log.

    Args:
        path: Path of the file; its folder is created.
        resume_step: Step after which the run continues. Records of later steps are moved to
            `NAME.dropped-<n>.jsonl` in the same folder; 0 moves all of them (a fresh start in a
            used folder). Records without a `step` stay. None appends to an existing log.
    """

    def __init__(self, path: str | os.PathLike, resume_step: int | None = None):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _truncate(self.path, resume_step)
        self._file = open_append(self.path)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record and flush it to the operating system.

        Raises:
            TypeError, ValueError: a value that JSON cannot represent.
        """
        plain = to_strict_json(record)
        plain.setdefault("time", datetime.now(UTC).isoformat(timespec="milliseconds"))
        self._file.write(json.dumps(plain, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> JsonlLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def parse_line(line: str) -> dict[str, Any] | None:
    """Return the record of one line, or None for an incomplete line or invalid strict JSON."""
    try:
        record = _DECODER.decode(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def is_step(record: Mapping[str, Any]) -> bool:
    """Whether a record is that of a step, with values of the expected types."""
    are_counts = all(_is_count(record.get(key, 0)) for key in _COUNTS)
    are_numbers = all(_is_number(record.get(key)) for key in _NUMBERS)
    return "step" in record and are_counts and are_numbers and _has_valid_time(record)


def is_event(record: Mapping[str, Any]) -> bool:
    """Whether a record is an event; its `step` and `time`, if any, have the expected types."""
    return (
        isinstance(record.get("event"), str)
        and _is_count(record.get("step", 0))
        and _has_valid_time(record)
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 63


def _is_number(value: Any) -> bool:
    return value is None or type(value) is float or _is_count(value)


def _has_valid_time(record: Mapping[str, Any]) -> bool:
    """Whether the time is missing, or in ISO 8601 with a time zone."""
    if "time" not in record:
        return True
    try:
        return datetime.fromisoformat(record["time"]).tzinfo is not None
    except (TypeError, ValueError):
        return False


def iterate_records(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """Yield the records of a log one after another; unreadable lines are left out."""
    with open_text(path, errors="replace") as file:
        for line in file:
            if line.strip() and (record := parse_line(line)) is not None:
                yield record


def _reject_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)


def _truncate(path: Path, resume_step: int | None) -> None:
    """Move incomplete lines and steps after resume_step to a separate file."""
    if not path.exists():
        return
    with open_text(path, errors="replace") as file:
        are_dropped = any(_is_dropped(line, resume_step) for line in file)
    if are_dropped:
        # The moved lines are on disk before the log is replaced, so a crash in between loses
        # nothing.
        _copy_lines(path, _unused_path(path), lambda line: _is_dropped(line, resume_step))
        _copy_lines(path, path, lambda line: not _is_dropped(line, resume_step))


def _is_dropped(line: str, resume_step: int | None) -> bool:
    record = parse_line(line)
    step = record.get("step") if record else None
    is_later = resume_step is not None and isinstance(step, (int, float)) and step > resume_step
    # A line without a newline may be cut inside a number and still parse.
    return record is None or is_later or not line.endswith("\n")


def _copy_lines(path: Path, copy: Path, is_copied: Callable[[str], bool]) -> None:
    """Write the lines of a log for which is_copied is true to another file, or in its place."""
    with open_text(path, errors="replace") as file, atomic_file(copy) as out:
        out.writelines((line.rstrip("\n") + "\n").encode() for line in file if is_copied(line))


def _unused_path(path: Path) -> Path:
    n = 1
    while (free := path.with_name(f"{path.stem}.dropped-{n}{path.suffix}")).exists():
        n += 1
    return free


_MAX_LINE = 1 << 20  # bytes; a longer line is not a record


class LogTail:
    """Read the complete lines added to a log since the last call, in bounded memory.

    Args:
        path: Path of the log.
        is_valid: Predicate for records of the expected form; others count as unreadable.
        is_relevant: Predicate for valid records to keep.
        keep: Maximum number of records kept, the newest ones; None keeps all.
    """

    def __init__(
        self,
        path: Path,
        is_valid: Callable[[dict], bool] = is_step,
        is_relevant: Callable[[dict], bool] = lambda record: True,
        keep: int | None = None,
    ):
        self.path, self.is_valid, self.is_relevant = path, is_valid, is_relevant
        self.records: deque[dict[str, Any]] = deque(maxlen=keep)
        self.num_unreadable = self.num_skipped = 0
        self._offset = 0
        self._file_id: int | None = None  # inode

    def read(self) -> int:
        """Read new lines; return the number of new records.

        A resumed run replaces its log, which is then read from the start.
        """
        stat = self.path.stat()
        if stat.st_ino != self._file_id or stat.st_size < self._offset:
            self.records.clear()
            self.num_unreadable = self.num_skipped = self._offset = 0
            self._file_id = stat.st_ino
        num_new = 0
        with open_regular(self.path) as file:
            file.seek(self._offset)
            while line := file.readline(_MAX_LINE):
                if not line.endswith(b"\n") and len(line) < _MAX_LINE:
                    break  # incomplete
                self._offset += len(line)
                num_new += self._add(line)
        return num_new

    def _add(self, line: bytes) -> bool:
        record = parse_line(line.decode("utf-8", errors="replace"))
        if record is None or not self.is_valid(record):
            self.num_unreadable += 1
            return False
        self.num_skipped += bool(record.get("skipped"))
        if is_relevant := self.is_relevant(record):
            self.records.append(record)
        return is_relevant
