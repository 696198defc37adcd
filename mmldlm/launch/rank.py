"""What the launcher starts instead of train.py: `rank.py LAUNCH_FILE`. Starts train.py, keeps its log and its end.

The launch file holds the words of train.py and the variables to be carried, so that neither goes through the shells of
a launcher. How a rank stands lies in a small file on its own node, where the node's watcher finds it.
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
import tempfile
import time
from collections import deque
from pathlib import Path

TOKEN = "MMLDLM_LAUNCH"
LAST_LINES = 20
_RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_PR_SET_PDEATHSIG = 1


def state_folder(launch: str) -> Path:
    """Folder on this node with the states of a launch's ranks."""
    return Path(tempfile.gettempdir()) / f"mmldlm_{launch}"


def own_rank() -> int:
    """This process's rank, by whichever launcher started it."""
    return int(next((os.environ[name] for name in _RANK_NAMES if name in os.environ), 0))


def write_state(launch: str, state: dict) -> None:
    """Write a rank's state atomically."""
    folder = state_folder(launch)
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"rank{state['rank']}.json"
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(state))
    os.replace(beside, path)


def _die_with_wrapper() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Run train.py as a child; returns its status (128 + signal when one ended it)."""
    launch = json.loads(Path(sys.argv[1]).read_text())
    rank, host = own_rank(), socket.gethostname()
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1", **launch["environment"], TOKEN: launch["id"]}
    child = subprocess.Popen(
        [sys.executable, "-u", launch["script"], *launch["words"]],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=_die_with_wrapper,
    )
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(name, lambda number, frame: child.poll() is None and child.send_signal(number))
    log = Path(launch["logs"]) / f"{host}_rank{rank}.log"
    state = {"rank": rank, "host": host, "pid": os.getpid(), "parent": os.getppid(), "child": child.pid}
    state |= {"started": time.time(), "exit": None}
    write_state(launch["id"], {**state, "log": str(log)})
    last = _follow(child, log, to_screen=rank == 0)
    code = child.wait()
    if code == -signal.SIGBUS:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started as a script
        from mmldlm.launch.sigbus import explain_sigbus

        last.append(f"rank {rank} ended with SIGBUS: {explain_sigbus(launch['words'])}")
    code = code if code >= 0 else 128 - code
    write_state(launch["id"], {**state, "log": str(log), "exit": code, "ended": time.time(), "last": last})
    return code


def _follow(child: subprocess.Popen, log: Path, to_screen: bool) -> list[str]:
    """Copy what the child writes to its log, rank 0's to the screen too; the last lines."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    with open(log, "ab", buffering=0) as file:
        for line in child.stdout:
            last.append(line.decode(errors="replace").rstrip())
            with contextlib.suppress(OSError):  # a full disk must not end the rank
                file.write(line)
            if to_screen:
                with contextlib.suppress(OSError):
                    sys.stdout.buffer.write(line)
                    sys.stdout.buffer.flush()
    return list(last)


if __name__ == "__main__":
    sys.exit(main())
