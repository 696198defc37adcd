"""Launch a run: preflight, then the launcher under a watcher, with retries."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

from mmldlm.checkpoints.locate import find_latest_valid
from mmldlm.checkpoints.manifest import MANIFEST
from mmldlm.cluster.launcher_commands import train_arguments
from mmldlm.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, UserError
from mmldlm.launch.local_launcher import COLLECTIVE_EXIT_CODES
from mmldlm.launch.outcome import Outcome
from mmldlm.launch.watcher import Watcher
from mmldlm.preflight.context import Context
from mmldlm.preflight.runner import run_preflight
from mmldlm.utils.screen import print_line


def launch(args: argparse.Namespace) -> int:
    """Run the preflight, then up to 1 + args.retries attempts.

    Returns:
        0, the worst exit code of any rank, or the code of the preflight (2 if the data cannot be
        used).
    """
    context, code = run_preflight(args)
    if code != EXIT_DONE:
        # The code with which the ranks would exit: missing or mismatched data is bad input.
        return EXIT_USAGE if code == EXIT_FAILED and context.data_facts.get("data_error") else code
    train_args, training = train_arguments(args), context.config.training
    global_batch = training.train_batch_size * training.grad_accum_steps * context.world_size
    run_dir = context.config.run_dir()
    initial_checkpoint = latest_checkpoint(run_dir)
    for attempt in range(args.retries + 1):
        if attempt:
            print_line(f"\nattempt {attempt + 1} of {args.retries + 1}")
        log_dir = create_log_dir(context)
        outcome = Watcher(context, train_args, log_dir, args.grace).run()
        print_outcome(outcome, log_dir, latest_checkpoint(run_dir))
        if attempt == args.retries or not _is_retryable(outcome, context.launcher):
            break
        # Only a checkpoint saved by this launch is resumed: auto would otherwise start from
        # scratch, or take a checkpoint of another run instead of the requested training.resume.
        if latest_checkpoint(run_dir) not in (None, initial_checkpoint):
            train_args.append("training.resume=auto")
        if args.elastic and outcome.failed_nodes and not context.local:
            overrides = exclude_nodes(context, outcome.failed_nodes, global_batch)
            if overrides is None:
                break
            # The last override of a key wins.
            train_args += overrides
    return outcome.code


def _is_retryable(outcome: Outcome, launcher: str) -> bool:
    """Return whether an attempt failed in a way that a restart may fix."""
    if outcome.code == EXIT_DONE or outcome.interrupted:
        return False
    # Slurm signals the ranks before the time limit; elsewhere such a signal is a fault.
    by_foreign_signal = outcome.code == EXIT_INTERRUPTED and launcher != "slurm"
    return by_foreign_signal or outcome.code not in COLLECTIVE_EXIT_CODES


def latest_checkpoint(run_dir: Path) -> tuple[Path, int] | None:
    """Return the latest complete checkpoint of a run and its commit time (ns); training verifies
    the checksums.
    """
    path = find_latest_valid(run_dir, checksums=False)
    return None if path is None else (path, (path / MANIFEST).stat().st_mtime_ns)


def create_log_dir(context: Context) -> Path:
    """Create a new folder for the logs of one attempt, in the run folder.

    Raises:
        UserError: it cannot be created.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%d_%H%M%S")
    folder = context.config.run_dir() / "logs"
    for name in (f"launch_{stamp}", *(f"launch_{stamp}_{suffix}" for suffix in range(2, 100))):
        try:
            (folder / name).mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(
                f"a writable log folder {folder}", error.strerror, "check logging.save_dir"
            ) from error
        return folder / name
    raise AssertionError(f"a hundred launches in one second in {folder}")


def print_outcome(outcome: Outcome, log_dir: Path, checkpoint: tuple[Path, int] | None) -> None:
    """Print why the attempt ended, last lines of the first failed rank, the latest checkpoint and
    the log folder.
    """
    if outcome.code == EXIT_DONE:
        print_line(f"done; logs of all ranks: {log_dir}", sys.stderr)
        return
    print_line(f"\nended: {outcome.reason} (exit {outcome.code})", sys.stderr)
    for line in outcome.last_lines:
        print_line(f"    {line}", sys.stderr)
    saved = (
        "no complete checkpoint in the run folder"
        if checkpoint is None
        else f"latest checkpoint: {checkpoint[0]}"
    )
    print_line(f"{saved}\nlogs of all ranks: {log_dir}", sys.stderr)


def exclude_nodes(context: Context, failed: list[str], global_batch: int) -> list[str] | None:
    """Remove nodes from the run; return the overrides that keep its global batch, or None if that
    is impossible.
    """
    training = context.config.training
    remaining = [node for node in context.nodes if node.name not in failed]
    num_ranks = sum(node.slots for node in remaining)
    if not remaining or global_batch % (num_ranks * training.train_batch_size):
        print_line(
            f"cannot continue with {num_ranks} rank(s): the global batch of {global_batch} is not"
            f" a multiple of {num_ranks} x training.train_batch_size={training.train_batch_size};"
            " the sample order depends on it",
            sys.stderr,
        )
        return None
    overrides = [
        f"training.grad_accum_steps={global_batch // (num_ranks * training.train_batch_size)}"
    ]
    replicas = context.config.engine.hsdp_replicas
    if replicas > 1:
        # One replica per node where it was so, and a number that divides the ranks. Checkpoints
        # fit any number.
        wanted = len(remaining) if replicas == len(context.nodes) else replicas
        fitting = max(n for n in range(1, wanted + 1) if num_ranks % n == 0)
        overrides.append(f"engine.hsdp_replicas={fitting}")
    print_line(f"continuing without {', '.join(failed)}: {num_ranks} rank(s)", sys.stderr)
    old_first, context.nodes = context.names[0], remaining
    first = remaining[0].name
    if first != old_first:
        # The known master address was that of another node.
        context.master["address"] = (
            context.data_address(first) if context.value(first, "network") else first
        )
    return overrides
