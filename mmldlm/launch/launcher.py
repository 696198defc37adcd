"""`mmldlm launch`: preflight, then the launcher, then the watcher."""

from __future__ import annotations

import argparse
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

from mmldlm.checkpoints.locate import find_latest_valid
from mmldlm.checkpoints.manifest import MANIFEST
from mmldlm.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, UserError
from mmldlm.launch.watcher import COLLECTIVE_EXIT_CODES, Outcome, Watcher
from mmldlm.preflight import runner as preflight
from mmldlm.preflight.collect import data_address
from mmldlm.preflight.context import Context
from mmldlm.preflight.report import exit_code, print_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `mmldlm launch`."""
    preflight.add_run_arguments(parser)
    parser.add_argument("--level", type=int, choices=range(5), default=2, help="preflight up to this level (default 2)")
    parser.add_argument(
        "--retries", type=int, default=0, metavar="N", help="start again, from the newest checkpoint if there is one"
    )
    parser.add_argument("--elastic", action="store_true", help="a retry leaves out the nodes that failed")
    parser.add_argument("--grace", type=float, default=120.0, metavar="S", help="seconds to save in after Ctrl-C")


def main(args: argparse.Namespace) -> int:
    """Run; returns 0, the worst exit code of any rank, or that of the preflight (2 where the data cannot be used)."""
    args.carries_all = True  # rank.py carries the variables itself, whatever the launcher does
    started = time.perf_counter()
    context, results = preflight.run(args)
    code = exit_code(results, args.strict)
    seconds = time.perf_counter() - started
    print_report(context, results, seconds, sys.stdout)
    preflight.record(context, results, code, seconds, None)
    if code != EXIT_DONE:
        # As the ranks would end: data that is not there, or does not fit the config, is bad input.
        return EXIT_USAGE if code == EXIT_FAILED and context.plan.get("data_error") else code
    words, training = train_words(args), context.config.training
    batch = training.train_batch_size * training.grad_accum_steps * context.world_size
    run_dir = context.config.run_dir()
    before = latest_checkpoint(run_dir)
    for attempt in range(args.retries + 1):
        if attempt:
            print(f"\nattempt {attempt + 1} of {args.retries + 1}", flush=True)
        logs = log_folder(context)
        outcome = Watcher(context, words, logs, args.grace).run()
        report(outcome, logs, latest_checkpoint(run_dir))
        # Under Slurm the ranks are sent the signal before the time is up; elsewhere it is a fault like others.
        by_signal = outcome.code == EXIT_INTERRUPTED and context.launcher != "slurm"
        if (
            outcome.code == EXIT_DONE
            or outcome.interrupted
            or (outcome.code in COLLECTIVE_EXIT_CODES and not by_signal)
        ):
            break
        if attempt == args.retries:
            break
        # Where this launch has saved nothing, auto would be a fresh start, or another run's checkpoint, in place of the
        # training.resume that was asked for.
        if latest_checkpoint(run_dir) not in (None, before):
            words.append("training.resume=auto")
        if args.elastic and outcome.bad_nodes and not context.local:
            more = exclude_nodes(context, outcome.bad_nodes, batch)
            if more is None:
                break
            words += more  # of words that set one key, the last one counts
    return outcome.code


def train_words(args: argparse.Namespace) -> list[str]:
    """The words of train.py that stand for this command line."""
    given = (
        ("--config-name", args.config_name),
        ("--config", args.config),
        ("--deepspeed_config", args.deepspeed_config),
    )
    return [word for option, value in given if value for word in (option, value)] + list(args.overrides)


def latest_checkpoint(run_dir: Path) -> tuple[Path, int] | None:
    """The newest whole checkpoint of a run and when it was committed (ns); training checks its bytes again."""
    path = find_latest_valid(run_dir, checksums=False)
    return None if path is None else (path, (path / MANIFEST).stat().st_mtime_ns)


def log_folder(context: Context) -> Path:
    """Make a folder for this attempt's logs in the run's folder: one that no other launch has, nor gets.

    Raises:
        UserError: it cannot be made.
    """
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d_%H%M%S")
    folder = context.config.run_dir() / "logs"
    for name in (f"launch_{stamp}", *(f"launch_{stamp}_{number}" for number in range(2, 100))):
        try:
            (folder / name).mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"a folder for logs in {folder}", error.strerror, "check logging.save_dir") from error
        return folder / name
    raise AssertionError(f"a hundred launches in one second in {folder}")


def report(outcome: Outcome, logs: Path, checkpoint: tuple[Path, int] | None) -> None:
    """Print how it ended, the last lines of the rank that ended first, what is saved, and where the rest is."""
    sys.stdout.flush()
    if outcome.code == EXIT_DONE:
        print(f"done; logs of all ranks: {logs}", file=sys.stderr, flush=True)
        return
    print(f"\nended: {outcome.reason} (exit {outcome.code})", file=sys.stderr)
    for line in outcome.last:
        print(f"    {line}", file=sys.stderr)
    saved = "no whole checkpoint in the run's folder" if checkpoint is None else f"newest checkpoint: {checkpoint[0]}"
    print(f"{saved}\nlogs of all ranks: {logs}", file=sys.stderr, flush=True)


def exclude_nodes(context: Context, bad: list[str], batch: int) -> list[str] | None:
    """Take nodes out of the run; the words that keep its global batch, or None when that cannot be."""
    training = context.config.training
    left = [node for node in context.nodes if node.name not in bad]
    ranks = sum(node.slots for node in left)
    if not left or batch % (ranks * training.train_batch_size):
        print(
            f"cannot go on with {ranks} rank(s): the global batch of {batch} is no multiple of {ranks} x "
            f"training.train_batch_size={training.train_batch_size}, and the order of samples rests on it",
            file=sys.stderr,
        )
        return None
    print(f"going on without {', '.join(bad)}: {ranks} rank(s)", file=sys.stderr)
    first, context.nodes = context.names[0], left
    if left[0].name != first:  # its address was another's; what was tried of it are the pairs
        known = context.value(left[0].name, "network")
        context.master["address"] = data_address(context, left[0].name) if known else left[0].name
    return [f"training.grad_accum_steps={batch // (ranks * training.train_batch_size)}"]
