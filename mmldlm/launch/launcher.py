"""Launch a run: preflight, then the launcher under a watcher, with retries."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

from mmldlm.checkpoints.locate import find_latest_valid
from mmldlm.checkpoints.manifest import MANIFEST
from mmldlm.cluster.launcher_commands import TRAIN, train_arguments
from mmldlm.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, UserError
from mmldlm.launch.local_launcher import COLLECTIVE_EXIT_CODES
from mmldlm.launch.outcome import Outcome
from mmldlm.launch.watcher import Watcher
from mmldlm.preflight.context import Context
from mmldlm.preflight.runner import run_preflight
from mmldlm.utils.run_files import LOGS
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
    command = [TRAIN, *train_arguments(args)] if args.script is None else list(args.script)
    run_dir = None if context.config is None else context.config.run_dir()
    global_batch = None if context.config is None else _global_batch(context)
    initial_checkpoint = latest_checkpoint(run_dir)
    for attempt in range(args.retries + 1):
        if attempt:
            print_line(f"\nattempt {attempt + 1} of {args.retries + 1}")
        log_dir = create_log_dir(_log_folder(args, run_dir))
        outcome = Watcher(context, command, log_dir, args.grace, args.heartbeat_timeout).run()
        print_outcome(outcome, log_dir, run_dir)
        if attempt == args.retries or not _is_retryable(outcome, context):
            break
        # Only a checkpoint saved by this launch is resumed: auto would otherwise start from
        # scratch, or take a checkpoint of another run instead of the requested training.resume.
        if latest_checkpoint(run_dir) not in (None, initial_checkpoint):
            command.append("training.resume=auto")
        if args.elastic and outcome.failed_nodes and not context.local:
            overrides = exclude_nodes(context, outcome.failed_nodes, global_batch)
            if overrides is None:
                break
            # The last override of a key wins.
            command += overrides
    return outcome.code


def _global_batch(context: Context) -> int:
    training = context.config.training
    return training.train_batch_size * training.grad_accum_steps * context.world_size


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
    if outcome.code == EXIT_DONE:
        print_line(f"done; logs of all ranks: {log_dir}", sys.stderr)
        return
    print_line(f"\nended: {outcome.reason} (exit {outcome.code})", sys.stderr)
    for line in outcome.last_lines:
        print_line(f"    {line}", sys.stderr)
    if run_dir is not None:
        checkpoint = latest_checkpoint(run_dir)
        saved = (
            "no complete checkpoint in the run folder"
            if checkpoint is None
            else f"latest checkpoint: {checkpoint[0]}"
        )
        print_line(saved, sys.stderr)
    print_line(f"logs of all ranks: {log_dir}", sys.stderr)


def exclude_nodes(
    context: Context, failed: list[str], global_batch: int | None
) -> list[str] | None:
    """Remove nodes from the run; return the overrides that keep its global batch, or None if that
    is impossible. A script of the user's own has neither.
    """
    remaining = [node for node in context.nodes if node.name not in failed]
    num_ranks = sum(node.slots for node in remaining)
    overrides: list[str] | None = []
    if not remaining:
        print_line("cannot continue: no node is left", sys.stderr)
        return None
    if global_batch is not None:
        overrides = _overrides_for(context, len(remaining), num_ranks, global_batch)
    if overrides is None:
        return None
    print_line(f"continuing without {', '.join(failed)}: {num_ranks} rank(s)", sys.stderr)
    old_first, context.nodes = context.names[0], remaining
    first = remaining[0].name
    if first != old_first:
        # The known master address was that of another node.
        context.master["address"] = (
            context.data_address(first) if context.value(first, "network") else first
        )
    return overrides


def _overrides_for(
    context: Context, num_nodes: int, num_ranks: int, global_batch: int
) -> list[str] | None:
    """Return the overrides with which a number of ranks keeps the global batch; None if none
    does.
    """
    training = context.config.training
    if global_batch % (num_ranks * training.train_batch_size):
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
        wanted = num_nodes if replicas == len(context.nodes) else replicas
        fitting = max(n for n in range(1, wanted + 1) if num_ranks % n == 0)
        overrides.append(f"engine.hsdp_replicas={fitting}")
    return overrides
