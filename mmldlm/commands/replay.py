"""`mmldlm replay RUN EVENT`: rerun a skipped step and name the operation that produced its
non-finite numbers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mmldlm.debug.replay import DTYPES, replay_skipped_step
from mmldlm.errors import EXIT_DONE
from mmldlm.utils import option_types
from mmldlm.utils.atomic_files import write_json
from mmldlm.utils.paths import check_writable_file, claimed_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mmldlm replay`."""
    parser.add_argument("run", type=option_types.path, metavar="RUN", help="the run's folder")
    parser.add_argument(
        "event", metavar="EVENT", help="step number of a skip in events.jsonl, or `last`"
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="first retrain from the nearest checkpoint to the step, in this process",
    )
    parser.add_argument(
        "--checkpoint",
        type=option_types.path,
        metavar="PATH",
        help="take the weights from this checkpoint",
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        help="compute dtypes to try (default: the run's, bf16 and fp32)",
    )
    parser.add_argument(
        "--samples",
        type=option_types.size,
        default=256,
        metavar="N",
        help="maximum number of samples run one by one (default 256)",
    )
    parser.add_argument(
        "--json", type=option_types.path, metavar="FILE", help="also write the findings as JSON"
    )


def main(args: argparse.Namespace) -> int:
    """Replay and print the findings; return 0, also if nothing was found."""
    if args.json:
        check_writable_file(args.json, "--json")
    with claimed_file(args.json, "--json"):
        report = replay_skipped_step(
            Path(args.run),
            args.event,
            exact=args.exact,
            checkpoint=args.checkpoint,
            dtypes=args.dtypes,
            max_samples=args.samples,
        )
        if args.json:
            write_json(args.json, report, indent=2)
    return EXIT_DONE
