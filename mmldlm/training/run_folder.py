"""The folder of a run: its lock, its logs and what the screen shows (its checkpoints:
checkpointer.py).

RUN/.lock is held by rank 0, so that only one job at a time trains in the folder. Two jobs (the
default logging.run_name, a requeued job next to one that was believed dead) would overwrite each
other's logs and delete each other's checkpoints, both with exit 0. The lock names host and
process; its mtime is renewed while that process lives. On the holder's host it is free as soon as
the process has exited. Another host watches it: it is free when it has not changed for
STALE_AFTER seconds. Clocks of two hosts are never compared.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mmldlm.config.load import to_yaml, with_absolute_paths
from mmldlm.config.schema import Config
from mmldlm.data.run_data import RunData
from mmldlm.errors import UserError
from mmldlm.observe.console import Console, link_latest, train_log_path
from mmldlm.observe.jsonl_log import JsonlLog
from mmldlm.observe.trackers.base import TrackedRun
from mmldlm.observe.trackers.registry import Trackers
from mmldlm.tasks.base import Metric, Task
from mmldlm.training.state import TrainingState
from mmldlm.utils.atomic_files import write_text
from mmldlm.utils.environment import int_from_env
from mmldlm.utils.formatting import describe_os_error, first_line
from mmldlm.utils.input_files import read_bytes
from mmldlm.utils.run_files import CONFIG, EVALUATIONS, EVENTS, LAYERS, LOCK, SAMPLES, STEPS

# Seconds of watching without a renewal after which a holder on another host counts as dead.
STALE_AFTER = 180.0
RENEW_INTERVAL = 20.0  # seconds between two renewals
# Seconds for a process on this host to exit: the previous job may just have been killed.
EXIT_GRACE = 10.0
# Seconds for a file of rank 0 to reach the other hosts: NFS keeps what it knows of a folder for as
# long as a minute.
VISIBLE_SECONDS = 60.0
_POLL = 0.5
_MAX_BYTES = 1 << 20  # size of a lock
_MOST_VANISHED = 20  # times that a lock may exist when it is created and be gone when it is read
_FIELDS: dict[str, tuple[type, ...]] = {
    "host": (str,),
    "pid": (int,),
    "started": (str,),
    "restarts": (int,),
    "place": (list,),
    "job": (str, type(None)),
    "born": (str, type(None)),
}


class RunLock:
    """The lock of one run's folder, which rank 0 holds; `is_seen` is for all ranks.

    A thread renews it for as long as the process lives: one step may take longer than STALE_AFTER,
    as may compiling, or loading a checkpoint.

    Attributes:
        is_lost: Whether another job has taken it since.
    """

    def __init__(self, run_dir: Path):
        self.path = run_dir / LOCK
        self.is_lost = False
        self._own: dict[str, Any] | None = None
        self._released = threading.Event()

    def acquire(
        self,
        log: Callable[[str], None],
        heartbeat: Callable[[], None] = lambda: None,
        timeout: float = STALE_AFTER,
    ) -> None:
        """Take the lock, or wait for a holder that may have exited.

        Args:
            log: Function called with a line before waiting, and when a lock is taken over.
            heartbeat: Function called while waiting.
            timeout: Longest wait in seconds.

        Raises:
            UserError: another job holds it, or it cannot be read.
            OSError: the folder cannot be written to.
        """
        started, first, has_announced, num_vanished = time.monotonic(), None, False, 0
        while not self._create():
            try:
                holder, mtime = _read(self.path), self.path.stat().st_mtime_ns
            except OSError as error:
                num_vanished += 1
                if not isinstance(error, FileNotFoundError) or num_vanished > _MOST_VANISHED:
                    raise self._unreadable(error) from error
                heartbeat()
                time.sleep(_POLL / 10)  # released at this moment
                continue
            first = first or (holder, mtime)
            was_renewed, waited = (holder, mtime) != first, time.monotonic() - started
            reason = _takeover_reason(holder, 0.0 if was_renewed else waited)
            if reason is not None:
                if reason:
                    log(f"{self.path} of {_describe_holder(holder)} taken over: {reason}")
                self._remove(holder)
                continue
            is_same_host = holder.get("place") == _host_key()
            limit = min(EXIT_GRACE if is_same_host else STALE_AFTER, timeout)
            if was_renewed or waited > limit:
                seen = (
                    "was renewed while this job watched it"
                    if was_renewed
                    else f"was watched for {waited:.0f} s"
                )
                raise UserError(
                    f"a run's folder for this job alone at {self.path.parent}",
                    f"{_describe_holder(holder)} trains in it ({self.path} {seen})",
                    "choose another logging.run_name, or end the other job and add"
                    " training.resume=auto; delete the file if that job has certainly ended (it"
                    f" counts as dead after {STALE_AFTER:.0f} s without a change, for which a job"
                    " waits up to half of engine.collective_timeout)",
                )
            if not has_announced:
                has_announced = True
                log(
                    f"{self.path} is held by {_describe_holder(holder)}; waiting up to {limit:.0f}"
                    " s for its release"
                )
            heartbeat()
            time.sleep(_POLL)

    def _unreadable(self, error: OSError) -> UserError:
        dangling = self.path.is_symlink() and isinstance(error, FileNotFoundError)
        why = (
            f"a link to {os.readlink(self.path)}, which does not exist"
            if dangling
            else describe_os_error(error)
        )
        return UserError(
            f"a readable lock at {self.path}, or none",
            why,
            "it names the job that trains here: make it readable, delete it if no job runs, or"
            " choose another logging.run_name",
        )

    def _renew(self, own: dict[str, Any]) -> None:
        """Show that the run is alive, until the lock is released or another job has taken it."""
        while not (self.is_lost or self._released.wait(RENEW_INTERVAL)):
            try:
                self.is_lost = _read(self.path) != own
                if not self.is_lost:
                    os.utime(self.path)
            except FileNotFoundError:
                self.is_lost = not self._released.is_set()
            except OSError:  # a transient error of the file system: the next renewal comes soon
                pass

    @property
    def started(self) -> str | None:
        """When this process took the lock, by which others know it again; None without it."""
        return None if self._own is None else self._own["started"]

    def is_seen(self, started: str, heartbeat: Callable[[], None], timeout: float) -> bool:
        """Return whether this rank sees the lock that rank 0 took, at once or within the timeout
        (at most VISIBLE_SECONDS): what one host writes may reach the others late, or in parts.
        """
        deadline = time.monotonic() + min(VISIBLE_SECONDS, timeout)
        while True:
            with contextlib.suppress(OSError):
                if _read(self.path).get("started") == started:
                    return True
            if time.monotonic() > deadline:
                return False
            heartbeat()
            time.sleep(_POLL / 10)

    def release(self) -> None:
        """Release the lock if it is still this process's own. May be called twice."""
        content, self._own = self._own, None
        self._released.set()
        atexit.unregister(self.release)
        if content is not None and content["pid"] == os.getpid():  # not by a data loader's worker
            with contextlib.suppress(OSError):
                if _read(self.path) == content:
                    self.path.unlink()

    def _create(self) -> bool:
        content = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID"),
            "restarts": int_from_env("SLURM_RESTART_COUNT", 0),
            "started": datetime.now(UTC).isoformat(timespec="microseconds"),
            "place": _host_key(),
            "born": _process_start_time(os.getpid()),
        }
        try:
            file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return False
        try:
            with open(file, "w", encoding="utf-8") as opened:
                opened.write(json.dumps(content) + "\n")
        except OSError:  # a full disk: an empty lock would block the next job
            self.path.unlink(missing_ok=True)
            raise
        self._own = content
        atexit.register(self.release)  # also after an error; not after SIGKILL
        threading.Thread(target=self._renew, args=(content,), name="run_lock", daemon=True).start()
        return True

    def _remove(self, holder: dict[str, Any]) -> None:
        """Remove a stale lock: only one of several processes does so, and never one that was
        created meanwhile.
        """
        aside = self.path.with_name(f"{LOCK}_of_{socket.gethostname()}_{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, aside)
            if _read(aside) == holder:
                aside.unlink()
            else:
                os.rename(aside, self.path)


def _takeover_reason(holder: dict[str, Any], unchanged: float) -> str | None:
    """Return why a lock may be taken over, "" for this process's own, None when it may not.

    Args:
        holder: Content of the lock.
        unchanged: Seconds for which this process has watched it without a change.
    """
    if holder.get("place") == _host_key():
        # A process may train twice.
        if holder["pid"] == os.getpid():
            return ""
        return None if _is_alive(holder["pid"], holder["born"]) else "that process has exited"
    requeued = holder.get("job") is not None and holder["job"] == os.environ.get("SLURM_JOB_ID")
    if requeued and int_from_env("SLURM_RESTART_COUNT", 0) > holder["restarts"]:
        return "Slurm ended it and restarted the job"
    return f"not renewed for {unchanged:.0f} s" if unchanged > STALE_AFTER else None


def _read(path: Path) -> dict[str, Any]:
    """Return the content of the lock; {} for one that is not written yet, torn, or not of this
    program.
    """
    content = read_bytes(path, _MAX_BYTES)
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(fields, dict):
        return {}
    fields = {"job": None, "born": None, **fields}
    are_typed = all(type(fields.get(name)) in kinds for name, kinds in _FIELDS.items())
    if are_typed and 0 < fields["pid"] < 1 << 31 and 0 <= fields["restarts"] < 1 << 31:
        return fields
    return {}


def _describe_holder(holder: dict[str, Any]) -> str:
    if not holder:
        return "an unknown job"
    job = f", Slurm job {holder['job']}" if holder["job"] else ""
    return (
        f"process {holder['pid']} on {holder['host']}{job}, started {holder['started'][:19]} UTC"
    )


def _host_key() -> list[str]:
    """Return what makes a PID unique: host name, boot and PID namespace (two containers may share
    the name).
    """
    key = [socket.gethostname()]
    with contextlib.suppress(OSError):
        key.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
        key.append(os.readlink("/proc/self/ns/pid"))
    return key


def _is_alive(pid: int, born: str | None) -> bool:
    if born is not None:
        return _process_start_time(pid) == born
    # Without /proc, the start time is unknown: whatever process has the PID counts.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _process_start_time(pid: int) -> str | None:
    """Return the start time of a process, which distinguishes it from a later one with its PID;
    None: not running.

    In clock ticks after boot, as the locks of running jobs have it: unlike psutil's time of day,
    it does not move with the clock.
    """
    try:
        stat = read_bytes(f"/proc/{pid}/stat", 1 << 16).decode(errors="replace")
        state, *fields = stat.rpartition(") ")[2].split()  # from the third field of proc(5) on
        return None if state in "ZX" else fields[18]
    except (OSError, IndexError):
        return None


class RunFolder:
    """The folder of a run, with its lock, its logs and the screen.

    Rank 0 owns them: on other ranks, and where the logs are not open, records and events are
    dropped.

    Args:
        path: Path of the folder.
        is_main: Whether this is rank 0.
        state: State of the run.

    Attributes:
        screen: What rank 0 prints; before `open_screen` on standard error.
        trackers: Set by `open_logs`.
    """

    screen: Console
    trackers: Trackers

    def __init__(self, path: Path, is_main: bool, state: TrainingState):
        self.path, self.is_main, self.state = path, is_main, state
        self.lock, self._lock_lost = RunLock(path), False
        self.screen = Console(0, enabled=is_main, stream=sys.stderr)
        self._logs: dict[str, JsonlLog] = {}
        self._failing: set[str] = set()  # logs whose last record could not be written

    @property
    def is_open(self) -> bool:
        """Whether this rank writes the logs."""
        return bool(self._logs)

    def open_screen(self, config: Config, metrics: Sequence[Metric]) -> None:
        """Open the screen and, on rank 0, its log file.

        Raises:
            OSError: the file cannot be opened.
        """
        path = train_log_path(self.path, int_from_env("GROUP_RANK", 0)) if self.is_main else None
        self.screen = Console(
            config.training.num_train_steps,
            enabled=self.is_main,
            log_freq=config.logging.log_freq,
            log_file=path,
            start_step=self.state.step,
            metrics=metrics,
        )
        if path is not None:
            with contextlib.suppress(OSError):  # a file system without links
                link_latest(path)

    def open_logs(self, config: Config, is_resumed: bool) -> None:
        """Open the logs, without their records after the state's step; for rank 0.

        Raises:
            OSError: a log cannot be opened.
            MmldlmError: a tracker cannot be opened.
        """
        step, path = self.state.step, self.path
        write_text(path / CONFIG, to_yaml(with_absolute_paths(config)))
        # An evaluation that a signal cut short is repeated.
        evaluated = step - self.state.evaluation_left
        logs = {
            STEPS: JsonlLog(path / STEPS, step),
            EVALUATIONS: JsonlLog(path / EVALUATIONS, evaluated),
            SAMPLES: JsonlLog(path / SAMPLES, evaluated),
            LAYERS: JsonlLog(path / LAYERS, step),
            EVENTS: JsonlLog(path / EVENTS),
        }
        tracked = TrackedRun(path, step, is_resumed, config)
        self.trackers = Trackers(config.logging.trackers, tracked, self._report_tracker_error)
        self._logs = logs

    # -- the screen -------------------------------------------------------------------------------

    def message(self, text: str) -> None:
        """Print a line on rank 0."""
        self.screen.message(text)

    def warning(self, text: str) -> None:
        """Print a warning on rank 0."""
        self.screen.warning(text)

    def error(self, text: str, on_screen: bool = True) -> None:
        """Print an error on rank 0, or write it to the log file alone."""
        self.screen.error(text, on_screen)

    # -- records ----------------------------------------------------------------------------------

    def write(self, name: str, record: dict) -> None:
        """Append a record; an error is reported once per log until a write succeeds again."""
        if not self.is_open:
            return
        try:
            self._logs[name].write(record)
        # A full disk, a closed log or a value that cannot be written does not end a training.
        except Exception as error:
            if name not in self._failing:
                self._failing.add(name)
                reason = error if isinstance(error, OSError) else first_line(error)
                self.warning(
                    f"step {self.state.step}: cannot write to {name}; will retry with the next"
                    f" record: {reason}"
                )
        else:
            self._failing.discard(name)

    def event(self, kind: str, **values: Any) -> None:
        """Append an event."""
        if self.is_open:
            self.check_lock()
            self.write(EVENTS, {"event": kind, **values})

    def note(self, text: str) -> None:
        """Print a line and write it as an event, on rank 0."""
        self.message(f"note     {text}")
        self.event("note", text=text)

    def finish_trackers(self, exit_code: int, stop: Callable[[], bool]) -> None:
        """Upload what is left, which may take long, and print where the records are.

        Args:
            stop: Whether the process was asked to end; then it takes a few seconds only.
        """
        for place in self.trackers.finish(exit_code, stop):
            self.message(f"tracker  {place}")

    def _report_tracker_error(self, name: str, reason: str) -> None:
        step = self.state.step
        self.write(
            EVENTS, {"event": "tracker_failed", "step": step, "tracker": name, "reason": reason}
        )
        self.warning(f"step {step}: logging to {name} ended ({reason}); the run continues")

    # -- the lock and the end ---------------------------------------------------------------------

    def check_lock(self) -> None:
        """Warn once, on rank 0, where another job has taken the lock; every event does so, too."""
        if self.lock.is_lost and not self._lock_lost:
            self._lock_lost = True
            self.warning(
                f"{self.lock.path} does not belong to this job any more: if another job trains"
                " here, end one of them"
            )

    def truncate(self) -> None:
        """Drop records after the state's step; a log stays as it is where the disk has no room to
        rewrite it.
        """
        for name in (STEPS, EVALUATIONS, SAMPLES, LAYERS) if self.is_open else ():
            log = self._logs[name]
            try:
                truncated = JsonlLog(log.path, self.state.step)
            except OSError as error:
                self.warning(f"{name} keeps its records from before the rollback: {error}")
                continue
            self._close(log)
            self._logs[name] = truncated

    def close(self) -> None:
        """Close the logs and the screen."""
        for log in self._logs.values():
            self._close(log)
        self._logs = {}
        self.screen.close()

    def _close(self, log: JsonlLog) -> None:
        try:
            log.close()
        except (OSError, ValueError) as error:  # records that a full disk kept in memory
            self.warning(f"the last records of {log.path.name} could not be written: {error}")


@dataclass(frozen=True)
class Run:
    """What the parts of a training run share.

    Attributes:
        folder: Where the run writes.
        data: Its data, with the resolved config.
        task: Its task.
        state: Its progress.
    """

    folder: RunFolder
    data: RunData
    task: Task
    state: TrainingState

    @property
    def config(self) -> Config:
        """The resolved config."""
        return self.data.config

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes what one rank writes."""
        return self.folder.is_main
