"""Launch a run: preflight, then the launcher under a watcher, with retries."""

from __future__ import annotations

import argparse
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from mmldlm.checkpoints.locate import find_latest_valid, read_link
from mmldlm.checkpoints.manifest import MANIFEST
from mmldlm.cluster.launcher_commands import TRAIN, train_arguments
from mmldlm.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    MmldlmError,
    UserError,
)
from mmldlm.launch.elastic import ElasticNodes, ReturnWatch
from mmldlm.launch.local_launcher import COLLECTIVE_EXIT_CODES
from mmldlm.launch.outcome import Outcome
from mmldlm.launch.watcher import Watcher
from mmldlm.preflight.context import Context
from mmldlm.preflight.runner import run_preflight
from mmldlm.utils.formatting import first_line
from mmldlm.utils.run_files import LOGS
from mmldlm.utils.streams import print_line

# Seconds before the first, the second and every further retry: what has failed (a full disk, a
# node that starts again, a name server) may need time.
RETRY_PAUSES = (10, 30, 60)


def launch(args: argparse.Namespace) -> int:
    """Run the preflight, then up to 1 + args.retries attempts; an attempt that ends so that nodes
    can return is not counted.

    Returns:
        0, the exit code of the ranks (a fault of one of them before what they agree on, a stop by
        a signal last), or the code of the preflight (2 if the data cannot be used).
    """
    context, code = run_preflight(args)
    if code != EXIT_DONE:
        # The code with which the ranks would exit: missing or mismatched data is bad input.
        return EXIT_USAGE if code == EXIT_FAILED and context.data_facts.get("data_error") else code
    command = [TRAIN, *train_arguments(args)] if args.script is None else list(args.script)
    run_dir = None if context.config is None else context.config.run_dir()
    nodes = ElasticNodes(context) if args.elastic and not context.local else None
    if nodes is not None:
        nodes.print_plan()
    initial_checkpoint = latest_checkpoint(run_dir)
    log_dir = create_log_dir(_log_folder(args, run_dir))
    resume: list[str] = []
    failures = 0
    while True:
        overrides = [] if nodes is None else nodes.overrides()
        outcome = _attempt(args, context, [*command, *resume, *overrides], log_dir, run_dir, nodes)
        print_outcome(outcome, log_dir, run_dir)
        if outcome.returned:
            assert nodes is not None
            nodes.take_back(outcome.returned)
        else:
            if failures == args.retries or not _is_retryable(outcome, context):
                return outcome.code
            if nodes is not None and not nodes.exclude(outcome.failed_nodes):
                return outcome.code
            failures += 1
            _pause(failures, args.retries)
        while (storage := _open_storage(args, run_dir)) is None:
            if failures == args.retries:
                return EXIT_FAILED if outcome.returned else outcome.code
            failures += 1
            _pause(failures, args.retries)
        log_dir, latest = storage
        # Only a checkpoint saved by this launch is resumed: auto would otherwise start from
        # scratch, or take a checkpoint of another run instead of the requested training.resume.
        if latest not in (None, initial_checkpoint):
            resume = ["training.resume=auto"]


def _pause(failures: int, retries: int) -> None:
    """Wait before the next attempt. No rank is running: a signal to this process ends the launch
    at once.
    """
    pause = RETRY_PAUSES[min(failures, len(RETRY_PAUSES)) - 1]
    print_line(f"\nattempt {failures + 1} of {retries + 1} in {pause} s")
    time.sleep(pause)


def _open_storage(
    args: argparse.Namespace, run_dir: Path | None
) -> tuple[Path, tuple[Path, int] | None] | None:
    """Return a new folder for the logs of the next attempt, and the latest checkpoint; None, and
    why, while the disk of either is full or away, which often is what ended the last attempt.
    """
    try:
        latest = latest_checkpoint(run_dir)
        return create_log_dir(_log_folder(args, run_dir)), latest
    except (MmldlmError, OSError) as error:
        print_line(f"\nno attempt is possible yet: {error}", sys.stderr)
        return None


