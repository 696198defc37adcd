"""What the launcher starts instead of train.py: `rank.py LAUNCH_ID`. Starts train.py, keeps its log and its end.

The words of train.py and the variables to be carried come from a launch file that the node's agent wrote (state.py), so
that neither goes through the shells of a launcher. How the rank stands is written beside it for the node's agent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

if __package__ in (None, ""):  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from mmldlm.distributed.failure_attribution import FAILED_RANKS_FD
from mmldlm.launch import state_files as state_files

LAUNCH_ID_VAR = "MMLDLM_LAUNCH"
LAST_LINES = 20
_RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_PR_SET_PDEATHSIG = 1


def rank_from_environment() -> int:
    """This process's rank, by whichever launcher started it."""
    return int(next((os.environ[name] for name in _RANK_NAMES if name in os.environ), 0))


def launch_file(host: str) -> str:
    """Name of a host's launch file (hosts may share a folder)."""
    return f"{host}_launch.json"


def state_file(host: str, rank: int | str) -> str:
    """Name of the file with a rank's state."""
    return f"{host}_rank{rank}.json"


def oom_kills() -> int | None:
    """How many processes the kernel's OOM killer has ended on this node since its boot; None where it does not say."""
    with contextlib.suppress(OSError, ValueError), open("/proc/vmstat") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), None)
    return None


def _set_parent_death_signal() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Run train.py as a child; returns its status (128 + signal when one ended it)."""
    id, rank, host = sys.argv[1], rank_from_environment(), socket.gethostname()
    launch = state_files.read_newest(id, launch_file(host)).get(launch_file(host))
    if launch is None:
        folders = ", ".join(f"{root}/mmldlm_{id}" for root in state_files.ROOTS)
        print(f"error: rank {rank}: no launch file on {host} in any of {folders}: does the launcher give its processes "
              "folders of their own (a container, a job's private /tmp)?", file=sys.stderr)  # fmt: skip
        return 1
    try:
        os.chdir(launch["folder"])
    except OSError as error:
        print(f"error: rank {rank} on {host}: cannot change to {launch['folder']}: {error.strerror}", file=sys.stderr)
        return 1
    killed_before = oom_kills()
    reports, reporter = os.pipe()
    own = {"PYTHONFAULTHANDLER": "1", FAILED_RANKS_FD: str(reporter)}
    child = subprocess.Popen(
        [sys.executable, "-u", launch["script"], *launch["words"]],
        env={**os.environ, **own, **launch["environment"], LAUNCH_ID_VAR: id},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=_set_parent_death_signal,
        pass_fds=[reporter],
    )
    os.close(reporter)
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(name, lambda number, frame: child.poll() is None and child.send_signal(number))
    log = Path(launch["logs"]) / f"{host}_rank{rank}.log"
    state = {"rank": rank, "host": host, "pid": os.getpid(), "parent": os.getppid(), "child": child.pid}
    state |= {"started": time.time(), "exit": None, "log": str(log)}
    _write_state(id, state)
    last = _stream_log(child, log, to_screen=rank == 0 and sys.stdout is not None)
    code = child.wait()
    if code == -signal.SIGBUS:
        from mmldlm.launch.sigbus_report import explain_sigbus

        last.append(f"rank {rank} ended with SIGBUS: {explain_sigbus(launch['words'])}")
    code = code if code >= 0 else 128 - code
    out_of_memory = code == 128 + signal.SIGKILL and (oom_kills() or 0) > (killed_before or 0)
    end = {"exit": code, "ended": time.time(), "last": last, "out_of_memory": out_of_memory}
    _write_state(id, {**state, **end, "failure": _read_report(reports)})
    return code


def _read_report(pipe: int) -> dict | None:
    """Which ranks the child found to have failed, and why ({"ranks", "sentence"}); None where it reported nothing."""
    os.set_blocking(pipe, False)  # a worker that outlives the child may hold the other end
    with contextlib.suppress(OSError, ValueError):
        return json.loads(os.read(pipe, 1 << 12))
    return None


def _write_state(id: str, state: dict) -> None:
    """Write a rank's state. Where no folder takes it, the watcher judges by the launcher's status alone."""
    text = json.dumps(state)
    if len(text) > state_files.RESERVED:
        text = json.dumps({**state, "last": [line[:100] for line in state["last"]]})
    if not state_files.write_anywhere(id, state_file(state["host"], state["rank"]), text):
        print(f"rank {state['rank']} on {state['host']}: its state cannot be written to {', '.join(state_files.ROOTS)} "
              "(full?)", file=sys.stderr)  # fmt: skip


def _stream_log(child: subprocess.Popen, log: Path, to_screen: bool) -> list[str]:
    """Copy what the child writes to its log, rank 0's to the screen too; the last lines."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    with contextlib.ExitStack() as stack:
        file = None
        with contextlib.suppress(OSError):  # a full disk must not end the rank
            file = stack.enter_context(open(log, "ab", buffering=0))
        for line in child.stdout:
            last.append(line.decode(errors="replace").rstrip())
            if file is not None:
                with contextlib.suppress(OSError):
                    file.write(line)
            if to_screen:
                with contextlib.suppress(OSError):
                    sys.stdout.buffer.write(line)
                    sys.stdout.buffer.flush()
    return list(last)


if __name__ == "__main__":
    sys.exit(main())
