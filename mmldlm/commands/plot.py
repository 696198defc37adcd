"""`mmldlm plot RUN`: draw a run's losses, gradient norm and learning rate."""

from __future__ import annotations

import argparse

from mmldlm.errors import EXIT_DONE
from mmldlm.observe.loss_plots import plot_run
from mmldlm.utils.output_paths import check_writable_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mmldlm plot`."""
    parser.add_argument("run", help="the run's folder: {logging.save_dir}/{logging.run_name}")
    parser.add_argument("--out", help="image to write (default: plots/loss.png in the run's folder)")
    parser.add_argument("--log-scale", action="store_true", help="logarithmic losses")


def main(args: argparse.Namespace) -> int:
    """Draw, and print the path of the image."""
    if args.out:
        check_writable_file(args.out, "--out")
    print(plot_run(args.run, args.out, args.log_scale))
    return EXIT_DONE
