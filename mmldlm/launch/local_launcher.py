"""Start the ranks of a run on this machine, forward signals to all of them, and return their exit
code.

Neither `deepspeed` nor torchrun serves here: on SIGTERM their ranks continue as orphans, are
killed during a save, or their exit code is lost. Without torch: `python -m
mmldlm.launch.local_launcher NPROC SCRIPT ARG...`.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmldlm.distributed.error_reporting import exit_without_teardown
from mmldlm.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STABILITY,
    EXIT_USAGE,
    MmldlmError,
    UserError,
)
from mmldlm.utils.formatting import join_some
from mmldlm.utils.network import free_port
from mmldlm.utils.resources import threads_per_rank
from mmldlm.utils.stop_signals import handle_stop_signals, keep_exit_codes, set_parent_death_signal
from mmldlm.utils.streams import open_standard_streams, print_line

if TYPE_CHECKING:
    from mmldlm.config.schema import Config

# Codes with which all ranks exit together, by agreement; the slower ones may still be writing. If
# only one rank exits with such a code (for example, for data missing on its node), the others
# would wait forever.
COLLECTIVE_EXIT_CODES = (EXIT_STABILITY, EXIT_USAGE, EXIT_INTERRUPTED)
# Seconds from the failure of a rank until the others, which may hang, are terminated.
EXIT_GRACE = 30.0


def run_local(command: list[str], nproc: int, grace: float = EXIT_GRACE) -> int:
    """Run `command` as nproc ranks and wait for all of them.

    SIGTERM, SIGINT, SIGUSR1 and SIGHUP (the terminal is gone) are forwarded to every rank; the
    ranks save and exit with 5, without a time limit. A signal that was ignored at the start, as
    SIGHUP under nohup, stays ignored, here and in the ranks. If this process is killed, the ranks
    get SIGTERM. `grace` seconds after a rank has exited with 2, 4 or 5, the others get SIGTERM: a
    rank that is writing finishes, a rank that waits for the missing one ends. After a failed rank
    the others are killed.

    Returns:
        0 if every rank succeeded; the code of the first rank that exited with 2, 4 or 5; 1 if any
        rank failed.
    """
    ranks: list[subprocess.Popen] = []
    received: list[int] = []

    def forward(signum: int, frame: object) -> None:
        received.append(signum)
        for process in ranks:
            if process.poll() is None:
                process.send_signal(signum)

    keep_exit_codes()
    handlers = handle_stop_signals(forward)
    die_with_parent = functools.partial(set_parent_death_signal, signal.SIGTERM)
    try:
        port = free_port()
        for rank in range(nproc):
            ranks.append(
                subprocess.Popen(
                    command, env=_environment(rank, nproc, port), preexec_fn=die_with_parent
                )
            )
            # A signal while a rank was started has reached the others alone.
            for signum in received:
                ranks[-1].send_signal(signum)
        return _wait(ranks, grace, command)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def _wait(ranks: list[subprocess.Popen], grace: float, command: list[str]) -> int:
    """Wait for all ranks and return the common exit code; terminate ranks that hang after another
    one has ended.
    """
    kill_time, terminate_time, agreed = None, None, EXIT_DONE
    terminated: set[int] = set()
    while True:
        codes = [process.poll() for process in ranks]
        if terminate_time is None and any(code in COLLECTIVE_EXIT_CODES for code in codes):
            agreed = next(code for code in COLLECTIVE_EXIT_CODES if code in codes)
            terminate_time = time.monotonic() + grace
        if terminate_time is not None and not terminated and time.monotonic() > terminate_time:
            terminated = {rank for rank, code in enumerate(codes) if code is None}
            for rank in terminated:
                print_line(
                    f"rank {rank} still runs after another exited with {agreed}: SIGTERM",
                    sys.stderr,
                )
                ranks[rank].terminate()
        # The exit code of a terminated rank has no information.
        ended = [(rank, code) for rank, code in enumerate(codes) if rank not in terminated]
        failed = [
            (rank, code)
            for rank, code in ended
            if code not in (None, EXIT_DONE, *COLLECTIVE_EXIT_CODES)
        ]
        if failed and kill_time is None:
            rank, code = failed[0]
            kill_time = time.monotonic() + grace
            exit_text = _describe_exit(code, command)
            print_line(
                f"ERROR: rank {rank} (pid {ranks[rank].pid}) ended with {exit_text}", sys.stderr
            )
        if kill_time is not None and time.monotonic() > kill_time:
            for process in ranks:
                if process.poll() is None:
                    # SIGKILL also ends a stopped process.
                    process.kill()
        if None not in codes:
            # The arguments of the script follow `python -u SCRIPT`.
            is_training = os.path.basename(command[2]) == "train.py"
            if failed and is_training and (hint := describe_resume(command[3:])) is not None:
                print_line(hint, sys.stderr)
            return EXIT_FAILED if failed else agreed
        time.sleep(0.1)


def _describe_exit(code: int, command: list[str]) -> str:
    if code == -signal.SIGBUS:
        # The arguments of the script follow `python -u SCRIPT`.
        return f"SIGBUS: {explain_sigbus(command[3:])}"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun and deepspeed set on one node (DeepSpeed's CPU
    accelerator: LOCAL_SIZE).
    """
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": nproc,
        "LOCAL_WORLD_SIZE": nproc,
        "LOCAL_SIZE": nproc,
        "MASTER_PORT": port,
    }
    # PYTHONFAULTHANDLER prints a stack on SIGSEGV and SIGBUS.
    fixed = {"MASTER_ADDR": "127.0.0.1", "PYTHONFAULTHANDLER": "1"}
    # By default every rank starts a thread per core: those of torch and of the tokenizers would
    # compete.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS"), str(threads_per_rank(nproc)))
    return {
        **threads,
        **os.environ,
        **fixed,
        **{name: str(value) for name, value in numbers.items()},
    }


