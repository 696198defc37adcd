"""`mmldlm launch`: preflight, then the launcher, then a watcher."""

from __future__ import annotations

import argparse

from mmldlm.commands.preflight import add_run_arguments, check_script_options
from mmldlm.distributed.environment import check_single_process
from mmldlm.errors import UserError
from mmldlm.launch.script_heartbeat import HEARTBEAT_TIMEOUT
from mmldlm.utils import option_types


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mmldlm launch`."""
    add_run_arguments(parser)
    add = parser.add_argument
    add(
        "--level",
        type=int,
        choices=range(5),
        default=2,
        help="level of the preflight (default %(default)s)",
    )
    add(
        "--retries",
        type=option_types.size,
        default=0,
        metavar="N",
        help="restarts after a failure, from the latest checkpoint",
    )
    add(
        "--log-dir",
        type=option_types.path,
        metavar="DIR",
        help="folder for the logs of all ranks (default: the run folder; of a script mmldlm_logs)",
    )
    add(
        "--elastic",
        action="store_true",
        help="retry without failed nodes, and take them back when they return",
    )
    add("--grace", type=option_types.seconds, default=120.0, metavar="S",
        help="seconds for saving a checkpoint after Ctrl-C (default %(default)s)")  # fmt: skip
    add("--heartbeat-timeout", type=option_types.seconds, metavar="S",
        help="end a script of your own whose ranks have not called mmldlm.heartbeat for S seconds"
        f" (default {HEARTBEAT_TIMEOUT:.0f}; one that never calls it is not watched)")  # fmt: skip
    # The rank wrapper passes the variables itself, whatever the launcher propagates.
    parser.set_defaults(propagates_all=True, json=None, fix=False)


def main(args: argparse.Namespace) -> int:
    """Launch; return the exit code of the ranks or of the preflight."""
    check_single_process("mmldlm launch")
    check_script_options(args)
    if args.heartbeat_timeout is None:
        args.heartbeat_timeout = HEARTBEAT_TIMEOUT
    elif args.script is None:
        raise UserError(
            "--heartbeat-timeout with a script of your own behind --",
            "a run of mmldlm",
            "set engine.collective_timeout=S instead",
        )
    if args.elastic and args.retries == 0:
        raise UserError(
            "--retries N beside --elastic, which continues after a failure",
            "no --retries",
            "add --retries 3",
        )
    from mmldlm.launch.launcher import launch

    return launch(args)
