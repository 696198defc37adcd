"""Wrapper of one rank, which the launcher starts as `rank_wrapper.py LAUNCH_ID`: run
train.py, or a script of the user's own, and keep its log and its status.

Script, arguments and variables come from the launch file that the node agent wrote
(state_files.py), so that neither passes through a launcher's shells. The state of the rank is
written next to it for the node agent.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from io import BufferedReader
from pathlib import Path

if __package__ in (None, ""):
    # The file was run by its path.
    sys.path[: 0 if getattr(sys.flags, "safe_path", False) else 1] = [
        str(Path(__file__).resolve().parents[2])
    ]

from mmldlm.distributed.error_reporting import exit_without_teardown
from mmldlm.distributed.failure_attribution import FAILED_RANKS_FD
from mmldlm.launch import state_files
from mmldlm.utils.environment import int_from_env
from mmldlm.utils.resources import raise_open_files
from mmldlm.utils.stop_signals import handle_stop_signals, keep_exit_codes, set_parent_death_signal
from mmldlm.utils.streams import print_line

LAUNCH_ID_VAR = "MMLDLM_LAUNCH"
LAST_LINES = 20
_LONGEST_LINE = 1 << 16  # bytes of a line without an end that are kept
# For the rest of the output of a script that has ended.
READ_SECONDS = 5.0
_RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def rank_from_environment() -> int:
    """Return this process's rank under any of the launchers."""
    return next((int_from_env(name, 0) for name in _RANK_NAMES if os.environ.get(name)), 0)


def launch_file(host: str) -> str:
    """Return the name of a host's launch file (hosts may share a folder)."""
    return f"{host}_launch.json"


def state_file(host: str, rank: int | str) -> str:
    """Return the name of a rank's state file."""
    return f"{host}_rank{rank}.json"


def heartbeat_file(host: str, rank: int | str) -> str:
    """Return the name of the file with a rank's heartbeats (script_heartbeat.py)."""
    return f"{host}_heartbeat{rank}.json"


def oom_kills() -> int | None:
    """Return how many processes the kernel's OOM killer ended on this node since boot; None if
    unknown.
    """
    with contextlib.suppress(OSError, ValueError), open("/proc/vmstat", encoding="utf-8") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), None)
    return None


def main() -> int:
    """Run the script as a child; return its status (128 + signal number after a signal)."""
    keep_exit_codes()
    raise_open_files()  # for the script, which inherits it
    launch_id, rank, host = sys.argv[1], rank_from_environment(), socket.gethostname()
    launch = state_files.read_newest(launch_id, launch_file(host)).get(launch_file(host))
    if launch is None:
        folders = ", ".join(f"{root}/mmldlm_{launch_id}" for root in state_files.ROOTS)
        print(
            f"error: rank {rank}: no launch file on {host} in any of {folders}: does the launcher"
            " give its processes private folders (a container, a job's private /tmp)?",
            file=sys.stderr,
        )
        return 1
    try:
        os.chdir(launch["folder"])
    except OSError as error:
        print(
            f"error: rank {rank} on {host}: cannot change to {launch['folder']}: {error.strerror}",
            file=sys.stderr,
        )
        return 1
    kills_before = oom_kills()
    child, report_pipe = _start_child(launch, launch_id)
    log = Path(launch["logs"]) / f"{host}_rank{rank}.log"
    state = {
        "rank": rank,
        "host": host,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "child": child.pid,
    }
    state |= {"started": time.time(), "exit": None, "log": str(log)}
    _write_state(launch_id, state)
    last: deque[str] = deque(maxlen=LAST_LINES)
    to_screen = rank == 0 and sys.stdout is not None
    reader = threading.Thread(
        target=_stream_log, args=(child.stdout, log, to_screen, last), daemon=True
    )
    reader.start()
    code = child.wait()
    # A process that the script has started may outlive it, with its output.
    reader.join(READ_SECONDS)
    last_lines = list(last)
    if code == -signal.SIGBUS and Path(launch["script"]).name == "train.py":
        from mmldlm.launch.local_launcher import explain_sigbus

        last_lines.append(f"rank {rank} ended with SIGBUS: {explain_sigbus(launch['args'])}")
    code = code if code >= 0 else 128 - code
    out_of_memory = code == 128 + signal.SIGKILL and (oom_kills() or 0) > (kills_before or 0)
    end = {"exit": code, "ended": time.time(), "last": last_lines, "out_of_memory": out_of_memory}
    _write_state(launch_id, {**state, **end, "failure": _read_report(report_pipe)})
    return code


def _start_child(launch: dict, launch_id: str) -> tuple[subprocess.Popen, int]:
    """Start the script and forward signals to it; return (process, pipe of its failure report)."""
    read_end, write_end = os.pipe()
    additions = {"PYTHONFAULTHANDLER": "1", FAILED_RANKS_FD: str(write_end)}
    child = subprocess.Popen(
        [sys.executable, "-u", launch["script"], *launch["args"]],
        env={**os.environ, **additions, **launch["environment"], LAUNCH_ID_VAR: launch_id},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=functools.partial(set_parent_death_signal, signal.SIGKILL),
        pass_fds=[write_end],
    )
    os.close(write_end)

    def forward(signum: int, frame: object) -> None:
        if child.poll() is None:
            child.send_signal(signum)

    handle_stop_signals(forward)
    return child, read_end


def _read_report(pipe: int) -> dict | None:
    """Read the child's report (report_failed_ranks); None without a report."""
    # A worker that outlives the child may hold the other end.
    os.set_blocking(pipe, False)
    with contextlib.suppress(OSError, ValueError):
        return json.loads(os.read(pipe, state_files.MAX_BYTES))
    return None


def _write_state(launch_id: str, state: dict) -> None:
    """Write the state of a rank.

    If that fails, the watcher falls back to the launcher's status.
    """
    text = json.dumps(state)
    if len(text) > state_files.MAX_BYTES:
        text = json.dumps({**state, "last": [line[:100] for line in state["last"]]})
    if not state_files.write_anywhere(launch_id, state_file(state["host"], state["rank"]), text):
        print_line(
            f"rank {state['rank']} on {state['host']}: its state cannot be written to "
            f"{', '.join(state_files.ROOTS)} (full?)",
            sys.stderr,
        )


def _stream_log(output: BufferedReader, log: Path, to_screen: bool, last: deque[str]) -> None:
    """Copy the child's output to its log, to `last`, and rank 0's to the screen."""
    with contextlib.ExitStack() as stack:
        file = None
        with contextlib.suppress(OSError):
            # A full disk must not end the rank.
            file = stack.enter_context(open(log, "ab", buffering=0))
        # As it comes, not by lines: a progress bar ends its lines by carriage returns.
        rest = b""
        while chunk := output.read1(1 << 16):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.write(chunk)
            if to_screen:
                with contextlib.suppress(OSError):
                    sys.stdout.buffer.write(chunk)
                    sys.stdout.buffer.flush()
            *lines, rest = re.split(rb"[\r\n]+", rest + chunk)
            last.extend(line.decode(errors="replace").rstrip() for line in lines)
            rest = rest[-_LONGEST_LINE:]
        if rest:
            last.append(rest.decode(errors="replace").rstrip())


if __name__ == "__main__":
    # A thread that still reads must not be torn down: it may hold a lock of the output.
    exit_without_teardown(main())
