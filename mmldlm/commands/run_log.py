"""`mmldlm plot RUN`, `mmldlm report RUN` and `mmldlm monitor RUN`: draw a run's log, write a page
about the run, or follow it and report whether it is healthy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mmldlm.errors import EXIT_DONE, EXIT_FAILED
from mmldlm.utils import option_types
from mmldlm.utils.run_files import REPORT

_RUN_HELP = "the run's folder: {logging.save_dir}/{logging.run_name}"


def add_plot_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mmldlm plot`."""
    parser.add_argument("run", type=option_types.path, help=_RUN_HELP)
    parser.add_argument(
        "--out",
        type=option_types.path,
        help="image to write (default: plots/loss.png in the run's folder)",
    )
    parser.add_argument("--log-scale", action="store_true", help="logarithmic losses")


def plot(args: argparse.Namespace) -> int:
    """Draw, and print the path of the image."""
    from mmldlm.observe.plots import plot_path, plot_run, require_steps
    from mmldlm.utils.paths import check_writable_file, claimed_file

    if args.out:
        check_writable_file(args.out, "--out")
    require_steps(args.run)  # refuses a folder that is not a run's, before anything is made in it
    out = check_writable_file(plot_path(args.run, args.out), "--out")
    with claimed_file(out, "--out"):
        print(plot_run(args.run, args.out, args.log_scale))
    return EXIT_DONE


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mmldlm report`."""
    parser.add_argument("run", type=option_types.path, help=_RUN_HELP)
    parser.add_argument(
        "--compare", type=option_types.path, help="folder of another run, to show beside it"
    )
    parser.add_argument(
        "--html",
        type=option_types.path,
        help="page to write (default: report.html in the run's folder)",
    )


def report(args: argparse.Namespace) -> int:
    """Write the page, and print its path."""
    from mmldlm.observe.pages.page import check_page_path, write_page
    from mmldlm.observe.run_record import read_runs
    from mmldlm.observe.run_report import report_page

    if args.html:
        check_page_path(args.html, "--html")
    runs = read_runs([folder for folder in (args.run, args.compare) if folder is not None])
    page = check_page_path(args.html or Path(args.run) / REPORT, "--html")
    write_page(page, report_page(runs))
    print(page)
    return EXIT_DONE


def add_monitor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mmldlm monitor`."""
    parser.add_argument("run", type=option_types.path, help=_RUN_HELP)
    parser.add_argument(
        "--once", action="store_true", help="print one report and exit (with 1 if unhealthy)"
    )
    parser.add_argument(
        "--interval",
        type=option_types.number(0.01, option_types.ONE_YEAR),
        default=10.0,
        help="seconds between two reports (default 10)",
    )
    parser.add_argument(
        "--window",
        type=option_types.count,
        default=100,
        help="number of steps that are assessed (default 100)",
    )
    parser.add_argument(
        "--stall-seconds", type=option_types.seconds, help="idle time that counts as stalled"
    )


def monitor(args: argparse.Namespace) -> int:
    """Report until the run ends (or once); return 0 if healthy, 1 if unhealthy at the last
    report.
    """
    from mmldlm.observe.monitor import follow

    health = follow(Path(args.run), args.once, args.interval, args.window, args.stall_seconds)
    return EXIT_FAILED if health.problems else EXIT_DONE
