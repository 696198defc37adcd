"""`mmldlm sample l2t | t2l | unconditional`: from a run, a checkpoint or a converted model to files."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmldlm.errors import EXIT_DONE, UserError
from mmldlm.observe.progress_meter import Meter
from mmldlm.sampling.device import usable_device
from mmldlm.sampling.inputs import encode_texts, given_texts, read_latents, tokenize_texts
from mmldlm.sampling.joint_sampler import JOINT_METHODS, choose_method, sample_joint
from mmldlm.sampling.latent_sampler import SOLVERS, check_latents_per_text, sample_latents
from mmldlm.sampling.pretrained import Pretrained, load_pretrained
from mmldlm.sampling.text.draw import PRESENCE_PENALTY
from mmldlm.sampling.text.loop import TextSamples, sample_text
from mmldlm.sampling.text.strategies import STRATEGIES
from mmldlm.utils.output_paths import check_writable_dir

KINDS = {
    "l2t": "text from embeddings",
    "t2l": "embeddings from text",
    "unconditional": "text and embeddings from nothing",
}
# Options that not every kind reads, and their defaults in the kinds that do.
DEFAULTS: dict[str, dict[str, Any]] = {
    "latent_file": {"l2t": None},
    "data": {"l2t": None},
    "text": {"l2t": None, "t2l": None},
    "text_file": {"l2t": None, "t2l": None},
    "num_samples": {"l2t": None, "unconditional": 10},
    "num_steps": {"l2t": 64, "t2l": 32, "unconditional": 64},
    "sampler": {"l2t": "confidence", "unconditional": "ancestral"},
    "temperature": {"l2t": None, "unconditional": None},
    "top_p": {"l2t": 1.0, "unconditional": 1.0},
    "guidance": {"l2t": 1.0, "t2l": 1.0},
    "presence_penalty": {"l2t": None},
    "method": {"t2l": "ddim"},
    "eta": {"t2l": 0.0},
    "way": {"unconditional": None},
}
# Of the same options: what argparse needs to know, and the help (of one kind, where it differs).
OPTIONS: dict[str, dict[str, Any]] = {
    "latent_file": {"metavar": "X.npy", "help": "embeddings [D] or [N, D], as the encoder gives them"},
    "data": {"metavar": "STORE", "help": "embeddings of validation sentences of a prepared store"},
    "text": {"nargs": "+", "metavar": "TEXT", "help": "texts (of l2t: embedded with the encoder of the training data)"},
    "text_file": {"metavar": "FILE", "help": "texts, one a line"},
    "num_samples": {"type": int, "metavar": "N", "help": "texts in all (l2t: default one per embedding)"},
    "num_steps": {"type": int, "help": "denoising steps; a text of n tokens takes at most n confidence steps"},
    "sampler": {"choices": tuple(STRATEGIES), "help": "of text"},
    "temperature": {
        "type": float,
        "help": "0 takes the most probable token (default: 1 for ancestral; 0 for confidence, or 1 where an embedding "
        "is used several times)",
    },
    "top_p": {"type": float, "help": "nucleus of the token draws"},
    "guidance": {"type": float, "help": "classifier-free guidance, 1: none"},
    "presence_penalty": {
        "type": float,
        "help": "nats off tokens already there (default: confidence 1, ancestral 0)",
    },
    "method": {"choices": SOLVERS, "help": "of latents: ddim, or heun for a rectified-flow model"},
    "eta": {"type": float, "help": "noise of DDIM: 0 none, 1 ancestral"},
    "way": {"choices": JOINT_METHODS, "help": "joint or chain (default: what the model was trained for)"},
}
SOURCES = {"l2t": ("latent_file", "text", "text_file", "data"), "t2l": ("text", "text_file"), "unconditional": ()}
OUTPUTS = ("samples.jsonl", "latents.npy", "settings.json")
CHECKPOINT_HELP = "a run, RUN/latest, a checkpoint, a model.pt, or a folder that `mmldlm convert` wrote"


def add_arguments(parser: argparse.ArgumentParser, kind: str | None = None) -> None:
    """Adds the arguments of `mmldlm sample`, or those that one kind reads; `resolve_options` fills in the defaults."""
    add = parser.add_argument
    if kind is None:
        add("kind", choices=KINDS, help="what to sample; `mmldlm sample KIND --help` lists the options of one")
    else:
        parser.set_defaults(kind=kind, **dict.fromkeys(DEFAULTS))
    add("--checkpoint", required=True, metavar="PATH", help=CHECKPOINT_HELP)
    add("--output-dir", required=True, metavar="OUT", help=f"where {', '.join(OUTPUTS)} go")
    add("--overwrite", action="store_true", help="replace the samples of an earlier call in OUT")
    for key, options in OPTIONS.items():
        defaults = DEFAULTS[key]
        if kind is None:
            words = ", ".join(f"{name} {value}" for name, value in defaults.items() if value is not None)
            readers = "" if len(defaults) == len(KINDS) else f"{', '.join(defaults)}: "
            text = readers + options["help"] + (f" (default: {words})" if words else "")
        elif kind in defaults:
            value = defaults[kind]
            text = options["help"] + (f" (default {value})" if value is not None else "")
        else:
            continue
        add(_option(key), **{**options, "help": text})
    add("--seed", type=int, default=0, help="of every draw (default %(default)s)")
    add("--device", help="default: cuda where there is one, else cpu")


def resolve_options(args: argparse.Namespace) -> None:
    """Fill in the defaults of args.kind.

    Raises:
        UserError: an option that this kind does not read, not exactly one source, or a number out of range.
    """
    given = [key for key in DEFAULTS if getattr(args, key) is not None]
    unread = [_option(key) for key in given if args.kind not in DEFAULTS[key]]
    if unread:
        known = ", ".join(_option(key) for key in DEFAULTS if args.kind in DEFAULTS[key])
        raise UserError(f"options that `sample {args.kind}` reads: {known}", ", ".join(unread), "leave them out")
    sources = SOURCES[args.kind]
    found = [_option(key) for key in sources if key in given]
    if sources and len(found) != 1:
        wanted = " or ".join(map(_option, sources))
        raise UserError(f"one of {wanted}", ", ".join(found) or "none of them", "say where the input comes from")
    for key, defaults in DEFAULTS.items():
        if getattr(args, key) is None:
            setattr(args, key, defaults.get(args.kind))
    _check_numbers(args)


def _option(key: str) -> str:
    return "--" + key.replace("_", "-")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _check_numbers(args: argparse.Namespace) -> None:
    for key, low, high in (
        ("num_samples", 1, None), ("num_steps", 1, None), ("temperature", 0, None), ("top_p", 1e-6, 1), ("eta", 0, 1),
        ("seed", 0, None),
    ):  # fmt: skip
        value = getattr(args, key)
        if value is not None and (not np.isfinite(value) or value < low or (high is not None and value > high)):
            bound = f"at least {low:g}" + (f" and at most {high}" if high is not None else "")
            raise UserError(f"{_option(key)} {bound}", str(value), "give another number")


def output_folder(path: str, overwrite: bool) -> Path:
    """The folder for the samples, which may exist.

    Raises:
        UserError: it cannot be written, or it holds samples and overwrite is False.
    """
    out = check_writable_dir(path, "--output-dir")
    there = [name for name in OUTPUTS if (out / name).exists()]
    if there and not overwrite:
        raise UserError(
            f"--output-dir {out} without samples of an earlier call",
            ", ".join(there),
            "give another --output-dir, or --overwrite to replace them",
        )
    return out


def main(args: argparse.Namespace) -> int:
    """Runs `mmldlm sample`; returns the exit code."""
    resolve_options(args)
    device = usable_device(args.device)
    out = output_folder(args.output_dir, args.overwrite)
    pretrained = load_pretrained(args.checkpoint, device)
    if args.kind != "unconditional":  # choose_method knows what that needs
        pretrained.check_mode(args.kind)
    pretrained.check_guidance(1.0 if args.guidance is None else args.guidance)
    started = time.perf_counter()
    with Meter(lambda line: print(line, file=sys.stderr, flush=True)) as begin:
        sample = {"l2t": _l2t, "t2l": _t2l, "unconditional": _unconditional}[args.kind]
        records, latents, extra = sample(pretrained, args, begin)
    seconds = time.perf_counter() - started

    out.mkdir(parents=True, exist_ok=True)
    for name in OUTPUTS:  # no file of an earlier call stays beside those of this one
        (out / name).unlink(missing_ok=True)
    if latents is not None:
        np.save(out / "latents.npy", latents)
    (out / "samples.jsonl").write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    settings = {key: value for key, value in vars(args).items() if isinstance(value, (str, int, float, list))}
    (out / "settings.json").write_text(json.dumps({**settings, **extra, "device": device}, indent=2) + "\n")
    _show(args.kind, records)
    written = "samples.jsonl" + (", latents.npy" if latents is not None else "")
    print(f"{_count(len(records), 'sample')} in {seconds:.1f} s; {written} and settings.json in {out}")
    return EXIT_DONE


def _l2t(pretrained: Pretrained, args: argparse.Namespace, begin: Meter):
    references, latents = _l2t_input(pretrained, args, begin)
    count = args.num_samples or len(latents)
    source = np.arange(count) % len(latents)
    temperature = args.temperature
    if temperature is None and count > len(latents):
        temperature = 1.0
    penalty = args.presence_penalty
    if penalty is None:
        penalty = PRESENCE_PENALTY if args.sampler == "confidence" else 0.0
    samples = sample_text(
        pretrained.model,
        torch.from_numpy(latents[source]),
        diffusion=pretrained.text_diffusion,
        steps=args.num_steps,
        sampler=args.sampler,
        temperature=temperature,
        top_p=args.top_p,
        guidance=args.guidance,
        presence_penalty=penalty,
        seed=args.seed,
        progress=begin(f"writing {_count(count, 'text')} in at most {args.num_steps} steps"),
    )
    records = text_records(pretrained, samples)
    for record, place in zip(records, source.tolist()):
        record["latent"] = place
        if references is not None:
            record["reference"] = references[place]
    return records, None, {"forward_passes_per_sample": samples.num_rows / len(records)}


def _l2t_input(pretrained: Pretrained, args: argparse.Namespace, begin: Meter) -> tuple[list[str] | None, np.ndarray]:
    if args.latent_file:
        return None, read_latents(args.latent_file, pretrained)
    if args.data:
        from mmldlm.data.store.store import Store, check_latents

        store = Store(args.data, "validation")
        ids = np.arange(min(args.num_samples or len(store), len(store)))
        latents = store.get(ids).latents
        check_latents(latents, f"{args.data}/validation", pretrained.model.config.latent_dim)
        check_latents_per_text(store, pretrained.model.config)
        return store.texts(ids), latents
    texts = given_texts(args.text, args.text_file)
    return texts, encode_texts(texts, pretrained, begin(f"embedding {_count(len(texts), 'text')} with the encoder"))


def _t2l(pretrained: Pretrained, args: argparse.Namespace, begin: Meter):
    if args.method == "heun" and pretrained.latent_config.path != "rectified_flow":
        raise UserError("--method ddim", f"heun on path {pretrained.latent_config.path}", "heun needs rectified_flow")
    texts = given_texts(args.text, args.text_file)
    ids = tokenize_texts(texts, pretrained)
    latents = sample_latents(
        pretrained.model,
        ids,
        diffusion=pretrained.latent_diffusion,
        steps=args.num_steps,
        method=args.method,
        eta=args.eta,
        guidance=args.guidance,
        renormalise=pretrained.renormalise,
        unit=pretrained.renormalise,
        seed=args.seed,
        progress=begin(f"embedding {_count(len(texts), 'text')} in {args.num_steps} steps"),
    )
    norms = latents.norm(dim=-1).tolist()
    records: list[dict[str, Any]] = [
        {"index": i, "text": text, "num_tokens": len(row), "latent": i, "norm": norm}
        for i, (text, row, norm) in enumerate(zip(texts, ids, norms))
    ]
    cosines = _encoder_cosines(pretrained, texts, latents.numpy(), begin)
    if cosines is None:
        return records, latents.numpy(), {}
    for record, cosine in zip(records, cosines):
        record["cosine"] = cosine
    return records, latents.numpy(), {"mean_cosine_with_encoder": float(np.mean(cosines))}


def _encoder_cosines(pretrained: Pretrained, texts: list[str], made: np.ndarray, begin: Meter) -> list[float] | None:
    """Cosine of each made latent with the encoder's (their mean where a text has several); None without the encoder."""
    try:
        true = encode_texts(
            texts, pretrained, begin(f"embedding {_count(len(texts), 'text')} with the encoder, to compare")
        )
    except (UserError, ImportError, OSError) as error:  # the samples are good without it
        found = f"{error.found} (expected {error.expected})" if isinstance(error, UserError) else str(error)
        print(f"no cosine with the encoder's embedding: {found}", file=sys.stderr)
        return None
    norms = np.linalg.norm(made, axis=-1) * np.linalg.norm(true, axis=-1)
    cosines = (made * true).sum(-1) / np.maximum(norms, 1e-12)
    return cosines.reshape(len(texts), -1).mean(-1).tolist()


