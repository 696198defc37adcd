"""`mmldlm sample KIND`: sample from a run, a checkpoint or a converted model into files."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.commands import FormerOption, add_checkpoint, add_encoder_dir, add_removed
from mmldlm.data.encoders.model_files import encoder_dir
from mmldlm.errors import EXIT_DONE, UserError
from mmldlm.inference.generate import (
    Samples,
    start_trace,
)
from mmldlm.inference.images import (
    EACH_PICTURE,
    write_pictures,
)
from mmldlm.inference.load import load_pretrained, usable_device
from mmldlm.inference.options import KINDS, READERS, SampleOptions, add_sample_options
from mmldlm.inference.sample import fit_options, run_sampler
from mmldlm.observe.pages.page import check_page_path, write_page
from mmldlm.observe.pages.trace_page import trace_page
from mmldlm.sampling.latents import steps_given_text
from mmldlm.sampling.records import Recorder
from mmldlm.sampling.settings import REMOVED_OPTIONS, RESULTS_PAGE
from mmldlm.tasks.text_task import Pretrained
from mmldlm.utils import option_types
from mmldlm.utils.atomic_files import write_json, write_text
from mmldlm.utils.formatting import count_noun, join_some
from mmldlm.utils.json_files import to_json
from mmldlm.utils.paths import (
    check_writable_dir,
    claimed_file,
    claimed_folder,
    replaced_files,
)
from mmldlm.utils.progress import ProgressBar
from mmldlm.utils.screen import open_console
from mmldlm.utils.settings import given_options

OUTPUTS = ("samples.jsonl", "latents.npy", "settings.json", "sheet.png")
OWNED = (*OUTPUTS, EACH_PICTURE)
MAX_TABLE_ROWS = 20
STEPS_NOTE = (
    "note: a text determines its embedding: without --num-steps t2l is faster,\n"
    "      and mostly nearer to the encoder (docs/evaluation.md)"
)
TITLES = {
    "num_unknown": "[UNK]",
    "cosine": "cosine with the encoder's",
    "judge_cosine": "cosine by the judge",
    "judge_calls": "texts judged",
}


def add_arguments(parser: argparse.ArgumentParser, kind: str | None = None) -> None:
    """Add the options of `mmldlm sample`, or those of one kind; an option that is not given is
    None.
    """
    add = parser.add_argument
    if kind is None:
        add(
            "kind",
            choices=tuple(KINDS),
            help="what to sample; `mmldlm sample KIND --help` lists the options of one kind",
        )
    else:
        parser.set_defaults(kind=kind, **dict.fromkeys(READERS))
    add_checkpoint(parser)
    add("--output-dir", type=option_types.path, required=True, metavar="OUT",
        help=f"output folder of {', '.join(OUTPUTS)}")  # fmt: skip
    add("--overwrite", action="store_true", help="replace the samples of an earlier call in OUT")
    add_sample_options(parser, kind)
    renamed = "was renamed: use --method joint or --method chain"
    add("--way", action=FormerOption, became=renamed)
    add_removed(parser, REMOVED_OPTIONS, RESULTS_PAGE)
    add(
        "--seed",
        type=option_types.seed,
        default=0,
        help="seed of every draw (default %(default)s)",
    )
    add("--device", help="default: cuda if available, else cpu")
    add_encoder_dir(parser)


def _check_trace(args: argparse.Namespace) -> None:
    if args.trace is None:
        return
    check_page_path(args.trace, "--trace", args.overwrite)
    if args.search is not None or args.correct is not None:
        raise UserError(
            "--trace of texts that are written once",
            "--search or --correct, which write several and keep one",
            "omit one of them",
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
    existing = _owned_files(out)
    if existing and not overwrite:
        raise UserError(
            f"--output-dir {out} without samples of an earlier call",
            join_some((str(path.relative_to(out)) for path in existing), 5),
            "choose another --output-dir, or add --overwrite to replace them",
        )
    return out


def _owned_files(out: Path) -> list[Path]:
    """Return the files in a folder that a call replaces or deletes."""
    return [path for pattern in OWNED for path in sorted(out.glob(pattern))]


def _check_inputs(args: argparse.Namespace, out: Path) -> None:
    """Raise a UserError for an input that --overwrite would replace or delete."""
    owned = {path.resolve() for path in _owned_files(out)}
    inputs = [args.latent_file, args.text_file, *(args.image or ())]
    if inside := [path for path in inputs if path and Path(path).resolve() in owned]:
        raise UserError(
            f"inputs beside the files in {out} that --overwrite replaces",
            join_some(inside, 5),
            "choose another --output-dir",
        )


def main(args: argparse.Namespace) -> int:
    """Run `mmldlm sample`; return the exit code."""
    given = given_options(args, READERS)
    SampleOptions.resolve(args.kind, given, args.seed)
    device = usable_device(args.device)
    out = output_folder(args.output_dir, args.overwrite)
    _check_inputs(args, out)
    _check_trace(args)
    with (
        claimed_folder(out, "--output-dir"),
        claimed_file(args.trace, "--trace"),
        encoder_dir(args.encoder_dir),
    ):
        return _sample(args, given, device, out)


def _sample(args: argparse.Namespace, given: dict[str, Any], device: str, out: Path) -> int:
    pretrained = load_pretrained(args.checkpoint, device, revision=args.revision)
    kind, options = fit_options(pretrained, args.kind, given, args.seed)
    if kind == "t2l" and (options.num_steps or 0) > steps_given_text(pretrained.latent_diffusion):
        print(STEPS_NOTE, file=sys.stderr)
    trace = None
    if options.trace is not None:
        assert options.sampler is not None
        trace = start_trace(pretrained, options.sampler)
    started = time.perf_counter()
    with ProgressBar(log=lambda line: print(line, file=sys.stderr, flush=True)) as progress:
        samples = run_sampler(pretrained, kind, options, progress, trace)
    seconds = time.perf_counter() - started

    values = {**vars(args), **asdict(options), "kind": kind}
    settings = {
        key: value for key, value in values.items() if isinstance(value, (str, int, float, list))
    }
    settings |= {**samples.extra, "device": device}
    if samples.num_missing:
        settings["num_missing"] = samples.num_missing
    if samples.is_interrupted and _owned_files(out):
        out = out / "interrupted"  # a part does not replace what an earlier call completed
        out.mkdir(exist_ok=True)
    with replaced_files(out, OWNED, args.overwrite) as folder:
        file_names = _write_files(samples, settings, folder, keeps_each=kind != "i2t")
    records = samples.records
    if samples.is_interrupted:
        missing = f", {samples.num_missing:,} are missing" if samples.num_missing else ""
        raise KeyboardInterrupt(
            f"{count_noun(len(records), 'finished sample')} kept in {out}{missing}"
        )
    if trace is not None:
        title = f"{kind}: {KINDS[kind]}"
        write_page(args.trace, _page(title, args, options, pretrained, trace, records))
    _print_table(kind, records)
    print(f"done: {count_noun(len(records), 'sample')} in {seconds:.1f} s; {file_names} in {out}")
    if trace is not None:
        print(f"how they were written: {args.trace}")
    return EXIT_DONE


def _write_files(
    samples: Samples, settings: dict[str, Any], folder: Path, keeps_each: bool
) -> str:
    """Write samples and settings into a folder; return the names of the files in words."""
    names = "samples.jsonl"
    lines = [to_json(record) + "\n" for record in samples.records]
    write_text(folder / "samples.jsonl", "".join(lines))
    if samples.latents is not None:
        np.save(folder / "latents.npy", samples.latents)
        names += ", latents.npy"
    if samples.images is not None:
        write_pictures(samples, folder, keeps_each)
        names += ", sheet.png"
    write_json(folder / "settings.json", settings, indent=2)
    return names + " and settings.json"


def _page(
    title: str,
    args: argparse.Namespace,
    options: SampleOptions,
    pretrained: Pretrained,
    trace: Recorder,
    records: list[dict[str, Any]],
) -> str:
    """Return the page of --trace."""
    settings = [title, f"sampler {options.sampler}", f"seed {options.seed}"]
    if options.num_steps is not None:
        settings.insert(2, f"at most {count_noun(options.num_steps, 'step')}")
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
