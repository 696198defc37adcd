"""`mmldlm sanity`: check a config with a few real steps in one process; print a table of PASS and
FAIL.
"""

from __future__ import annotations

import argparse
import os
import sys

from mmldlm.commands import config_options
from mmldlm.config.schema import Config
from mmldlm.debug.sanity import OVERFIT_STEPS, SanityRunner, as_dict, heading, print_tables
from mmldlm.engines.build import check_engine
from mmldlm.errors import EXIT_DONE, EXIT_FAILED, UserError
from mmldlm.tasks.registry import open_run_data
from mmldlm.utils import option_types
from mmldlm.utils.atomic_files import write_json
from mmldlm.utils.environment import int_from_env
from mmldlm.utils.formatting import for_screen
from mmldlm.utils.paths import check_writable_file, claimed_file
from mmldlm.utils.screen import open_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mmldlm sanity` to those of `train`. Their names are those of LMOL."""
    config_options.add_arguments(parser)
    option = parser.add_argument
    option(
        "--max_steps",
        "--max-steps",
        type=option_types.count,
        default=3,
        help="steps on the run's batches (default 3)",
    )
    option(
        "--overfit_steps",
        "--overfit-steps",
        type=option_types.integer(low=2),
        default=OVERFIT_STEPS,
        help=f"steps on one batch, to check that its loss falls (default {OVERFIT_STEPS})",
    )
    option("--amp_dtype", "--amp-dtype", choices=("bf16", "fp32", "fp16"), help="training.dtype")
    option("--grad_log_interval", "--grad-log-interval", type=option_types.size, default=1,
           help="steps between two layer statistics, 0 for none (default 1)")  # fmt: skip
    option(
        "--detect_anomaly",
        "--detect-anomaly",
        type=_bool,
        default=False,
        metavar="true|false",
        help="torch's anomaly detection: slow, names the operation behind a NaN (default false)",
    )
    option(
        "--clip_grad_norm",
        "--clip-grad-norm",
        type=option_types.number(above=0),
        help="optimizer.grad_clip_norm",
    )
    option(
        "--json", type=option_types.path, metavar="FILE", help="also write the findings as JSON"
    )


def main(args: argparse.Namespace) -> int:
    """Run the steps and print the tables; return 0 if every check passed, else 1.

    Raises:
        UserError: an invalid config, or more than one process.
    """
    if int_from_env("WORLD_SIZE", 1) != 1:
        raise UserError(
            "one process",
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}",
            "run `mmldlm sanity` by itself",
        )
    overrides = {"training.dtype": args.amp_dtype, "optimizer.grad_clip_norm": args.clip_grad_norm}
    args.overrides = [
        *args.overrides,
        *(f"{key}={value}" for key, value in overrides.items() if value is not None),
    ]
    config = config_options.parse_config(args)
    check_engine(config, 1)
    if args.json:
        check_writable_file(args.json, "--json")
    with claimed_file(args.json, "--json"):
        return _check(args, config)


def _check(args: argparse.Namespace, config: Config) -> int:
    console = open_console()

    def log(text: str) -> None:
        console.print(for_screen(text, sys.stdout, " " * 9), soft_wrap=True)

    log("reading  the data")
    data = open_run_data(config)
    log(f"data     {data.describe()}")
    sanity = SanityRunner(data, args.grad_log_interval, args.detect_anomaly)
    sanity.log = log
    log(heading(sanity))
    sanity.run(args.max_steps, args.overfit_steps)
    print_tables(sanity, console)
    report = as_dict(sanity)
    if args.json:
        write_json(args.json, report, indent=2)
    return EXIT_DONE if report["ok"] else EXIT_FAILED


def _bool(text: str) -> bool:
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text} is neither true nor false")
    return values[text.lower()]
