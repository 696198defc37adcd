"""`mmldlm convert`: convert a checkpoint of any engine; `convert inspect` and `convert diff` print
what it holds.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from mmldlm.checkpoints import inspect as inspection
from mmldlm.checkpoints.convert import (
    MAX_WORLD_SIZE,
    ConvertOptions,
    Summary,
    dry_run,
    run_conversion,
)
from mmldlm.checkpoints.formats.export_plan import DTYPE_NAMES
from mmldlm.checkpoints.manifest import SAFETENSORS_FILE, SUB_GROUP_SIZE, TARGETS
from mmldlm.checkpoints.output_folder import CARD
from mmldlm.commands import FormerOption
from mmldlm.errors import EXIT_DONE, UserError
from mmldlm.utils import option_types
from mmldlm.utils.formatting import print_table
from mmldlm.utils.progress import ProgressBar
from mmldlm.utils.resources import keep_freed_memory

PROGRESS_DELAY = 0.7  # seconds

_SOURCES = (
    "a run, RUN/latest, a step folder, a DeepSpeed or DCP folder, a model.pt, safetensors or a"
    " Hugging Face folder"
)
_KEY = (
    "the model among several state dicts of a file or DCP folder, by its keys: state/model; . is"
    " the top level"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `mmldlm convert`."""
    add = parser.add_argument
    add("src", type=option_types.path, metavar="SRC", help=_SOURCES)
    add(
        "out",
        type=option_types.path,
        metavar="OUT",
        nargs="?",
        help="output folder (not needed with --dry-run)",
    )
    add(
        "--dtype",
        choices=list(DTYPE_NAMES),
        help=(
            "of safetensors and model.pt: dtype of the written parameters; buffers and integers"
            " keep theirs (default fp32). Of zero1, zero2, zero3, and of universal where the"
            " source is no ZeRO checkpoint: of the low-precision copy next to the fp32 masters"
            " (default: the source's). fsdp, ddp and dcp round nothing and take none"
        ),
    )
    add(
        "--to",
        choices=TARGETS,
        default="safetensors",
        help=(
            "safetensors: the weights, for from_pretrained (default); model.pt: the weights, for"
            " torch.load; with the optimizer, to continue training: zero1, zero2, zero3, fsdp,"
            " ddp, dcp (a bare DCP folder), universal"
        ),
    )
    add(
        "--world",
        metavar="N",
        type=option_types.integer(1, MAX_WORLD_SIZE),
        help="number of ranks of the new checkpoint (default: the source's)",
    )
    add("--force", action="store_true", help="replace OUT if it is an earlier conversion")
    add(
        "--dry-run",
        action="store_true",
        help="read and check the source, print the plan, write nothing",
    )
    add(
        "--verify",
        action="store_true",
        help="read the output back and compare it with what was written",
    )
    add = parser.add_argument_group("which weights, and their names").add_argument
    add("--ema", action="store_true", help="write the moving average of the weights")
    add("--key", metavar="PATH", help=_KEY)
    add(
        "--only",
        metavar="PATTERN",
        action="append",
        default=[],
        help="names of tensors to write, e.g. 'blocks.0.*'",
    )
    add(
        "--keep-names",
        action="store_true",
        help=(
            "keep what torch.compile, FSDP, AveragedModel, ... put into the names of a saved"
            " state_dict"
        ),
    )
    add(
        "--strip-prefix",
        metavar="PREFIX",
        default="",
        help="remove PREFIX from the names that begin with it",
    )
    add("--allow-nonfinite", action="store_true", help="write NaN and infinite weights too")
    add = parser.add_argument_group("how the output is written").add_argument
    add(
        "--sub-group-size",
        metavar="N",
        type=option_types.integer(1, 1 << 62),
        help=(
            "zero3: elements per sub-group, as in the DeepSpeed config that will load it (default"
            " 1e9)"
        ),
    )
    add(
        "--shard-size",
        type=option_types.num_bytes,
        metavar="SIZE",
        help="maximum size of an output file, e.g. 5GB; adds an index (default: one file)",
    )
    add(
        "--no-fsync",
        action="store_true",
        help="skip fsync (faster; output may be lost on power failure)",
    )
    add("--no-flush", action=FormerOption, became="was renamed: use --no-fsync")


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `mmldlm convert inspect`."""
    parser.add_argument("path", type=option_types.path, metavar="SRC", help=_SOURCES)
    parser.add_argument("--key", metavar="PATH", help=_KEY)
    parser.add_argument(
        "--keep-names", action="store_true", help="print the names as they are in the file"
    )


def inspect(args: argparse.Namespace) -> int:
    """Run `mmldlm convert inspect`; return the exit code."""
    return inspection.inspect(args.path, args.keep_names, args.key)


def add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `mmldlm convert diff`."""
    parser.add_argument("a", type=option_types.path, metavar="A", help=_SOURCES)
    parser.add_argument(
        "b", type=option_types.path, metavar="B", help="another one; exit code 1 if they differ"
    )
    parser.add_argument(
        "--ema", action="store_true", help="compare the moving averages of the weights"
    )
    parser.add_argument(
        "--optimizer", action="store_true", help="compare the optimizer's moments too"
    )
    parser.add_argument("--key", metavar="PATH", help=f"in A: {_KEY}")
    parser.add_argument("--key-b", metavar="PATH", help="the same in B")
    parser.add_argument(
        "--keep-names", action="store_true", help="compare the names as they are in the files"
    )
    parser.add_argument(
        "--strip-prefix", metavar="PREFIX", default="", help="compare names without PREFIX"
    )


