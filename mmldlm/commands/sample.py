"""`mmldlm sample l2t | t2l | unconditional`: sample from a run, a checkpoint or a converted model into files."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.commands import RenamedOption
from mmldlm.errors import EXIT_DONE, UserError
from mmldlm.observe.pages.page import check_page_path, write_page
from mmldlm.observe.pages.trace_page import trace_page
from mmldlm.sampling.device import usable_device
from mmldlm.sampling.generate import SampleOptions, sample_l2t, sample_t2l, sample_unconditional
from mmldlm.sampling.joint_sampler import JOINT_METHODS
from mmldlm.sampling.latent_solver import ETAS, SOLVERS
from mmldlm.sampling.pretrained import Pretrained, load_pretrained
from mmldlm.sampling.search.options import ARGUMENTS as SEARCH_ARGUMENTS
from mmldlm.sampling.search.options import SearchOptions
from mmldlm.sampling.text.strategies import STRATEGIES
from mmldlm.sampling.text.strategies.remasking import ETAS as REMASKING
from mmldlm.sampling.text.strategies.schedule import names_passes, read_schedule
from mmldlm.sampling.text.trace import MAX_TEXTS, TraceRecorder, start_trace
from mmldlm.utils.formatting import count_noun
from mmldlm.utils.output_paths import check_writable_dir
from mmldlm.utils.progress import ProgressBar

KINDS = {
    "l2t": "text from embeddings",
    "t2l": "embeddings from text",
    "unconditional": "text and embeddings without a condition",
}
# Options that not every kind reads, and their defaults in the kinds that do.
DEFAULTS: dict[str, dict[str, Any]] = {
    "latent_file": {"l2t": None},
    "data": {"l2t": None},
    "text": {"l2t": None, "t2l": None},
    "text_file": {"l2t": None, "t2l": None},
    "num_samples": {"l2t": None, "unconditional": 10},
    "num_steps": {"l2t": 64, "t2l": None, "unconditional": 64},
    "sampler": {"l2t": None, "unconditional": None},
    "temperature": {"l2t": None, "unconditional": None},
    "top_p": {"l2t": 1.0, "unconditional": 1.0},
    "guidance": {"l2t": 1.0, "t2l": 1.0},
    "presence_penalty": {"l2t": None},
    "schedule": {"l2t": None, "unconditional": None},
    "spacing": {"l2t": None, "unconditional": None},
    "threshold": {"l2t": None, "unconditional": None},
    "factor": {"l2t": None, "unconditional": None},
    "delta": {"l2t": None, "unconditional": None},
    "gamma": {"l2t": None, "unconditional": None},
    "remask": {"unconditional": None},
    "remask_eta": {"unconditional": None},
    "num_lengths": {"l2t": None},
    "critic_rounds": {"l2t": None},
    "critic_share": {"l2t": None},
    "num_beams": {"l2t": None, "unconditional": None},
    "method": {"t2l": "ddim", "unconditional": None},
    "solver": {"unconditional": "ddim"},
    "condition_timestep": {"l2t": 0.0, "unconditional": 0.0},
    "eta": {"t2l": 0.0},
    "trace": {"l2t": None, "unconditional": None},
    **{key: {"l2t": None} for key in SEARCH_ARGUMENTS},
}
# Options that a task may lack, also in a kind that it has (TextTask.sampling_options).
TASK_OPTIONS = (
    "num_steps", "sampler", "temperature", "top_p", "guidance", "presence_penalty", "num_beams", "method",
    "solver", "eta", "condition_timestep", "schedule", "spacing", "threshold", "factor", "delta", "gamma", "remask",
    "remask_eta", "num_lengths", "critic_rounds", "critic_share",
)  # fmt: skip
METHODS = {"t2l": SOLVERS, "unconditional": JOINT_METHODS}


def _eta(word: str) -> float | str:
    return word if word in ETAS else float(word)


# argparse settings of the same options.
OPTIONS: dict[str, dict[str, Any]] = {
    "latent_file": {"metavar": "X.npy", "help": "embeddings [D] or [N, D] in the encoder's space"},
    "data": {"metavar": "STORE", "help": "embeddings of validation sentences of a prepared store"},
    "text": {"nargs": "+", "metavar": "TEXT", "help": "texts (l2t: embedded with the encoder of the training data)"},
    "text_file": {"metavar": "FILE", "help": "texts, one per line"},
    "num_samples": {"type": int, "metavar": "N", "help": "number of samples (l2t: default one per embedding)"},
    "num_steps": {
        "type": int,
        "help": "denoising steps (t2l: default 1, or 10 for a model that predicts epsilon); a text of n tokens takes "
        "at most n passes",
    },
    "sampler": {
        "help": f"text sampler; of masked diffusion {' or '.join(STRATEGIES)} (default: l2t confidence, unconditional "
        "ancestral); a name that the model's task lacks is refused with those that it has"
    },
    "temperature": {
        "type": float,
        "help": "0 takes the most probable token (default: 0 for samplers by certainty, or 1 if an embedding is used "
        "several times; 1 for the others)",
    },
    "top_p": {"type": float, "help": "nucleus of the token draws"},
    "guidance": {"type": float, "help": "scale of classifier-free guidance, 1: none"},
    "presence_penalty": {
        "type": float,
        "help": "nats subtracted from tokens that the text already contains (default: 1 for samplers by certainty, "
        "else 0)",
    },
    "schedule": {
        "metavar": "N1,N2,..|FILE",
        "help": "tokens per pass instead of --num-steps, scaled to each text: numbers, or a JSON file of a list, of "
        "{length: list}, or of evaluate --write-schedule, of which --num-steps chooses (scheduled, confidence, margin, "
        "entropy)",
    },
    "spacing": {
        "type": float,
        "metavar": "G",
        "help": "of the positions that a pass would fill, one nearer than G x the masked share to a surer one waits "
        "(samplers by certainty; default 1: none)",
    },
    "threshold": {"type": float, "metavar": "P", "help": "threshold: fill all positions as probable (default 0.9)"},
    "factor": {"type": float, "metavar": "F", "help": "factor: fill n with (n+1)(1-p_n) < F (default 0.75)"},
    "delta": {"type": float, "metavar": "D", "help": "frechet: margin of the joint probability (default 0.25)"},
    "gamma": {"type": float, "metavar": "NATS", "help": "eb: bound on the dependence ignored in a pass (default 0.1)"},
    "remask": {"choices": tuple(REMASKING), "help": "remdm: how tokens are masked again (default cap)"},
    "remask_eta": {
        "type": float,
        "metavar": "ETA",
        "help": f"remdm: how much ({', '.join(f'{name} {eta}' for name, eta in REMASKING.items())})",
    },
    "num_lengths": {
        "type": int,
        "metavar": "M",
        "help": "write a text in each of the M most probable lengths and keep the most probable one (default: one text "
        "of the median length)",
    },
    "critic_rounds": {
        "type": int,
        "metavar": "R",
        "help": "then R times mask the words that the quality head doubts most, write them again, and keep a text if "
        "its mean quality is higher (a model of model.quality_head=true)",
    },
    "critic_share": {
        "type": float,
        "metavar": "RHO",
        "help": "share of the words of a text that the first of --critic-rounds masks, falling to 0 (default 0.1)",
    },
    "num_beams": {"type": int, "metavar": "W", "help": "beams of a beam search (default: 4)"},
    "method": {
        "help": "t2l: solver, ddim, dpm++2m, or heun for a rectified-flow model; unconditional: joint or chain "
        "(default: what the model was trained for)"
    },
    "solver": {"choices": ("ddim", "dpm++2m"), "help": "solver of the embeddings"},
    "condition_timestep": {
        "type": float,
        "metavar": "T",
        "help": "noise the embedding to this timestep for the text, for embeddings that no encoder made (a model of "
        "training.l2t_condition_noise; unconditional: --method chain)",
    },
    "eta": {
        "type": _eta,
        "metavar": "ETA",
        "help": "noise of DDIM: 0 none, 1 ancestral, bridge that of a model of schedule=decoupled",
    },
    "trace": {
        "metavar": "FILE.html",
        "help": f"also write a page that plays, pass by pass, how the first {MAX_TEXTS} texts were written",
    },
    **SEARCH_ARGUMENTS,
}
SOURCES = {"l2t": ("latent_file", "text", "text_file", "data"), "t2l": ("text", "text_file"), "unconditional": ()}
OUTPUTS = ("samples.jsonl", "latents.npy", "settings.json")
CHECKPOINT_HELP = "a run, RUN/latest, a checkpoint, a model.pt, or a folder written by `mmldlm convert`"
MAX_TABLE_ROWS = 20
TITLES = {"cosine": "cosine with the encoder's", "judge_cosine": "cosine by the judge", "judge_calls": "texts judged"}


def add_arguments(parser: argparse.ArgumentParser, kind: str | None = None) -> None:
    """Add the options of `mmldlm sample`, or those of one kind; `resolve_options` fills in the defaults."""
    add = parser.add_argument
    if kind is None:
        add("kind", choices=KINDS, help="what to sample; `mmldlm sample KIND --help` lists the options of one kind")
    else:
        parser.set_defaults(kind=kind, **dict.fromkeys(DEFAULTS))
    add("--checkpoint", required=True, metavar="PATH", help=CHECKPOINT_HELP)
    add("--output-dir", required=True, metavar="OUT", help=f"output folder of {', '.join(OUTPUTS)}")
    add("--overwrite", action="store_true", help="replace the samples of an earlier call in OUT")
    for key, options in OPTIONS.items():
        defaults = DEFAULTS[key]
        if kind is None:
            values = ", ".join(f"{name} {value}" for name, value in defaults.items() if value is not None)
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
    add("--seed", type=int, default=0, help="seed of every draw (default %(default)s)")
    add("--device", help="default: cuda if available, else cpu")


def resolve_options(args: argparse.Namespace) -> list[str]:
    """Check the options of args.kind and fill in its defaults; return those that were given.

    Raises:
        UserError: an option that this kind does not read, not exactly one source, or a value out of range.
    """
    given = [key for key in DEFAULTS if getattr(args, key) is not None]
    unread = [_option(key) for key in given if args.kind not in DEFAULTS[key]]
    if unread:
        known = ", ".join(_option(key) for key in DEFAULTS if args.kind in DEFAULTS[key])
        raise UserError(f"options of `sample {args.kind}`: {known}", ", ".join(unread), "omit them")
    sources = SOURCES[args.kind]
    found = [_option(key) for key in sources if key in given]
    if sources and len(found) != 1:
        expected = " or ".join(map(_option, sources))
        raise UserError(f"exactly one of {expected}", ", ".join(found) or "none of them", "name one source of input")
    if args.method is not None and args.method not in METHODS[args.kind]:
        expected = " or ".join(METHODS[args.kind])
        raise UserError(f"--method {expected} for `sample {args.kind}`", args.method, "choose one of them")
    SearchOptions.of(args)  # refuses what does not fit together
    if args.schedule is not None:
        read_schedule(args.schedule, args.num_steps)  # refuses what it cannot read
    for key, defaults in DEFAULTS.items():
        if getattr(args, key) is None:
            setattr(args, key, defaults.get(args.kind))
    _check_ranges(args)
    _check_critic(args)
    return given


def _check_critic(args: argparse.Namespace) -> None:
    if args.critic_share is not None and not args.critic_rounds:
        raise UserError(
            "--critic-share with --critic-rounds R", "--critic-share alone", "add --critic-rounds, or omit it"
        )
    if args.critic_rounds and (other := "search" if args.search else "correct" if args.correct else None):
        found = f"--critic-rounds and {_option(other)}"
        raise UserError(f"--critic-rounds or {_option(other)}, which changes texts as well", found, "omit one of them")


def fit_to_task(args: argparse.Namespace, given: list[str], pretrained: Pretrained) -> None:
    """Check kind, sampler and options against the task of the checkpoint; drop what it does not read.

    Raises:
        UserError: the task lacks the kind, the sampler, or an option that was given.
    """
    task = pretrained.task
    pretrained.check_kind(args.kind, args.sampler)
    if args.sampler is None and args.kind in DEFAULTS["sampler"]:
        args.sampler = task.samplers[args.kind][0]
    unread = [key for key in TASK_OPTIONS if key not in task.sampling_options]
    if wrong := [_option(key) for key in unread if key in given]:
        known = ", ".join(_option(key) for key in TASK_OPTIONS if args.kind in DEFAULTS[key] and key not in unread)
        raise UserError(f"options that task={task.name} reads: {known}", ", ".join(wrong), "omit them")
    if args.kind == "l2t":
        SearchOptions.of(args).check(task, given)
    if args.sampler is not None:
        of_others = task.unread_options(args.kind, args.sampler)
        if wrong := [_option(key) for key in TASK_OPTIONS if key in given and key in of_others]:
            fix = "omit them, or choose the --sampler that reads them"
            raise UserError(f"options that --sampler {args.sampler} reads", ", ".join(wrong), fix)
        unread += of_others
    for key in unread:
        setattr(args, key, None)
    writes_only = args.kind == "l2t" or pretrained.latent_config is None
    if args.schedule is not None and writes_only and not names_passes(args.schedule):
        if "num_steps" in given:
            raise UserError("--num-steps or --schedule, which says how many there are", "both", "omit one of them")
        args.num_steps = None


def _option(key: str) -> str:
    return "--" + key.replace("_", "-")


def _check_ranges(args: argparse.Namespace) -> None:
    for key, low, high in (
        ("num_samples", 1, None), ("num_steps", 1, None), ("num_beams", 1, None), ("temperature", 0, None),
        ("num_lengths", 1, None), ("critic_rounds", 0, None), ("critic_share", 0, 1),
        ("top_p", 1e-6, 1), ("eta", 0, 1), ("seed", 0, None), ("condition_timestep", 0, 1),
    ):  # fmt: skip
        value = getattr(args, key)
        if value is None or value in ETAS:
            continue
        if not np.isfinite(value) or value < low or (high is not None and value > high):
            bound = f"at least {low:g}" + (f" and at most {high}" if high is not None else "")
            raise UserError(f"{_option(key)} {bound}", str(value), "choose a value in this range")


def _check_trace(args: argparse.Namespace) -> None:
    if args.trace is None:
        return
    check_page_path(args.trace, "--trace", args.overwrite)
    several = "num_lengths" if (args.num_lengths or 1) > 1 else None
    several = "search" if args.search is not None else "correct" if args.correct is not None else several
    several = "critic_rounds" if args.critic_rounds else several
    if several is not None:
        option = _option(several)
        found = f"{option} {getattr(args, several)}, which writes several and keeps one"
        raise UserError("--trace of texts that are written once", found, f"omit {option} or --trace")


def output_folder(path: str, overwrite: bool) -> Path:
    """Return the output folder, which may exist.

    Raises:
        UserError: it is not writable, or it contains samples and overwrite is False.
    """
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
    pretrained = load_pretrained(args.checkpoint, device)
    fit_to_task(args, given, pretrained)
    if args.kind != "unconditional" or pretrained.latent_config is None:  # else choose_method checks the modes
        pretrained.check_mode(args.kind)
    pretrained.check_guidance(1.0 if args.guidance is None else args.guidance)
    trace = None if args.trace is None else start_trace(pretrained, args.sampler)
    started = time.perf_counter()
    sample = {"l2t": sample_l2t, "t2l": sample_t2l, "unconditional": sample_unconditional}[args.kind]
    options = SampleOptions(**{key: getattr(args, key) for key in SampleOptions.__dataclass_fields__})
    with ProgressBar(log=lambda line: print(line, file=sys.stderr, flush=True)) as progress:
        samples = sample(pretrained, options, progress, **({"recorder": trace.recorder} if trace else {}))
    seconds = time.perf_counter() - started

    out.mkdir(parents=True, exist_ok=True)
    for name in OUTPUTS:  # remove the files of an earlier call
        (out / name).unlink(missing_ok=True)
    if samples.latents is not None:
        np.save(out / "latents.npy", samples.latents)
    records = samples.records
    (out / "samples.jsonl").write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    settings = {key: value for key, value in vars(args).items() if isinstance(value, (str, int, float, list))}
    (out / "settings.json").write_text(json.dumps({**settings, **samples.extra, "device": device}, indent=2) + "\n")
    if trace is not None:
        write_page(args.trace, _page(args, pretrained, trace, records))
    _print_table(args.kind, records)
    written = "samples.jsonl" + (", latents.npy" if samples.latents is not None else "")
    print(f"{count_noun(len(records), 'sample')} in {seconds:.1f} s; {written} and settings.json in {out}")
    if trace is not None:
        print(f"how they were written: {args.trace}")
    return EXIT_DONE


def _page(args: argparse.Namespace, pretrained: Pretrained, trace: TraceRecorder, records: list[dict[str, Any]]) -> str:
    """Return the page of --trace."""
    settings = [f"{args.kind}: {KINDS[args.kind]}", f"sampler {args.sampler}", f"seed {args.seed}"]
    if args.num_steps is not None:
        settings.insert(2, f"at most {count_noun(args.num_steps, 'step')}")
    settings.append(Path(args.checkpoint).resolve().name)
    vocab_size = pretrained.model.config.vocab_size
    return trace_page(
        trace.texts, records, pretrained.tokenizer, vocab_size, settings=settings, starts_masked=trace.starts_masked
    )


def _print_table(kind: str, records: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"sample {kind}", show_lines=True)
    columns = [key for key in ("index", "reference", "text", "norm", *TITLES) if key in records[0]]
    for key in columns:
        table.add_column(TITLES.get(key, key), overflow="fold")
    for record in records[:MAX_TABLE_ROWS]:
        table.add_row(*(_format_cell(record[key]) for key in columns))
    Console(markup=False).print(table)
    if len(records) > MAX_TABLE_ROWS:
        print(f"(the first {MAX_TABLE_ROWS} of {len(records)})")


def _format_cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_format_cell, value))
    return f"{value:.4f}" if isinstance(value, float) else str(value)
