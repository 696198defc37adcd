"""`mmldlm preflight`: check whether a run will start on its hosts, fit in their memory and
finish.
"""

from __future__ import annotations

import argparse

from mmldlm.commands import config_options
from mmldlm.errors import UserError
from mmldlm.utils import option_types
from mmldlm.utils.command_parser import CommandParser
from mmldlm.utils.settings import flag

LAUNCHERS = ("deepspeed", "torchrun", "mpi", "slurm")
DEFAULT_LEVEL = 2


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the run; shared with `mmldlm launch`."""
    if isinstance(parser, CommandParser):
        parser.takes_script = True
        parser.epilog = "behind --: a training script of your own and its arguments"
    parser.set_defaults(script=None)
    config_options.add_arguments(parser)
    add = parser.add_argument
    add(
        "--hostfile",
        type=option_types.path,
        metavar="FILE",
        help="DeepSpeed hostfile (default: this machine alone)",
    )
    add(
        "--launcher",
        choices=LAUNCHERS,
        default="deepspeed",
        help="launcher of the ranks (default %(default)s)",
    )
    add("--nproc", type=option_types.integer(1, 4096), metavar="N",
        help="ranks on this machine, without a hostfile (default: its GPUs, or 1; 1 for"
             " engine.kind=single)")  # fmt: skip
    add = parser.add_argument_group("connections").add_argument
    add("--master_addr", "--master-addr", metavar="ADDRESS", help="address of the first node")
    add("--master_port", "--master-port", type=option_types.port, default=29500, metavar="PORT",
        help="port of the process group's store (default %(default)s)")  # fmt: skip
    add("--ssh-port", type=option_types.port, metavar="PORT", help="port of sshd on the nodes")
    add(
        "--ssh-option",
        action="append",
        default=[],
        metavar="ARG",
        help="additional argument for ssh, before mmldlm's own (repeatable)",
    )
    add = parser.add_argument_group("checks").add_argument
    add("--strict", action="store_true", help="treat warnings as failures")
    add("--only", metavar="ID,...", help="run only these checks")
    add("--skip", metavar="ID,...", help="do not run these checks")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mmldlm preflight`."""
    add_run_arguments(parser)
    parser.add_argument(
        "--level",
        type=int,
        choices=range(5),
        default=DEFAULT_LEVEL,
        help=(
            "0 this machine, 1 each node, 2 nodes together (default), 3 collectives, 4 two"
            " training steps"
        ),
    )
    parser.add_argument(
        "--json",
        type=option_types.path,
        metavar="FILE",
        help="also write the receipt to this file",
    )
    parser.add_argument(
        "--explain", metavar="ID", help="print the description of a check ('all': list all checks)"
    )
    parser.add_argument(
        "--fix", action="store_true", help="write variables not propagated to ./.deepspeed_env"
    )
    # Of `mmldlm launch --elastic`, which passes all variables of this shell to the ranks.
    parser.add_argument("--propagates-all", action="store_true", help=argparse.SUPPRESS)


def check_script_options(args: argparse.Namespace) -> None:
    """Refuse what belongs to a run of mmldlm's own beside a script (`-- SCRIPT`).

    Raises:
        UserError: such an option, or no script behind `--`.
    """
    if args.script is None:
        return
    if not args.script or args.script == ["-m"]:
        fix = "write it behind --: mmldlm launch --hostfile H -- train.py --lr 1e-4"
        raise UserError("a training script and its arguments behind --", "none", fix)
    of_runs = ("config_name", "config", "deepspeed_config", "overrides")
    if given := [name for name in of_runs if getattr(args, name)]:
        found = ", ".join(flag(name) if name != "overrides" else "key=value" for name in given)
        fix = "give the script its own options behind --, or omit -- and what follows it"
        raise UserError("no config of mmldlm's beside a script of your own", found, fix)
    if args.level > 3:
        fix = "add --level 3, which runs collectives on all ranks"
        found = "two training steps are mmldlm's own"
        raise UserError("--level up to 3 with a script of your own", found, fix)


def main(args: argparse.Namespace) -> int:
    """Run the preflight; return the exit code 0, 1, 2 or 3."""
    check_script_options(args)
    from mmldlm.preflight.runner import explain, run_preflight

    if args.explain:
        return explain(args.explain)
    _, code = run_preflight(args)
    return code