def diff(args: argparse.Namespace) -> int:
    """Run `mmldlm convert diff`; return the exit code: 1 if they differ."""
    options = {
        "keep_names": args.keep_names,
        "strip_prefix": args.strip_prefix,
        "key_a": args.key,
        "key_b": args.key_b,
    }
    return inspection.diff(args.a, args.b, args.ema, args.optimizer, **options)


def main(args: argparse.Namespace) -> int:
    """Run `mmldlm convert`; return the exit code.

    Raises:
        MmldlmError: for the caller to print.
    """
    # A tenth of the time of a re-shard.
    keep_freed_memory()
    if args.dry_run:
        print_table(dry_run(args.src, _options(args)))
        return EXIT_DONE
    if args.out is None:
        raise UserError("an output folder", "none", "mmldlm convert SRC OUT")
    with ProgressBar("converting", unit="B", delay=PROGRESS_DELAY) as progress:
        summary = run_conversion(args.src, args.out, _options(args, on_bytes=progress))
    _print_summary(args, summary)
    return EXIT_DONE


def _options(args: argparse.Namespace, **more: Any) -> ConvertOptions:
    """Return the options of a conversion.

    Raises:
        UserError: an option that the target does not support.
    """
    _check_options(args)
    return ConvertOptions(
        to=args.to,
        world_size=args.world,
        dtype=args.dtype,
        force=args.force,
        allow_nonfinite=args.allow_nonfinite,
        ema=args.ema,
        shard_bytes=args.shard_size,
        only=args.only,
        strip_prefix=args.strip_prefix,
        keep_names=args.keep_names,
        key=args.key,
        sub_group_size=args.sub_group_size or SUB_GROUP_SIZE,
        verify=args.verify,
        fsync=not args.no_fsync,
        **more,
    )


def _print_summary(args: argparse.Namespace, summary: Summary) -> None:
    path = str(Path(args.out) / SAFETENSORS_FILE) if args.to == "safetensors" else args.out
    mib = summary.num_bytes / 2**20
    aliases = f" + {summary.num_aliases} tied" if summary.num_aliases else ""
    print_table([
        ("wrote", f"{args.out} ({summary.num_files} files)" if summary.num_files > 1 else path),
        ("tensors", f"{summary.num_tensors}{aliases}"),
        ("parameters", f"{summary.num_parameters:,}"),
        ("bytes", f"{summary.num_bytes:,} ({mib:.1f} MiB)"),
        ("seconds", f"{summary.seconds:.2f}"),
        ("MiB/s", f"{mib / max(summary.seconds, 1e-9):.0f}"),
    ])  # fmt: skip
    for note in summary.notes:
        print(f"note: {note}")
    # A folder with a card, or a tokenizer as until 0.1.0, is a whole model of ours.
    of_model = (Path(args.out) / CARD, Path(args.out) / "tokenizer")
    is_model = args.to == "safetensors" and any(path.exists() for path in of_model)
    use = ["evaluate", "--data", "STORE", "--checkpoint"] if is_model else ["convert", "inspect"]
    print(f"next: {shlex.join(['mmldlm', *use, str(args.out)])}")


def _check_options(args: argparse.Namespace) -> None:
    """Raise UserError for an option that the target does not support."""
    weights_alone = ("ema", "only", "strip_prefix")
    unsupported = {
        "safetensors": ("world",),
        "model.pt": ("world", "shard_size", "verify"),
        "universal": ("world", "shard_size", *weights_alone),
        "ddp": ("world", "shard_size", *weights_alone),
    }.get(args.to, ("shard_size", *weights_alone))
    if args.to != "zero3":
        unsupported += ("sub_group_size",)
    for option in unsupported:
        if getattr(args, option):
            name = "--" + option.replace("_", "-")
            raise UserError(f"options that --to {args.to} supports", name, f"leave {name} out")
