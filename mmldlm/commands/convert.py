"""`mmldlm convert`: a checkpoint of any engine becomes safetensors; `inspect` and `diff` look at one or two of them."""

from __future__ import annotations

import argparse
import gc
import math
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # numpy's OpenBLAS starts a thread for every core, which takes as long as all other imports; nothing here uses it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from mmldlm.checkpoints.formats.detect import SINGLE
from mmldlm.checkpoints.formats.open import open_source
from mmldlm.checkpoints.io.parallel import raise_malloc_thresholds
from mmldlm.convert.to_safetensors import DTYPE_NAMES, Summary, convert, copy_planned, plan_tensors
from mmldlm.errors import EXIT_FAILED, MmldlmError, UserError
from mmldlm.utils.formatting import print_table

# What --to takes beside safetensors (reshard.TARGETS, which is not imported for it: its imports cost start-up time).
TARGETS = ("model.pt", "dcp", "universal", "zero1", "zero2", "zero3", "fsdp", "ddp")
SUB_GROUP_SIZE = 10**9
PROGRESS_DELAY = 0.7

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `mmldlm convert`."""
    add = parser.add_argument
    add(
        "src",
        metavar="SRC",
        help="RUN, RUN/latest, a step folder, a DeepSpeed or DCP folder, a model.pt, safetensors or a Hugging Face "
        "folder; or the word `inspect` (list what the path after it holds) or `diff` (compare the two paths after it)",
    )
    add("out", metavar="OUT", nargs="?", help="the folder to write (not needed with --dry-run)")
    add("other", metavar="B", nargs="?", help=argparse.SUPPRESS)
    add(
        "--dtype",
        choices=list(DTYPE_NAMES),
        help="dtype of the written parameters; buffers and integers keep theirs (default fp32). For zero1, 2, 3 and "
        "universal: of the copy that the forward pass uses, beside fp32 masters (default: the source's)",
    )
    add(
        "--to",
        choices=("safetensors", *TARGETS),
        default="safetensors",
        help="safetensors: the weights, for from_pretrained (default); model.pt: the weights for torch.load; with the "
        "optimizer, to go on training: zero1, zero2, zero3, fsdp, ddp, dcp (a bare DCP folder), universal",
    )
    add("--world", metavar="N", type=int, help="ranks of the new checkpoint (default: as many as it was saved by)")
    add(
        "--sub-group-size",
        metavar="N",
        type=int,
        default=SUB_GROUP_SIZE,
        help="zero3: as in the DeepSpeed config that will load it (default 1e9; mmldlm itself does not care)",
    )
    add("--optimizer", action="store_true", help="diff: compare AdamW's moments too")
    add("--ema", action="store_true", help="write (or compare) the moving average of the weights")
    add("--shard-size", metavar="SIZE", help="cut the output into files of at most this size, e.g. 5GB, with an index")
    add("--only", metavar="PATTERN", action="append", default=[], help="write only these tensors, e.g. 'blocks.0.*'")
    add("--force", action="store_true", help="replace OUT if it is an earlier conversion")
    add("--allow-nonfinite", action="store_true", help="write NaN and infinite weights too")
    add("--dry-run", action="store_true", help="open and check the source, print the plan, write nothing")
    add("--no-flush", action="store_true", help="do not wait until the disk has it: a power cut may then lose it")
    add("--verify", action="store_true", help="read the output back and compare it with what was written")


def add_part_arguments(parser: argparse.ArgumentParser, part: str) -> Callable[[argparse.Namespace], int]:
    """The arguments of `mmldlm convert inspect` or `mmldlm convert diff`; returns what runs it."""
    takes = (
        "a run, RUN/latest, a step folder, a DeepSpeed or DCP folder, a model.pt, safetensors or a Hugging Face folder"
    )
    add = parser.add_argument
    if part == "inspect":
        add("path", metavar="SRC", help=takes)
    else:
        add("a", metavar="A", help=takes)
        add("b", metavar="B", help="another; exit code 1 where they differ")
        add("--ema", action="store_true", help="compare the moving averages of the weights")
        add("--optimizer", action="store_true", help="compare AdamW's moments too")

    def run(args: argparse.Namespace) -> int:
        from mmldlm.convert.inspect import diff, inspect

        return inspect(args.path) if part == "inspect" else diff(args.a, args.b, args.ema, args.optimizer)

    return run


def main(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code. Raises MmldlmError for the caller to print."""
    was_enabled = gc.isenabled()
    raise_malloc_thresholds()
    gc.disable()  # what a checkpoint's description builds has no cycles, and is all kept to the end
    try:
        return _run(args)
    except BrokenPipeError:  # `inspect ... | head`: whoever read has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    finally:
        if was_enabled:
            gc.enable()