def explain_sigbus(train_args: Sequence[str]) -> str:
    """Return one sentence for the report of a rank that SIGBUS ended; never raises.

    Args:
        train_args: Arguments of train.py, from which the stores are located.
    """
    try:
        changed = _changed_files(train_args)
    except (MmldlmError, OSError, ImportError, ValueError):
        changed = []
    if not changed:
        return "a memory-mapped file became shorter, or /dev/shm is full (df /dev/shm)"
    return (
        f"files of the store were changed while it was read: {join_some(changed, 5, '; ')}. Copy"
        " the store again and resume; replace a store by renaming a new folder, never by"
        " overwriting its files"
    )


def _changed_files(train_args: Sequence[str]) -> list[str]:
    from mmldlm.data.store import changed_files

    config = _config_of(train_args)
    return [line for root in config.data.roots for line in changed_files(root)]


def _config_of(train_args: Sequence[str]) -> Config:
    from mmldlm.tasks.registry import load_config

    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--config-name")
    parser.add_argument("--config")
    options, rest = parser.parse_known_args(train_args)
    overrides = [argument for argument in rest if "=" in argument and not argument.startswith("-")]
    return load_config(options.config_name, options.config, overrides)


def describe_resume(train_args: Sequence[str]) -> str | None:
    """Return how a failed run continues, or None where it saved nothing; never raises.

    Args:
        train_args: Arguments of train.py, from which the run's folder is located.
    """
    from mmldlm.checkpoints.locate import holds_checkpoints

    try:
        run_dir = _config_of(train_args).run_dir()
        if not holds_checkpoints(run_dir):
            return None
    except (MmldlmError, OSError, ImportError, ValueError):
        return None
    return (
        f"{run_dir} holds checkpoints: the same command with training.resume=auto continues from"
        " the newest"
    )


if __name__ == "__main__":
    open_standard_streams()
    try:
        exit_code = run_local([sys.executable, "-u", *sys.argv[2:]], int(sys.argv[1]))
    except UserError as error:
        # This machine has no loopback interface.
        print_line(f"error: {error}", sys.stderr)
        exit_code = error.exit_code
    exit_without_teardown(exit_code)