def _unconditional(pretrained: Pretrained, args: argparse.Namespace, begin: Meter):
    way = choose_method(pretrained, args.way)
    shared = {"steps": args.num_steps, "sampler": args.sampler, "temperature": args.temperature, "top_p": args.top_p}
    if way == "joint":
        samples, latents = sample_joint(
            pretrained.model,
            args.num_samples,
            text_diffusion=pretrained.text_diffusion,
            latent_diffusion=pretrained.latent_diffusion,
            renormalise=pretrained.renormalise,
            seed=args.seed,
            progress=begin(f"{args.num_samples} texts and embeddings together in {args.num_steps} steps"),
            **shared,
        )
    else:
        latents = sample_latents(
            pretrained.model,
            None,
            num_samples=args.num_samples,
            diffusion=pretrained.latent_diffusion,
            steps=args.num_steps,
            renormalise=pretrained.renormalise,
            unit=pretrained.renormalise,
            seed=args.seed,
            progress=begin(f"{args.num_samples} embeddings in {args.num_steps} steps"),
        )
        samples = sample_text(
            pretrained.model,
            latents,
            diffusion=pretrained.text_diffusion,
            seed=args.seed,
            progress=begin(f"writing their texts in {args.num_steps} steps"),
            **shared,
        )
    records = text_records(pretrained, samples)
    for i, record in enumerate(records):
        record.update(latent=i, way=way)
    return records, latents.numpy(), {"way": way}


def text_records(pretrained: Pretrained, samples: TextSamples) -> list[dict[str, Any]]:
    """One JSON-ready record per text."""
    texts = pretrained.tokenizer.batch_decode(samples.tokens, skip_special_tokens=True)
    return [
        {"index": i, "text": text, "num_tokens": len(ids)} for i, (text, ids) in enumerate(zip(texts, samples.tokens))
    ]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _show(kind: str, records: list[dict[str, Any]], most: int = 20) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"sample {kind}", show_lines=True)
    columns = [key for key in ("index", "reference", "text", "norm", "cosine") if key in records[0]]
    for key in columns:
        table.add_column("cosine with the encoder's" if key == "cosine" else key, overflow="fold")
    for record in records[:most]:
        table.add_row(*(_shown(record[key]) for key in columns))
    Console(markup=False).print(table)
    if len(records) > most:
        print(f"(the first {most} of {len(records)})")
