"""Environment of the process group, set before it starts: time limits and where traces are
written.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

# Every spelling that torch 2.13 reads, the current one first (torch/csrc/distributed/c10d/*.hpp).
_FLIGHT_BUFFER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
FLIGHT_RECORDER_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
_BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
_MONITORING = "TORCH_NCCL_ENABLE_MONITORING"
_HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"

_MAX_HEARTBEAT = (
    480  # torch's own default, seconds: a CUDA call that blocks the watchdog longer hangs
)
_FALSE = ("0", "n", "no", "f", "false")


def prepare_environment(timeout: float, logs: Path | None = None) -> list[str]:
    """Set what NCCL, torch and DeepSpeed read when the process group starts. Variables that the
    user has set stay.

    Call it before init_process_group, and before deepspeed is imported (it reads DEEPSPEED_TIMEOUT
    on import). gloo reads no time limit from the environment: it takes the `timeout` of
    init_process_group.

    Args:
        timeout: engine.collective_timeout, seconds.
        logs: folder for the flight recorder's files, created here because torch does not create
            it.

    Returns:
        One warning per setting of the user that lets a hang outlast timeout.
    """
    # The last collectives of every rank, with their stacks: the only record of which rank did not
    # join one.
    _default(_FLIGHT_BUFFER, "2000")
    _default(("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1")
    if logs is not None and not _env_value(FLIGHT_RECORDER_FILE):
        with contextlib.suppress(
            OSError
        ):  # the ranks agree on that error when they open the run's folder
            logs.mkdir(parents=True, exist_ok=True)
        _default(FLIGHT_RECORDER_FILE, str(logs / "flight_rank_"))  # torch adds the rank
    # 3 ends the process when a collective fails or times out, without ncclCommAbort, which can
    # itself hang for ever.
    if not _env_value(_BLOCKING_WAIT):
        _default(_ERROR_HANDLING, "3")
    # The watchdog that enforces the time limit can itself be blocked in a CUDA call: a second
    # thread monitors it.
    _default((_MONITORING,), "1")
    _default((_HEARTBEAT,), str(max(int(min(timeout, _MAX_HEARTBEAT)), 1)))
    # Whole minutes; for the groups that DeepSpeed makes by itself.
    _default(("DEEPSPEED_TIMEOUT",), str(max(math.ceil(timeout / 60), 1)))
    return _timeout_beyond(timeout)


def _timeout_beyond(timeout: float) -> list[str]:
    warnings = []
    heartbeat = os.environ[_HEARTBEAT]
    if not heartbeat.isdigit() or int(heartbeat) > max(timeout, _MAX_HEARTBEAT):
        warnings.append(
            f"{_HEARTBEAT}={heartbeat}: a rank blocked in CUDA ends only after that, "
            f"engine.collective_timeout is {timeout:g} s"
        )
    if os.environ[_MONITORING].lower() in _FALSE:
        warnings.append(
            f"{_MONITORING}={os.environ[_MONITORING]}: a blocked NCCL watchdog is not detected"
        )
    handling = _env_value(_ERROR_HANDLING)
    if handling is not None and os.environ[handling] == "0":
        warnings.append(f"{handling}=0: NCCL neither times out nor reports a dead peer")
    return [f"{sentence}; unset it" for sentence in warnings]


def _env_value(names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in os.environ), None)


def _default(names: tuple[str, ...], value: str) -> None:
    if _env_value(names) is None:
        os.environ[names[0]] = value
