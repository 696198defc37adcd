"""RUN/.lock: one job trains in a run's folder at a time. Rank 0 holds it.

Two jobs in one folder (the default logging.run_name, a requeued job beside the one that was taken for dead) overwrite
each other's logs and delete each other's checkpoints, both with exit 0. The lock names host and process; its mtime is
renewed while the run writes its logs. On the holder's own host it is free as soon as the process is gone, from another
host when it was not renewed for STALE_AFTER seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.locate import holds_checkpoints
from mmldlm.config.schema import Config
from mmldlm.errors import UserError

LOCK = ".lock"
STALE_AFTER = 180.0  # seconds without a renewal after which a holder on another host counts as gone
RENEW_INTERVAL = 20.0  # seconds between two renewals, at least
EXIT_GRACE = 10.0  # seconds for a process on this host to go: the job before may just have been killed
_POLL = 0.5
_MOST_VANISHED = 20  # times that a lock may be there when it is made and gone when it is read
_FIELDS = {"host": str, "pid": int, "started": str, "restarts": int, "place": list}


def check_no_checkpoints(config: Config) -> None:
    """Refuse to begin a run where another has left checkpoints (asked again under the lock: it may have just ended).

    Raises:
        UserError: there are some, and training.resume is not given.
    """
    run_dir = config.run_dir()
    if config.training.resume is None and holds_checkpoints(run_dir):
        raise UserError(
            f"a new folder for the run, or training.resume to continue the one in {run_dir}",
            f"{run_dir} already holds checkpoints",
            "add training.resume=auto, choose another logging.run_name, or move the old run away",
        )


class RunLock:
    """The lock of one run's folder; call it on rank 0 only."""

    def __init__(self, run_dir: Path):
        self.path = run_dir / LOCK
        self._own: dict[str, Any] | None = None
        self._renewed = 0.0

    def acquire(
        self, say: Callable[[str], None], beat: Callable[[], None] = lambda: None, patience: float = STALE_AFTER
    ):
        """Take the lock; wait for one that may become free.

        Args:
            say: gets one line on what is waited for, and on a lock that is taken over. beat: called while waiting.
            patience: longest wait in seconds.

        Raises:
            UserError: another job holds it, or it cannot be read. OSError: the folder cannot be written to.
        """
        started, first_mtime, told, num_vanished = time.monotonic(), None, False, 0
        while not self._create():
            try:
                holder, mtime = _read(self.path), self.path.stat().st_mtime
            except OSError as error:
                num_vanished += 1
                if not isinstance(error, FileNotFoundError) or num_vanished > _MOST_VANISHED:
                    raise self._unreadable(error) from error
                beat()
                time.sleep(_POLL / 10)  # released at this moment
                continue
            first_mtime = first_mtime or mtime
            why_free = _takeover_reason(holder, time.time() - mtime)
            if why_free is not None:
                if why_free:
                    say(f"{self.path} of {_describe_holder(holder)} taken over: {why_free}")
                self._remove(holder)
                continue
            here = holder.get("place") == _host_key()
            waited, limit = time.monotonic() - started, min(EXIT_GRACE if here else STALE_AFTER, patience)
            if mtime != first_mtime or waited > limit:
                raise UserError(
                    f"a run's folder for this job alone at {self.path.parent}",
                    f"{_describe_holder(holder)} trains in it "
                    f"({self.path}, renewed {max(time.time() - mtime, 0):.0f} s ago)",
                    "choose another logging.run_name, or end the other job and add training.resume=auto; delete the "
                    f"file if that job is surely gone (it counts as gone after {STALE_AFTER:.0f} s)",
                )
            if not told:
                told = True
                say(f"{self.path} is held by {_describe_holder(holder)}: waiting up to {limit:.0f} s for it to be gone")
            beat()
            time.sleep(_POLL)

    def _unreadable(self, error: OSError) -> UserError:
        dangling = self.path.is_symlink() and isinstance(error, FileNotFoundError)
        why = f"a link to {os.readlink(self.path)}, which is not there" if dangling else error.strerror or str(error)
        return UserError(
            f"a lock that can be read at {self.path}, or none",
            why,
            "it says who trains in this folder: make it readable, delete it if no job runs there, or choose another "
            "logging.run_name",
        )

    def renew(self) -> bool:
        """Show that the run lives, RENEW_INTERVAL seconds apart; False when somebody else has taken the lock."""
        now = time.monotonic()
        if self._own is None or now - self._renewed < RENEW_INTERVAL:
            return True
        self._renewed = now
        try:
            if _read(self.path) != self._own:
                return False
            os.utime(self.path)
        except FileNotFoundError:
            return False
        except OSError:  # a file system that hesitates: the next renewal comes soon
            pass
        return True

    def release(self) -> None:
        """Give the lock back, if it is still this process's own. May be called twice."""
        own, self._own = self._own, None
        atexit.unregister(self.release)
        if own is not None and own["pid"] == os.getpid():  # not by a data loader's worker
            with contextlib.suppress(OSError):
                if _read(self.path) == own:
                    self.path.unlink()

    def _create(self) -> bool:
        own = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID"),
            "restarts": int(os.environ.get("SLURM_RESTART_COUNT", 0)),
            "started": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
            "place": _host_key(),
            "born": _process_start_time(os.getpid()),
        }
        try:
            file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return False
        try:
            with open(file, "w") as opened:
                opened.write(json.dumps(own) + "\n")
        except OSError:  # a full disk: an empty lock would stand in the way of the next job
            self.path.unlink(missing_ok=True)
            raise
        self._own, self._renewed = own, time.monotonic()
        atexit.register(self.release)  # also where the run ends by an error; not where it is killed
        return True

    def _remove(self, holder: dict[str, Any]) -> None:
        """Only one of several that find a lock stale removes it, and not one that another has made meanwhile."""
        aside = self.path.with_name(f"{LOCK}_of_{socket.gethostname()}_{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, aside)
            if _read(aside) == holder:
                aside.unlink()
            else:
                os.rename(aside, self.path)


def _takeover_reason(holder: dict[str, Any], age: float) -> str | None:
    """Why a lock may be taken over, "" for this process's own, None when it may not."""
    if holder.get("place") == _host_key():
        if holder["pid"] == os.getpid():  # a process that trains twice
            return ""
        return None if _is_alive(holder["pid"], holder["born"]) else "that process is gone"
    requeued = holder.get("job") is not None and holder["job"] == os.environ.get("SLURM_JOB_ID")
    if requeued and int(os.environ.get("SLURM_RESTART_COUNT", 0)) > holder["restarts"]:
        return "Slurm has ended it and started the job again"
    return f"not renewed for {age:.0f} s" if age > STALE_AFTER else None


def _read(path: Path) -> dict[str, Any]:
    """What the lock says; {} for one that is not written yet, torn, or not of this program."""
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError):
        return {}
    is_whole = isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in _FIELDS.items())
    return {"job": None, "born": None, **found} if is_whole else {}


def _describe_holder(holder: dict[str, Any]) -> str:
    if not holder:
        return "an unknown job"
    job = f", Slurm job {holder['job']}" if holder["job"] else ""
    return f"process {holder['pid']} on {holder['host']}{job}, started {holder['started'][:19]} UTC"


def _host_key() -> list[str]:
    """Where a pid means one process: host name, boot and pid namespace (two containers may share the name)."""
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        found.append(os.readlink("/proc/self/ns/pid"))
    return found


def _is_alive(pid: int, born: str | None) -> bool:
    if born is not None:
        return _process_start_time(pid) == born
    try:  # no /proc here
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _process_start_time(pid: int) -> str | None:
    """When a process of this place started, so that its number given anew is another; None when it is gone, or where
    there is no /proc."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]  # starttime, field 22 of proc(5)
