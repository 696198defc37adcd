"""An error that ends this rank is printed once: not by every rank that has it, and not by none.

Once there is a process group, errors are raised by agreement, and rank 0 speaks for all. Before, a mistake in the
command line is found by every rank, a missing file perhaps by rank 5 alone: rank 0 says its own; on every other node
the first rank does; further ranks wait a moment for one of their node to say the same, and speak when none does. They
know it by a small file in the node's temporary folder, for nothing else joins them yet.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
import tempfile
import time
import traceback
from datetime import datetime, timezone
from pathlib import Path

from mmldlm.utils.formatting import for_screen

# Seconds: ranks of a node start and import side by side; where rank 0 has failed, launchers end the rest.
CLAIM_WAIT = 3.0
CLAIM_TTL = 60.0  # an older claim is of another attempt
_LAUNCHES = ("MMLDLM_LAUNCH", "SLURM_STEP_ID")  # else the launcher is the parent of all ranks of the node


def log_line(message: str) -> None:
    """A line on stderr with the time of day."""
    with contextlib.suppress(OSError):  # nobody reads it: the exit code still says how the run ended
        line = f"[{datetime.now(timezone.utc):%H:%M:%S}] {message}"
        print(for_screen(line, sys.stderr), file=sys.stderr, flush=True)


def report_error_once(error: BaseException, kind: str = "error") -> None:
    """Say what ends this rank, unless another rank says it."""
    rank, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
    if rank == 0:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            _try_claim(str(error))
        log_line(f"{kind}: {error}")
    elif not _in_process_group() and _should_report(str(error), 0.0 if local_rank == 0 else CLAIM_WAIT):
        log_line(f"{kind} on rank {rank} ({socket.gethostname()}): {error}")


def _in_process_group() -> bool:
    torch = sys.modules.get("torch")  # not imported to find out that there is none
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()


def _should_report(text: str, patience: float) -> bool:
    end, path = time.monotonic() + patience, _claim_path(text)
    while time.monotonic() < end:
        if _is_recent(path):
            return False
        time.sleep(0.05)
    return _try_claim(text)


def _try_claim(text: str) -> bool:
    """Whether no rank of this node has said it; a folder that cannot be used leaves everyone to speak."""
    path = _claim_path(text)
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


def _claim_path(text: str) -> Path:
    launch = next((os.environ[name] for name in _LAUNCHES if name in os.environ), os.getppid())
    what = (launch, os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"), text)
    name = hashlib.sha256(repr(what).encode()).hexdigest()[:32]
    return Path(tempfile.gettempdir()) / f"mmldlm_said_{os.getuid()}" / name


def _is_recent(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime < CLAIM_TTL
    except OSError:
        return False


def report_traceback(error: Exception, logs: Path | None) -> None:
    """Print the traceback of an unexpected error.

    For a collective error, write it to a file instead, so that the heartbeat's message that names the failed rank stays
    last on the screen.

    Args:
        logs: folder for the file; None before the run's folder is known.
    """
    from mmldlm.distributed.stack_dump import describe_error, is_collective_error

    text = "".join([*traceback.format_exception(error), f"ERROR: {describe_error(error)}\n"])
    with contextlib.suppress(OSError):
        if logs is not None and is_collective_error(error):
            try:
                (logs / f"error_rank{os.environ.get('RANK', 0)}.txt").write_text(text)
                return
            except OSError:
                pass  # the screen is left
        sys.stderr.write(text)
