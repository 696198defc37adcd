"""Follow a JSON Lines log while another process appends to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmldlm.observe.jsonl_log import is_step, parse_line
from mmldlm.utils.input_files import open_regular

_MAX_LINE = 1 << 20  # bytes; a longer line is not a record


class LogTail:
    """Read the complete lines added to a log since the last call, in bounded memory.

    Args:
        path: the log.
        is_valid: whether a record has the expected form; others count as unreadable.
        is_relevant: whether a valid record is kept.
        keep: maximum number of records kept, the newest ones; None keeps all.
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
        self._offset, self._file_id = 0, None

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
