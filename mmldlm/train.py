"""Entry of a training rank, for `deepspeed mmldlm/train.py`, `torchrun -m mmldlm.train`, `mmldlm
train` and python.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

# `deepspeed mmldlm/train.py` puts the package's own folder first on the path.
if __package__ in (None, ""):
    sys.path[: 0 if getattr(sys.flags, "safe_path", False) else 1] = [
        str(Path(__file__).resolve().parent.parent)
    ]

from mmldlm.commands.config_options import add_arguments, parse_config
from mmldlm.distributed.environment import local_world_size, set_rank_environment
from mmldlm.distributed.error_reporting import (
    exit_without_teardown,
    leave_process_group,
    log_line,
    report_error_once,
    report_traceback,
)
from mmldlm.errors import EXIT_FAILED, Interrupted, MmldlmError
from mmldlm.training.run_check import check_run
from mmldlm.training.signals import StopSignal
from mmldlm.utils.command_parser import CommandParser
from mmldlm.utils.environment import int_from_env
from mmldlm.utils.own_code import report_exit_as_error
from mmldlm.utils.paths import check_working_folder
from mmldlm.utils.resources import raise_open_files, threads_per_rank
from mmldlm.utils.run_files import LOGS
from mmldlm.utils.stop_signals import keep_exit_codes
from mmldlm.utils.streams import open_standard_streams

# At run time, torch is imported after the command line was checked.
if TYPE_CHECKING:
    from mmldlm.data.run_data import RunData


def train(data: RunData, stop: StopSignal | None = None) -> None:
    """Train to the end of training.num_train_steps. Collective over all ranks.

    Args:
        data: Result of check_run.
        stop: Stop signal of this process; None makes one.

    Raises:
        Interrupted: on every rank, when a signal ended the run.
    """
    from mmldlm.observe.gpu_memory import explain_out_of_memory
    from mmldlm.training import loop
    from mmldlm.training.session import open_session

    with (
        explain_out_of_memory(data.config.training.memory_snapshot),
        open_session(data, stop or StopSignal()) as session,
    ):
        loop.train(session)


def main(argv: list[str] | None = None) -> int:
    """Run one rank; return its exit code."""
    open_standard_streams()
    keep_exit_codes()
    parser = CommandParser("mmldlm.train", __doc__)
    add_arguments(parser)
    # The deepspeed launcher adds the first; DeepSpeed's own scripts take the second, so people
    # type it.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse(argv)
    stop = StopSignal()
    config = None
    try:
        # Every rank finds the same mistake by itself before it waits for another; one of them
        # reports it.
        check_working_folder()
        set_rank_environment()
        raise_open_files()
        # Each rank of a node would start a thread per core; torch, which reads this, is not
        # imported yet.
        num_local = local_world_size(int_from_env("LOCAL_RANK", 0))
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(num_local)))
        with report_exit_as_error():
            config = parse_config(args)
            train(check_run(config, int_from_env("WORLD_SIZE", 1)), stop)
    except MmldlmError as error:
        report_error_once(error, "stopped" if isinstance(error, Interrupted) else "ERROR")
        return error.exit_code
    except Exception as error:
        from mmldlm.data.loader import explain_worker_error  # with torch

        # A data worker that dies now would raise in here.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if (explained := explain_worker_error(error)) is not None:
            log_line(f"ERROR: {explained}")
        else:
            report_traceback(error, None if config is None else config.run_dir() / LOGS)
        # Without process-group teardown, which would block on ranks that have exited.
        return EXIT_FAILED
    leave_process_group()
    return 0


if __name__ == "__main__":
    exit_without_teardown(main())