def _attempt(
    args: argparse.Namespace,
    context: Context,
    command: list[str],
    log_dir: Path,
    run_dir: Path | None,
    nodes: ElasticNodes | None,
) -> Outcome:
    """Start the ranks and watch them to the end; meanwhile ask absent nodes whether they are
    back. A script of the user's own does not get them back: whether it saves is unknown.
    """
    watcher = Watcher(context, command, log_dir, args.grace, args.heartbeat_timeout)
    if nodes is None or not nodes.absent or run_dir is None:
        return watcher.run()
    saved, watch = read_link(run_dir), ReturnWatch(context, nodes.absent_nodes(), log_dir)

    def returned() -> list[str]:
        """Names of the nodes that are back, if more ranks can train with them, and once this
        attempt has saved a checkpoint: a node that fails again and again must not keep the run
        from going on.
        """
        names = watch.returned()
        is_worth_it = bool(names) and nodes.would_gain(names)
        return names if is_worth_it and read_link(run_dir) != saved else []

    watcher.returned_nodes = returned
    try:
        return watcher.run()
    finally:
        watch.stop()
        nodes.mark_present(watch.returned())


def _is_retryable(outcome: Outcome, context: Context) -> bool:
    """Return whether an attempt failed in a way that a restart may fix."""
    if outcome.code == EXIT_DONE or outcome.interrupted:
        return False
    # Slurm signals the ranks before the time limit; elsewhere such a signal is a fault.
    by_foreign_signal = outcome.code == EXIT_INTERRUPTED and context.launcher != "slurm"
    # The exit codes of a script of the user's own have no meaning here.
    is_final = context.script is None and outcome.code in COLLECTIVE_EXIT_CODES
    return by_foreign_signal or not is_final


def latest_checkpoint(run_dir: Path | None) -> tuple[Path, int] | None:
    """Return the latest complete checkpoint of a run and its commit time (ns); training verifies
    the checksums. None without one, or without a run folder.
    """
    path = None if run_dir is None else find_latest_valid(run_dir, checksums=False)
    return None if path is None else (path, (path / MANIFEST).stat().st_mtime_ns)


def _log_folder(args: argparse.Namespace, run_dir: Path | None) -> Path:
    """Return the folder for the folders of all attempts."""
    if args.log_dir is not None:
        return Path(args.log_dir)
    return Path("mmldlm_logs") if run_dir is None else run_dir / LOGS


def create_log_dir(folder: Path) -> Path:
    """Create a new folder for the logs of one attempt.

    Raises:
        UserError: it cannot be created.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%d_%H%M%S")
    for name in (f"launch_{stamp}", *(f"launch_{stamp}_{suffix}" for suffix in range(2, 100))):
        try:
            (folder / name).mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(
                f"a writable log folder {folder}",
                str(error.strerror),
                "check logging.save_dir, or name another folder with --log-dir",
            ) from error
        return folder / name
    raise AssertionError(f"a hundred launches in one second in {folder}")


def print_outcome(outcome: Outcome, log_dir: Path, run_dir: Path | None) -> None:
    """Print why the attempt ended, last lines of the first failed rank, the latest checkpoint of a
    run of mmldlm and the log folder.
    """
    if outcome.returned:
        return
    if outcome.code == EXIT_DONE:
        print_line(f"done; logs of all ranks: {log_dir}", sys.stderr)
        return
    print_line(f"\nended: {outcome.reason} (exit {outcome.code})", sys.stderr)
    for line in outcome.last_lines:
        print_line(f"    {line}", sys.stderr)
    if run_dir is not None:
        try:
            checkpoint = latest_checkpoint(run_dir)
        except (MmldlmError, OSError) as error:
            saved = f"latest checkpoint: cannot be read now: {first_line(error)}"
        else:
            saved = (
                "no complete checkpoint in the run folder"
                if checkpoint is None
                else f"latest checkpoint: {checkpoint[0]}"
            )
        print_line(saved, sys.stderr)
    print_line(f"logs of all ranks: {log_dir}", sys.stderr)
