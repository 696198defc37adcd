"""Print a fatal error exactly once, even if several ranks raise it.

Once there is a process group, errors are raised by agreement and rank 0 prints. Before, rank 0
prints its own error, and on every other node local rank 0 does. Further ranks wait a moment for
the same error from their node, which they recognize by a claim file in the node's temporary
folder.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from mmldlm.utils.atomic_files import write_text
from mmldlm.utils.formatting import first_line, for_screen

# Seconds: ranks of a node start and import in parallel; if rank 0 has failed, launchers end the
# rest.
CLAIM_WAIT = 3.0
CLAIM_TTL = 60.0  # an older claim is of another attempt
# Without these variables, the parent process identifies the launch.
_LAUNCH_ID_VARS = ("MMLDLM_LAUNCH", "SLURM_STEP_ID")


def log_line(message: str) -> None:
    """Print a line on stderr with the time of day."""
    # Where stderr is closed, the exit code still reports how the run ended.
    with contextlib.suppress(OSError):
        line = f"[{datetime.now(UTC):%H:%M:%S}] {message}"
        print(for_screen(line, sys.stderr), file=sys.stderr, flush=True)


def report_error_once(error: BaseException, kind: str = "error") -> None:
    """Print the error that ends this rank, unless another rank prints it."""
    rank, local_rank = _number("RANK"), _number("LOCAL_RANK")
    if rank == 0:
        if _number("WORLD_SIZE") > 1:
            _claim(_claim_path(error))
        log_line(f"{kind}: {error}")
    elif not in_process_group() and _claim(
        _claim_path(error), wait=CLAIM_WAIT if local_rank else 0.0
    ):
        log_line(f"{kind} on rank {rank} ({socket.gethostname()}): {error}")


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    # An invalid number may be the error to report.
    return int(text) if text.isascii() and text.isdigit() else 0


def in_process_group() -> bool:
    """Whether this process is in a process group; torch may not be imported, or only half."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    is_initialized = getattr(distributed, "is_initialized", None)
    return is_initialized is not None and is_initialized()


def _claim(path: Path, wait: float = 0.0) -> bool:
    """Whether this rank is the first of its node to claim the error; True if the folder cannot be
    used.
    """
    end = time.monotonic() + wait
    while time.monotonic() < end and not _is_recent(path):
        time.sleep(0.05)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        for old in path.parent.iterdir():
            if not _is_recent(old):
                old.unlink(missing_ok=True)
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _claim_path(error: BaseException) -> Path:
    launch = next(
        (os.environ[name] for name in _LAUNCH_ID_VARS if name in os.environ), os.getppid()
    )
    key = (launch, os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), str(error))
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:32]
    return Path(tempfile.gettempdir()) / f"mmldlm_errors_{os.getuid()}" / name


def _is_recent(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime < CLAIM_TTL
    except OSError:
        return False


def report_traceback(error: Exception, logs: Path | None) -> None:
    """Print the traceback of an unexpected error.

    For a collective error that the heartbeat attributed to a rank, write it to a file instead, so
    that the heartbeat's message stays last on the screen.

    Args:
        error: Error of this rank, with `is_attributed` where the heartbeat has printed a message
            about it.
        logs: Folder for the file; None before the run's folder is known.
    """
    from mmldlm.distributed.stack_dump import is_collective_error

    text = "".join([*traceback.format_exception(error), f"ERROR: {first_line(error)}\n"])
    with contextlib.suppress(OSError):
        if (
            logs is not None
            and getattr(error, "is_attributed", False)
            and is_collective_error(error)
        ):
            try:
                write_text(logs / f"error_rank{os.environ.get('RANK', 0)}.txt", text)
                return
            except OSError:
                pass  # the screen is left
        sys.stderr.write(text)


EXIT_HOOK_SECONDS = 30.0


def leave_process_group() -> None:
    """Destroy the process group after success; after an error this would block on ranks that have
    exited.

    NCCL waits for the other ranks of the node, of which one may have failed meanwhile: not for
    ever.
    """
    import torch

    if torch.distributed.is_initialized():
        leaving = threading.Thread(target=torch.distributed.destroy_process_group, daemon=True)
        leaving.start()
        leaving.join(EXIT_HOOK_SECONDS)


def exit_without_teardown(code: int) -> NoReturn:
    """Exit without tearing down the interpreter.

    The results are on the disk by then, and native threads of gloo and ZeRO-3 now and then abort
    in the teardown (seen: exit -6 of a finished run).
    """
    # mpirun takes a rank that exits without MPI_Finalize for a failed one.
    if code == 0 and "mpi4py.MPI" in sys.modules:
        sys.modules["mpi4py.MPI"].Finalize()
    # A hook kills the data workers; torch's handler would call that an error.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A library's hook may wait for ever, as a tracker's for a server that is gone.
    hooks = threading.Thread(target=atexit._run_exitfuncs, name="exit-hooks", daemon=True)
    hooks.start()
    hooks.join(EXIT_HOOK_SECONDS)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
