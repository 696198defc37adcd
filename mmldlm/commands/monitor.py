"""`mmldlm monitor RUN`: follow a run's log and report whether the run is healthy."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmldlm.errors import EXIT_DONE, EXIT_FAILED
from mmldlm.observe.health_monitor import follow


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mmldlm monitor`."""
    parser.add_argument("run", help="the run's folder: {logging.save_dir}/{logging.run_name}")
    parser.add_argument("--once", action="store_true", help="print one report and exit (with 1 if unhealthy)")
    parser.add_argument("--interval", type=float, default=10.0, help="seconds between two reports (default 10)")
    parser.add_argument("--window", type=int, default=100, help="number of steps that are assessed (default 100)")
    parser.add_argument("--stall-seconds", type=float, help="idle time that counts as stalled")


def main(args: argparse.Namespace) -> int:
    """Report until the run ends (or once); return 0 if healthy, 1 if unhealthy at the last report."""
    health = follow(Path(args.run), args.once, args.interval, args.window, args.stall_seconds)
    return EXIT_FAILED if health.problems else EXIT_DONE
