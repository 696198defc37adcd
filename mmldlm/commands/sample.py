"""`mmldlm sample KIND`: sample from a run, a checkpoint or a converted model into files."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.commands import RemovedOption, RenamedOption
from mmldlm.errors import EXIT_DONE, UserError
from mmldlm.inference.generate import (
    SampleOptions,
    sample_l2t,
    sample_t2l,
    sample_unconditional,
    start_trace,
)
from mmldlm.inference.images import (
    EACH_PICTURE,
    fit_to_latents,
    sample_i2t,
    sample_pairs,
    sample_t2i,
    use_image_size,
    write_pictures,
)
from mmldlm.inference.load import load_pretrained
from mmldlm.inference.options import (
    DEFAULTS,
    IMAGE_KINDS,
    KINDS,
    METHODS,
    OPTIONS,
    SOURCES,
    TASK_OPTIONS,
)
from mmldlm.inference.search import SearchOptions
from mmldlm.observe.pages.page import check_page_path, write_page
from mmldlm.observe.pages.trace_page import trace_page
from mmldlm.sampling.device import usable_device
from mmldlm.sampling.records import TraceRecorder
from mmldlm.sampling.settings import REMOVED_OPTIONS, RESULTS_PAGE
from mmldlm.tasks.pretrained import Pretrained
from mmldlm.utils import option_types
from mmldlm.utils.atomic_files import write_json, write_text
from mmldlm.utils.formatting import count_noun
from mmldlm.utils.json_files import to_json
from mmldlm.utils.paths import (
    check_writable_dir,
    claimed_file,
    claimed_folder,
    replaced_files,
)
from mmldlm.utils.progress import ProgressBar
from mmldlm.utils.screen import open_console

OUTPUTS = ("samples.jsonl", "latents.npy", "settings.json", "sheet.png")
SAMPLERS = {
    "l2t": sample_l2t, "t2l": sample_t2l, "unconditional": sample_unconditional,
    "i2t": sample_i2t, "t2i": sample_t2i, "joint": sample_pairs,
}  # fmt: skip
CHECKPOINT_HELP = (
    "a run, RUN/latest, a checkpoint, a model.pt, or a folder written by `mmldlm convert`"
)
MAX_TABLE_ROWS = 20
TITLES = {
    "num_unknown": "[UNK]",
    "cosine": "cosine with the encoder's",
    "judge_cosine": "cosine by the judge",
    "judge_calls": "texts judged",
}


def add_arguments(parser: argparse.ArgumentParser, kind: str | None = None) -> None:
    """Add the options of `mmldlm sample`, or those of one kind; `resolve_options` fills in the
    defaults.
    """
    add = parser.add_argument
    if kind is None:
        add(
            "kind",
            choices=KINDS,
            help="what to sample; `mmldlm sample KIND --help` lists the options of one kind",
        )
    else:
        parser.set_defaults(kind=kind, **dict.fromkeys(DEFAULTS))
    add(
        "--checkpoint", type=option_types.path, required=True, metavar="PATH", help=CHECKPOINT_HELP
    )
    add("--output-dir", type=option_types.path, required=True, metavar="OUT",
        help=f"output folder of {', '.join(OUTPUTS)}")  # fmt: skip
    add("--overwrite", action="store_true", help="replace the samples of an earlier call in OUT")
    for key, options in OPTIONS.items():
        defaults = DEFAULTS[key]
        if kind is None:
            values = ", ".join(
                f"{name} {value}" for name, value in defaults.items() if value is not None
            )
            readers = "" if len(defaults) == len(KINDS) else f"{', '.join(defaults)}: "
            text = readers + options["help"] + (f" (default: {values})" if values else "")
        elif kind in defaults:
            value = defaults[kind]
            text = options["help"] + (f" (default {value})" if value is not None else "")
        else:
            continue
        choices = {"choices": METHODS[kind]} if key == "method" and kind in METHODS else {}
        add(_option(key), **{**options, **choices, "help": text})
    add("--way", action=RenamedOption, new="--method joint or --method chain")
    for option in REMOVED_OPTIONS:
        add("--" + option, action=RemovedOption, page=RESULTS_PAGE)
    add(
        "--seed",
        type=option_types.seed,
        default=0,
        help="seed of every draw (default %(default)s)",
    )
    add("--device", help="default: cuda if available, else cpu")


def resolve_options(args: argparse.Namespace) -> list[str]:
    """Check the options of args.kind and fill in its defaults; return those that were given.

    Raises:
        UserError: an option that this kind does not read, not exactly one source, or a value out
            of range.
    """
    given = [key for key in DEFAULTS if getattr(args, key) is not None]
    _check_read(args.kind, given)
    sources = SOURCES[args.kind]
    found = [_option(key) for key in sources if key in given]
    if sources and len(found) != 1:
        expected = " or ".join(map(_option, sources))
        raise UserError(
            f"exactly one of {expected}",
            ", ".join(found) or "none of them",
            "name one source of input",
        )
    if args.method is not None and args.method not in METHODS[args.kind]:
        expected = " or ".join(METHODS[args.kind])
        raise UserError(
            f"--method {expected} for `sample {args.kind}`", args.method, "choose one of them"
        )
    SearchOptions.of(args)  # refuses what does not fit together
    for key, defaults in DEFAULTS.items():
        if getattr(args, key) is None:
            setattr(args, key, defaults.get(args.kind))
    return given


def _check_read(kind: str, given: list[str]) -> None:
    if unread := [_option(key) for key in given if kind not in DEFAULTS[key]]:
        known = ", ".join(_option(key) for key in DEFAULTS if kind in DEFAULTS[key])
        raise UserError(f"options of `sample {kind}`: {known}", ", ".join(unread), "omit them")


def use_words_of_images(
    args: argparse.Namespace, given: list[str], pretrained: Pretrained
) -> None:
    """Of a model of images, let l2t, t2l and unconditional mean i2t, t2i and joint, with their
    defaults.

    Raises:
        UserError: an option was given that the kind of images does not read.
    """
    if pretrained.image is None:
        return
    word = next((word for word, kind in IMAGE_KINDS.items() if kind == args.kind), None)
    if word is not None:
        _check_read(word, given)
        args.kind = word
        for key in DEFAULTS.keys() - set(given):
            setattr(args, key, DEFAULTS[key].get(word))
    if "guidance" not in given and args.guidance is not None and pretrained.condition_dropout == 0:
        args.guidance = 1.0  # no null condition was trained


def fit_to_task(args: argparse.Namespace, given: list[str], pretrained: Pretrained) -> None:
    """Check kind, sampler and options against the task of the checkpoint; drop what it does not
    read.

    Raises:
        UserError: the task lacks the kind, the sampler, or an option that was given.
    """
    task = pretrained.task
    pretrained.check_kind(args.kind, args.sampler)
    if args.sampler is None and args.kind in DEFAULTS["sampler"] and task.samplers[args.kind]:
        args.sampler = task.samplers[args.kind][0]
    unread = [key for key in TASK_OPTIONS if key not in task.sampling_options]
    if wrong := [_option(key) for key in unread if key in given]:
        known = ", ".join(
            _option(key)
            for key in TASK_OPTIONS
            if args.kind in DEFAULTS[key] and key not in unread
        )
        raise UserError(
            f"options that task={task.name} reads: {known}", ", ".join(wrong), "omit them"
        )
    if args.kind == "l2t":
        SearchOptions.of(args).check(task, given)
    if args.sampler is not None:
        of_others = task.unread_options(IMAGE_KINDS.get(args.kind, args.kind), args.sampler)
        if wrong := [_option(key) for key in TASK_OPTIONS if key in given and key in of_others]:
            fix = "omit them, or choose the --sampler that reads them"
            raise UserError(f"options that --sampler {args.sampler} reads", ", ".join(wrong), fix)
        unread += of_others
    for key in unread:
        setattr(args, key, None)


def _option(key: str) -> str:
    return "--" + key.replace("_", "-")


def _check_trace(args: argparse.Namespace) -> None:
    if args.trace is None:
        return
    check_page_path(args.trace, "--trace", args.overwrite)
    several = next((key for key in ("search", "correct") if getattr(args, key) is not None), None)
    if several is not None:
        option = _option(several)
        found = f"{option} {getattr(args, several)}, which writes several and keeps one"
        raise UserError(
            "--trace of texts that are written once", found, f"omit {option} or --trace"
        )


def output_folder(path: str, overwrite: bool) -> Path:
    """Return the output folder, which may exist.

    Raises:
        UserError: it is not writable, or it contains samples and overwrite is False.
    """
    target = Path(os.path.realpath(path))
    if os.path.islink(path) and not target.exists() and target.parent.is_dir():
        path = str(target)  # a link to a folder that is made now
    out = check_writable_dir(path, "--output-dir")
    existing = [name for name in OUTPUTS if (out / name).exists()]
    if existing and not overwrite:
        raise UserError(
            f"--output-dir {out} without samples of an earlier call",
            ", ".join(existing),
            "choose another --output-dir, or add --overwrite to replace them",
        )
    return out


def main(args: argparse.Namespace) -> int:
    """Run `mmldlm sample`; return the exit code."""
    given = resolve_options(args)
    device = usable_device(args.device)
    out = output_folder(args.output_dir, args.overwrite)
    _check_trace(args)
    with claimed_folder(out, "--output-dir"), claimed_file(args.trace, "--trace"):
        return _sample(args, given, device, out)


def _sample(args: argparse.Namespace, given: list[str], device: str, out: Path) -> int:
    pretrained = load_pretrained(args.checkpoint, device)
    use_words_of_images(args, given, pretrained)
    fit_to_latents(args, given, pretrained)
    fit_to_task(args, given, pretrained)
    mode = IMAGE_KINDS.get(args.kind, args.kind)
    if (
        mode != "unconditional" or pretrained.latent_config is None
    ):  # else choose_method checks the modes
        pretrained.check_mode(mode)
    pretrained.check_guidance(1.0 if args.guidance is None else args.guidance)
    pretrained.vae = args.vae
    use_image_size(pretrained, args.image_size, args.data)
    trace = None if args.trace is None else start_trace(pretrained, args.sampler)
    started = time.perf_counter()
    sample = SAMPLERS[args.kind]
    options = SampleOptions(
        **{key: getattr(args, key) for key in SampleOptions.__dataclass_fields__}
    )
    with ProgressBar(log=lambda line: print(line, file=sys.stderr, flush=True)) as progress:
        samples = sample(
            pretrained, options, progress, **({"recorder": trace.recorder} if trace else {})
        )
    seconds = time.perf_counter() - started

    records = samples.records
    settings = {
        key: value
        for key, value in vars(args).items()
        if isinstance(value, (str, int, float, list))
    }
    with replaced_files(out, (*OUTPUTS, EACH_PICTURE), args.overwrite) as folder:
        if samples.latents is not None:
            np.save(folder / "latents.npy", samples.latents)
        if samples.images is not None:
            write_pictures(samples, folder, keeps_each=args.kind != "i2t")
        write_text(folder / "samples.jsonl", "".join(to_json(record) + "\n" for record in records))
        write_json(
            folder / "settings.json", {**settings, **samples.extra, "device": device}, indent=2
        )
    if trace is not None:
        write_page(args.trace, _page(args, pretrained, trace, records))
    _print_table(args.kind, records)
    written = "samples.jsonl" + (", latents.npy" if samples.latents is not None else "")
    written += ", sheet.png" if samples.images is not None else ""
    print(
        f"{count_noun(len(records), 'sample')} in {seconds:.1f} s; {written} and settings.json in"
        f" {out}"
    )
    if trace is not None:
        print(f"how they were written: {args.trace}")
    return EXIT_DONE


def _page(
    args: argparse.Namespace,
    pretrained: Pretrained,
    trace: TraceRecorder,
    records: list[dict[str, Any]],
) -> str:
    """Return the page of --trace."""
    settings = [f"{args.kind}: {KINDS[args.kind]}", f"sampler {args.sampler}", f"seed {args.seed}"]
    if args.num_steps is not None:
        settings.insert(2, f"at most {count_noun(args.num_steps, 'step')}")
    settings.append(Path(args.checkpoint).resolve().name)
    vocab_size = pretrained.model.config.vocab_size
    return trace_page(
        trace.texts,
        records,
        pretrained.tokenizer,
        vocab_size,
        settings=settings,
        starts_masked=trace.starts_masked,
    )


def _print_table(kind: str, records: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title=f"sample {kind}", show_lines=True)
    columns = [key for key in ("index", "reference", "text", "norm", *TITLES) if key in records[0]]
    if not any(record.get("num_unknown") for record in records):
        columns = [key for key in columns if key != "num_unknown"]
    for key in columns:
        table.add_column(TITLES.get(key, key), overflow="fold")
    for record in records[:MAX_TABLE_ROWS]:
        table.add_row(*(_format_cell(record[key]) for key in columns))
    open_console().print(table)
    if len(records) > MAX_TABLE_ROWS:
        print(f"(the first {MAX_TABLE_ROWS} of {len(records)})")


def _format_cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_format_cell, value))
    return f"{value:.4f}" if isinstance(value, float) else str(value)
