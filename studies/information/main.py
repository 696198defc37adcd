"""What does parallel decoding cost a model, by its own likelihoods?

    python studies/information/main.py --checkpoint RUN --data STORE [--samplers NAME,..]
        [--num-samples N] [--batch-size N] [--seed N] [--json FILE] [--plot FILE.png]
        [--device NAME]

Measures the information curve, the NELBO by number of passes under even and optimal schedules, and
the exact likelihood of samplers whose order does not depend on their draws. README.md explains the
figures and has the result.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# A study runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mmldlm.data.store import Store
from mmldlm.errors import EXIT_DONE, MmldlmError
from mmldlm.inference.load import load_pretrained, usable_device
from mmldlm.utils import option_types
from mmldlm.utils.paths import check_writable_file
from mmldlm.utils.progress import ProgressBar
from studies.information.measure import InformationSettings, measure_information
from studies.information.plot import plot_information


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the files that were asked for, print the report; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--checkpoint", type=option_types.path, required=True, metavar="PATH")
    add("--data", type=option_types.path, required=True, metavar="STORE")
    add("--num-samples", type=option_types.integer(2), metavar="N")
    add("--samplers", metavar="NAME,..")
    add("--batch-size", type=option_types.count, metavar="N")
    add("--seed", type=option_types.seed, default=0)
    add("--device")
    add("--json", type=option_types.path, metavar="FILE")
    add("--plot", type=option_types.path, metavar="FILE.png")
    args = parser.parse_args(arguments)
    try:
        measure(args)
    except MmldlmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return EXIT_DONE


def measure(args: argparse.Namespace) -> None:
    """Measure a checkpoint, write and print its report."""
    for option in ("json", "plot"):
        if getattr(args, option):
            check_writable_file(getattr(args, option), f"--{option}")
    names = args.samplers and [name.strip() for name in args.samplers.split(",")]
    settings = InformationSettings(args.num_samples, names, args.seed, args.batch_size)
    pretrained = load_pretrained(args.checkpoint, usable_device(args.device))
    with ProgressBar() as progress:
        report = measure_information(
            pretrained, Store(args.data, "validation"), settings, progress.start
        )
    lines = []
    if args.plot:
        plot_information(report, args.plot)
        lines.append(f"plot: {args.plot}")
    if args.json:
        report.write(args.json)
        lines.append(f"written to {args.json}")
    report.show()
    print(*lines, sep="\n")


if __name__ == "__main__":
    sys.exit(main())
