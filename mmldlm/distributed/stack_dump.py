"""Diagnostics for a rank whose main thread is blocked: current location, error class,
stack dumps.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from pathlib import Path

import torch

from mmldlm.distributed.environment import FLIGHT_RECORDER_FILE
from mmldlm.errors import EXIT_FAILED
from mmldlm.utils.atomic_files import atomic_file
from mmldlm.utils.formatting import first_line

# Contained in the RuntimeErrors of gloo, NCCL and the store that have no type of their own.
COLLECTIVE_ERROR_PATTERNS = (
    "gloo",
    "nccl",
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
)
BLOCKING_CALLS = {(("mmldlm", "engines"), "sum_on_host"), (("torch", "cuda"), "synchronize")}
TRACE_TIMEOUT = 3.0  # seconds


def is_collective_error(error: BaseException | None) -> bool:
    """Whether an exception means that another rank is dead or late, rather than an error of this
    rank. NCCL that finds no memory on its own GPU is one.
    """
    if error is not None and "out of memory" in str(error):
        return False
    while error is not None:
        if isinstance(error, torch.distributed.DistError):
            return True
        if isinstance(error, RuntimeError) and any(
            word in str(error).lower() for word in COLLECTIVE_ERROR_PATTERNS
        ):
            return True
        error = error.__cause__
    return False


def describe_error(error: BaseException) -> str:
    """First line of an error, and the cause that NCCL's errors name in a later one."""
    cause = str(error).partition("Last error:")[2].strip().splitlines()
    return f"{first_line(error)}: {cause[0]}" if cause else first_line(error)


def current_location(thread: int) -> tuple[str, bool]:
    """Where a thread is, as `folder/file.py:line in function`, and whether that is inside a
    collective.

    With NCCL a collective returns at once and the host waits for it later: on reading a result
    (Engine.sum_on_host) or on synchronizing the device (DeepSpeed, after each backward pass). The
    location is the innermost line in this package, if there is one.
    """
    frame, locations, in_collective = sys._current_frames().get(thread), [], False
    while frame is not None:
        name = Path(frame.f_code.co_filename)
        locations.append(
            (name, f"{name.parent.name}/{name.name}:{frame.f_lineno} in {frame.f_code.co_name}")
        )
        in_collective = in_collective or name.parts[-3:-1] == ("torch", "distributed")
        in_collective = (
            in_collective or (name.parts[-3:-1], frame.f_code.co_name) in BLOCKING_CALLS
        )
        frame = frame.f_back
    if not locations:
        return "", False
    innermost = next(
        (location for name, location in locations if "mmldlm" in name.parts[:-1]), locations[0][1]
    )
    return innermost, in_collective


def exit_with_stacks(rank: int, logs: Path | None) -> None:
    """End this process with exit code 1, whatever its other threads do, after writing its traces
    into logs.

    Writes stack_rank{rank}.txt (the Python stack of every thread) and the flight recorder's file:
    torch's watchdog writes that one only after its own, later, time limit.
    """
    # From here on this process ends even if a lock or a dead file system blocks what follows:
    # faulthandler's own thread needs neither the GIL nor an answer.
    faulthandler.dump_traceback_later(TRACE_TIMEOUT, exit=True, file=2)
    if logs is not None:
        # The reason is printed already; missing traces must not keep the process alive.
        with contextlib.suppress(OSError):
            _write_traces(rank, logs)
    os._exit(EXIT_FAILED)


def _write_traces(rank: int, logs: Path) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    with atomic_file(logs / f"stack_rank{rank}.txt") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    prefix = next((os.environ[name] for name in FLIGHT_RECORDER_FILE if name in os.environ), None)
    if prefix is not None and torch.distributed.is_initialized():
        c10d = torch._C._distributed_c10d
        name = (
            "_dump_nccl_trace" if "nccl" in torch.distributed.get_backend() else "_dump_fr_trace"
        )
        Path(f"{prefix}{rank}").write_bytes(getattr(c10d, name)())
