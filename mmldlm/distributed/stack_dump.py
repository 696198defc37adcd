"""What a rank can still tell when its main thread cannot: where it stands, what its error means, and its traces."""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

import torch

from mmldlm.distributed.nccl_environment import FLIGHT_RECORDER_FILE
from mmldlm.errors import EXIT_FAILED

# What gloo, NCCL and the store write into the RuntimeErrors that torch does not give a type of their own.
COLLECTIVE_ERROR_PATTERNS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe")
BLOCKING_CALLS = {(("mmldlm", "engines"), "sum_on_host"), (("torch", "cuda"), "synchronize")}
TRACE_TIMEOUT = 3.0  # seconds


def is_collective_error(error: BaseException | None) -> bool:
    """Whether an exception says that a peer is gone or late, rather than that this rank did something wrong."""
    while error is not None:
        if isinstance(error, torch.distributed.DistError):
            return True
        if isinstance(error, RuntimeError) and any(word in str(error).lower() for word in COLLECTIVE_ERROR_PATTERNS):
            return True
        error = error.__cause__
    return False


def describe_error(error: BaseException) -> str:
    """Type and first line of an exception."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def current_location(thread: int) -> tuple[str, bool]:
    """Where a thread stands, as `folder/file.py:line in function`, and whether that is inside a collective.

    With NCCL a collective returns at once, and the host waits for it later: where it reads a result
    (Engine.sum_on_host) or lets the device finish (DeepSpeed, after each backward pass). The place is its innermost
    line in this package where there is one: that is what a user can look up.
    """
    frame, places, waits = sys._current_frames().get(thread), [], False
    while frame is not None:
        name = Path(frame.f_code.co_filename)
        places.append((name, f"{name.parent.name}/{name.name}:{frame.f_lineno} in {frame.f_code.co_name}"))
        waits = waits or name.parts[-3:-1] == ("torch", "distributed")
        waits = waits or (name.parts[-3:-1], frame.f_code.co_name) in BLOCKING_CALLS
        frame = frame.f_back
    if not places:
        return "", False
    ours = next((place for name, place in places if "mmldlm" in name.parts[:-1]), places[0][1])
    return ours, waits


def exit_with_stacks(rank: int, logs: Path | None) -> None:
    """End this process with exit code 1, whatever its other threads do; leaves its traces in logs first.

    Writes stack_rank{rank}.txt (the Python stack of every thread) and the flight recorder's file: torch's watchdog
    writes that one only after its own, later, time limit.
    """
    # From here on this process ends even if a lock or a dead file system holds up what follows: faulthandler's own
    # thread needs neither the GIL nor an answer.
    faulthandler.dump_traceback_later(TRACE_TIMEOUT, exit=True, file=2)
    if logs is not None:
        try:
            _write_traces(rank, logs)
        except OSError:
            pass  # the reason is said; that its illustration cannot be written must not keep the process alive
    os._exit(EXIT_FAILED)


def _write_traces(rank: int, logs: Path) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    with open(logs / f"stack_rank{rank}.txt", "w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    prefix = next((os.environ[name] for name in FLIGHT_RECORDER_FILE if name in os.environ), None)
    if prefix is not None and torch.distributed.is_initialized():
        c10d = torch._C._distributed_c10d
        name = "_dump_nccl_trace" if "nccl" in torch.distributed.get_backend() else "_dump_fr_trace"
        Path(f"{prefix}{rank}").write_bytes(getattr(c10d, name)())
