"""Starts a run's ranks on this machine and stands by: signals reach all ranks at once, and the exit code is theirs.

Why not one of the launchers for this (measured, deepspeed 0.19.8 and torch 2.13): a SIGTERM to `deepspeed` ends only
`deepspeed` itself (exit 143) and the ranks train on as orphans; its launch.py passes it to one rank after the other and
kills each 30 s later, in the middle of a save, and exits 1; torchrun tells all ranks but exits 1 with a traceback.
Torch is not imported here: python -m mmldlm.launch.local_launcher NPROC SCRIPT WORD...
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

from mmldlm.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STABILITY, EXIT_USAGE
from mmldlm.utils.standard_streams import open_standard_streams

# What all ranks end with together, by agreement: the slower ones are writing, and are waited for. One rank alone that
# ends so (its node lacks the data) has agreed with nobody: what the others wait for will not come.
COLLECTIVE_EXIT_CODES = (EXIT_STABILITY, EXIT_INTERRUPTED, EXIT_USAGE)
EXIT_GRACE = 30.0  # seconds from a rank's failure until the others, which may be stuck waiting for it, are ended
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def run_local(command: list[str], nproc: int, grace: float = EXIT_GRACE) -> int:
    """Run `command` as nproc ranks and wait for all of them.

    SIGTERM, SIGINT and SIGUSR1 go to every rank, which then save and exit 5; SIGHUP (the terminal is gone) is passed on
    as SIGTERM. There is no limit on how long they may save. When this process is killed, the ranks get a SIGTERM.
    When a rank has ended with 2, 4 or 5, the others get a SIGTERM `grace` seconds later: one that is writing goes on,
    one that waits for the rank that is gone ends. When a rank has failed, they are killed.

    Returns:
        0 when every rank ended well; the code of the first that ended with 2, 4 or 5; 1 when any rank failed.
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
            ranks.append(
                subprocess.Popen(command, env=_environment(rank, nproc, port), preexec_fn=_set_parent_death_signal)
            )
        return _wait(ranks, grace, command)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait(ranks: list[subprocess.Popen], grace: float, command: list[str]) -> int:
    killed_at, told_at, agreed, told = None, None, EXIT_DONE, set()
    while True:
        codes = [process.poll() for process in ranks]
        if told_at is None and any(code in COLLECTIVE_EXIT_CODES for code in codes):
            agreed = next(code for code in COLLECTIVE_EXIT_CODES if code in codes)
            told_at = time.monotonic() + grace
        if told_at is not None and not told and time.monotonic() > told_at:
            told = {rank for rank, code in enumerate(codes) if code is None}
            for rank in told:
                print(f"rank {rank} still runs, another ended with {agreed}: SIGTERM", file=sys.stderr, flush=True)
                ranks[rank].terminate()
        # How one ends that was told to says nothing new.
        ended = [(rank, code) for rank, code in enumerate(codes) if rank not in told]
        failed = [(rank, code) for rank, code in ended if code not in (None, EXIT_DONE, *COLLECTIVE_EXIT_CODES)]
        if failed and killed_at is None:
            rank, code = failed[0]
            killed_at = time.monotonic() + grace
            how = _how_it_ended(code, command)
            print(f"ERROR: rank {rank} (pid {ranks[rank].pid}) ended with {how}", file=sys.stderr, flush=True)
        if killed_at is not None and time.monotonic() > killed_at:
            for process in ranks:
                if process.poll() is None:
                    process.kill()  # SIGKILL also ends one that is stopped
        if None not in codes:
            return EXIT_FAILED if failed else agreed
        time.sleep(0.1)


def _how_it_ended(code: int, command: list[str]) -> str:
    if code == -signal.SIGBUS:
        from mmldlm.launch.sigbus_report import explain_sigbus

        return f"SIGBUS: {explain_sigbus(command[3:])}"  # the words after python -u SCRIPT
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


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
    fixed = {"MASTER_ADDR": "127.0.0.1", "PYTHONFAULTHANDLER": "1"}  # the second: where a SIGSEGV or SIGBUS came from
    return {**os.environ, **fixed, **{name: str(number) for name, number in numbers.items()}}


def _set_parent_death_signal() -> None:
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
    open_standard_streams()
    sys.exit(run_local([sys.executable, "-u", *sys.argv[2:]], int(sys.argv[1])))