def _run(args: argparse.Namespace) -> int:
    if args.src == "inspect":
        from mmldlm.convert.inspect import inspect

        if args.out is None:
            raise UserError("a path after `mmldlm convert inspect`", "none", "give a run, a checkpoint or a model.pt")
        return inspect(args.out)
    if args.src == "diff":
        from mmldlm.convert.inspect import diff

        if args.out is None or args.other is None:
            raise UserError("two paths after `mmldlm convert diff`", "fewer", "mmldlm convert diff A B")
        return diff(args.out, args.other, args.ema, args.optimizer)
    if args.other is not None:
        raise UserError("SRC and OUT", f"a third path {args.other}", "mmldlm convert SRC OUT")
    _check_options(args)
    if args.dry_run:
        return _dry_run(args)
    if args.out is None:
        raise UserError("an output folder", "none", "mmldlm convert SRC OUT")
    with _Progress() as progress:
        flags = {"force": args.force, "allow_nonfinite": args.allow_nonfinite, "on_bytes": progress, "ema": args.ema}
        flags["is_flushed"] = not args.no_flush
        if args.to == "safetensors":
            shard_bytes = parse_size(args.shard_size)
            dtype = args.dtype or "fp32"
            summary = convert(
                args.src, args.out, dtype, **flags, shard_bytes=shard_bytes, only=args.only, verify=args.verify
            )
        else:
            from mmldlm.convert.to_checkpoint import convert_state

            flags |= {"only": args.only, "sub_group_size": args.sub_group_size, "verify": args.verify}
            summary = convert_state(args.src, args.out, args.to, args.world, args.dtype, **flags)
    mib = summary.num_bytes / 2**20
    aliases = f" + {summary.num_aliases} tied" if summary.num_aliases else ""
    print_table([
        ("wrote", _print_summary(args, summary)),
        ("tensors", f"{summary.num_tensors}{aliases}"),
        ("parameters", f"{summary.num_parameters:,}"),
        ("bytes", f"{summary.num_bytes:,} ({mib:.1f} MiB)"),
        ("seconds", f"{summary.seconds:.2f}"),
        ("MiB/s", f"{mib / max(summary.seconds, 1e-9):.0f}"),
    ])  # fmt: skip
    for note in summary.notes:
        print(f"note: {note}")
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Raises UserError for an option that this target would not heed."""
    weights_alone = ("ema", "only")
    unheeded = {
        "safetensors": ("world",),
        "model.pt": ("world", "shard_size", "verify"),
        "dcp": ("shard_size", *weights_alone),
        "universal": ("world", "shard_size", *weights_alone),
        "ddp": ("world", "shard_size", *weights_alone),
    }
    for option in unheeded.get(args.to, ("shard_size", *weights_alone)):
        if getattr(args, option):
            name = "--" + option.replace("_", "-")
            raise UserError(f"options that --to {args.to} heeds", name, f"leave {name} out")


def _print_summary(args: argparse.Namespace, summary: Summary) -> str:
    if summary.num_files > 1:
        return f"{args.out} ({summary.num_files} files)"
    return str(Path(args.out) / SINGLE) if args.to == "safetensors" else args.out


def parse_size(text: str | None) -> int | None:
    """Bytes of "5GB" (10^9), "500MiB" (2^20) or "1000"; None for None.

    Raises:
        UserError: anything else, and 0.
    """
    if text is None:
        return None
    found = _SIZE.fullmatch(text.strip())
    power = "kmgt".find(found[2].lower()) + 1 if found and found[2] else 0
    size = int(float(found[1]) * (1024 if found[3] else 1000) ** power) if found else 0
    if size < 1:
        raise UserError("a size such as 5GB or 500MiB for --shard-size", repr(text), "give a number and a unit")
    return size


def _dry_run(args: argparse.Namespace) -> int:
    """Reads and checks every weight, as a conversion would."""
    if args.to != "safetensors":
        from mmldlm.convert.to_checkpoint import dry_run

        flags = {"allow_nonfinite": args.allow_nonfinite, "only": args.only, "sub_group_size": args.sub_group_size}
        rows, num_files, nbytes = dry_run(args.src, args.to, args.world, args.dtype, **flags)
        print_table([*rows, ("would write", f"{num_files} files, {nbytes:,} bytes ({nbytes / 2**20:.1f} MiB)")])
        return 0
    from mmldlm.convert.inspect import summarize

    opened = open_source(args.src, args.allow_nonfinite, with_ema=args.ema)
    with opened.weights as weights:
        if args.ema:
            weights.use_ema()
        plan = plan_tensors(weights, args.dtype or "fp32", args.only)
        copy_planned(weights, plan, lambda planned, position, view: None)
        size = f"{plan.nbytes:,} bytes ({plan.nbytes / 2**20:.1f} MiB)"
        print_table([*summarize(opened), ("would write", f"{len(plan.tensors)} tensors, {size}")])
    return 0


class _Progress:
    """A bar of bytes on a terminal, for what takes longer than a moment; nothing where nobody watches."""

    def __init__(self) -> None:
        self._bar: Any = None
        # What is over before anybody looks needs no bar, whose import would take as long.
        self._starts_at = time.monotonic() + PROGRESS_DELAY if sys.stderr.isatty() else math.inf

    def __enter__(self) -> _Progress:
        return self

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            if time.monotonic() < self._starts_at:
                return
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task("convert", total=total)
        self._bar.update(self._task, completed=done, total=total)

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="mmldlm convert")
    add_arguments(_parser)
    try:
        sys.exit(main(_parser.parse_intermixed_args()))
    except MmldlmError as _error:
        print(f"error: {_error}", file=sys.stderr)
        sys.exit(_error.exit_code)
