"""Starts a run's ranks on this machine and stands by: signals reach all ranks at once, and the exit code is theirs.

Why not one of the launchers for this (measured, deepspeed 0.19.8 and torch 2.13): a SIGTERM to `deepspeed` ends only
`deepspeed` itself (exit 143) and the ranks train on as orphans; its launch.py passes it to one rank after the other and
kills each 30 s later, in the middle of a save, and exits 1; torchrun tells all ranks but exits 1 with a traceback.
Torch is not imported here: python -m mmldlm.launch.local NPROC SCRIPT WORD...
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

from mmldlm.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STABILITY, EXIT_USAGE

# What all ranks end with together, by agreement: the slower ones are writing, and are waited for.
AGREED = (EXIT_STABILITY, EXIT_INTERRUPTED, EXIT_USAGE)
GRACE = 30.0  # seconds from a rank's failure until the others, which may be stuck waiting for it, are killed
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def run_local(command: list[str], nproc: int, grace: float = GRACE) -> int:
    """Run `command` as nproc ranks and wait for all of them.

    SIGTERM, SIGINT and SIGUSR1 go to every rank, which then save and exit 5; SIGHUP (the terminal is gone) is passed on
    as SIGTERM. There is no limit on how long they may save. When this process is killed, the ranks get a SIGTERM.

    Returns:
        0 when every rank ended well; the code they agreed on (2, 4, 5); 1 when any rank ended otherwise.
    """
    ranks: list[subprocess.Popen] = []

    def forward(number, frame) -> None:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    handlers = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        port = _free_port()
        for rank in range(nproc):
            ranks.append(subprocess.Popen(command, env=_environment(rank, nproc, port), preexec_fn=_end_with_parent))
        return _wait(ranks, grace)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait(ranks: list[subprocess.Popen], grace: float) -> int:
    killed_at = None
    while True:
        codes = [process.poll() for process in ranks]
        failed = [(rank, code) for rank, code in enumerate(codes) if code not in (None, EXIT_DONE, *AGREED)]
        if failed and killed_at is None:
            rank, code = failed[0]
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            print(f"error: rank {rank} (pid {ranks[rank].pid}) ended with {how}", file=sys.stderr, flush=True)
            killed_at = time.monotonic() + grace
        if killed_at is not None and time.monotonic() > killed_at:
            for process in ranks:
                if process.poll() is None:
                    process.kill()  # SIGKILL also ends one that is stopped
        if None not in codes:
            return EXIT_FAILED if failed else next((code for code in AGREED if code in codes), EXIT_DONE)
        time.sleep(0.1)


def _environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """What torchrun and deepspeed would set on one node (LOCAL_SIZE: read by DeepSpeed's CPU accelerator)."""
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "LOCAL_SIZE": nproc,
        "MASTER_PORT": port,
    }
    return {**os.environ, "MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}


def _end_with_parent() -> None:
    """Linux: a SIGTERM for this rank when its parent dies, so that none trains on as an orphan."""
    if sys.platform == "linux":
        import ctypes

        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(run_local([sys.executable, "-u", *sys.argv[2:]], int(sys.argv[1])))
