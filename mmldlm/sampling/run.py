"""`mmldlm sample l2t | t2l | unconditional`: from a converted checkpoint to files."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmldlm.data.arrays import read_array
from mmldlm.errors import EXIT_DONE, UserError
from mmldlm.sampling.joint import WAYS, choose_way, sample_joint
from mmldlm.sampling.latents import METHODS, check_latents_per_text, latent_shape, sample_latents
from mmldlm.sampling.pretrained import Pretrained, load_pretrained
from mmldlm.sampling.text import PRESENCE_PENALTY, SAMPLERS, TextSamples, sample_text
from mmldlm.utils import reason, usable_folder

# Norms further from 1 than this are not vectors of an encoder that normalises.
_NORM_SLACK = 0.05


KINDS = ("l2t", "t2l", "unconditional")
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
SOURCES = {"l2t": ("latent_file", "text", "text_file", "data"), "t2l": ("text", "text_file"), "unconditional": ()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `mmldlm sample`; `settle_options` fills in the defaults and refuses what a kind ignores."""
    add = parser.add_argument
    add("kind", choices=KINDS, help="text from embeddings, embeddings from text, or both from nothing")
    add("--checkpoint", required=True, metavar="DIR", help="folder that `mmldlm convert` wrote")
    add("--output-dir", required=True, metavar="OUT", help="where samples.jsonl (and latents.npy) go")
    add("--latent-file", metavar="X.npy", help="l2t: embeddings [D] or [N, D], as the encoder gives them")
    add("--text", nargs="+", metavar="TEXT", help="texts; l2t embeds them with the encoder the model was trained on")
    add("--text-file", metavar="FILE", help="texts, one a line")
    add("--data", metavar="STORE", help="l2t: embeddings of validation sentences of a prepared store")
    add("--num-samples", type=int, metavar="N", help="l2t: texts in all (default: one an embedding); unconditional: 10")
    add("--num-steps", type=int, help="denoising steps (default: 64; t2l: 32)")
    add("--sampler", choices=SAMPLERS, help="of text (default: l2t confidence, unconditional ancestral)")
    add(
        "--temperature",
        type=float,
        help="0 takes the most probable word (default: 1 for ancestral; 0 for confidence, or 1 "
        "where an embedding is used several times)",
    )
    add("--top-p", type=float, help="nucleus of the draws of words (default 1)")
    add("--guidance", type=float, help="classifier-free guidance of l2t and t2l (default 1: none)")
    add("--presence-penalty", type=float, help="l2t: nats off words already there (default: confidence 1, ancestral 0)")
    add("--method", choices=METHODS, help="t2l: ddim, or heun for a rectified-flow model (default ddim)")
    add("--eta", type=float, help="t2l: noise of DDIM: 0 none, 1 ancestral (default 0)")
    add("--way", choices=WAYS, help="unconditional: joint or chain (default: what the model was trained for)")
    add("--seed", type=int, default=0, help="of every draw (default %(default)s)")
    add("--device", help="default: cuda where there is one, else cpu")


def settle_options(args: argparse.Namespace) -> None:
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


def main(args: argparse.Namespace) -> int:
    """Runs `mmldlm sample`; returns the exit code."""
    settle_options(args)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    pretrained = load_pretrained(args.checkpoint, device)
    if args.kind != "unconditional":  # choose_way knows what that needs
        pretrained.check_mode(args.kind)
    pretrained.check_guidance(1.0 if args.guidance is None else args.guidance)
    out = usable_folder(args.output_dir, "--output-dir")
    started = time.perf_counter()
    records, latents, extra = {"l2t": _l2t, "t2l": _t2l, "unconditional": _unconditional}[args.kind](pretrained, args)
    seconds = time.perf_counter() - started

    out.mkdir(parents=True, exist_ok=True)
    if latents is not None:
        np.save(out / "latents.npy", latents)
    (out / "samples.jsonl").write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    settings = {key: value for key, value in vars(args).items() if isinstance(value, (str, int, float, list))}
    (out / "settings.json").write_text(json.dumps({**settings, **extra, "device": device}, indent=2) + "\n")
    _show(args.kind, records)
    written = "samples.jsonl" + (", latents.npy" if latents is not None else "")
    print(f"{len(records)} samples in {seconds:.1f} s; {written} and settings.json in {out}")
    return EXIT_DONE


def _check_numbers(args: argparse.Namespace) -> None:
    for key, low, high in (
        ("num_samples", 1, None), ("num_steps", 1, None), ("temperature", 0, None), ("top_p", 1e-6, 1), ("eta", 0, 1),
        ("seed", 0, None),
    ):  # fmt: skip
        value = getattr(args, key)
        if value is not None and (not np.isfinite(value) or value < low or (high is not None and value > high)):
            bound = f"at least {low:g}" + (f" and at most {high}" if high is not None else "")
            raise UserError(f"{_option(key)} {bound}", str(value), "give another number")


def _l2t(pretrained: Pretrained, args: argparse.Namespace):
    references, latents = _l2t_input(pretrained, args)
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
    )
    records = text_records(pretrained, samples)
    for record, place in zip(records, source.tolist()):
        record["latent"] = place
        if references is not None:
            record["reference"] = references[place]
    return records, None, {"forward_passes_per_sample": samples.num_rows / len(records)}


def _l2t_input(pretrained: Pretrained, args: argparse.Namespace) -> tuple[list[str] | None, np.ndarray]:
    if args.latent_file:
        return None, read_latents(args.latent_file, pretrained)
    if args.data:
        from mmldlm.data.store import Store, check_latents

        store = Store(args.data, "validation")
        ids = np.arange(min(args.num_samples or len(store), len(store)))
        latents = store.get(ids).latents
        check_latents(latents, f"{args.data}/validation", pretrained.model.config.latent_dim)
        check_latents_per_text(store, pretrained.model.config)
        return store.texts(ids), latents
    texts = _texts(args)
    return texts, encode_texts(texts, pretrained)


def read_latents(path: str, pretrained: Pretrained) -> np.ndarray:
    """Embeddings [N, D] fp32 of a .npy file that holds [D] or [N, D]; of a model of M latents a text [N, M, D] of
    [M, D] or [N, M, D].

    Raises:
        UserError: no such file, not an array, empty, of another dimension, NaN, infinite or zero vectors.
    """
    shape = latent_shape(pretrained.model.config)
    one = ", ".join(map(str, shape))
    expected = f"a .npy file of numbers [{one}] or [N, {one}] (the model's latents of a text) at {path}"
    fix = "save the encoder's vectors with numpy.save; nothing is filled in for missing or damaged ones"
    try:
        values = read_array(Path(path))
    except FileNotFoundError:
        raise UserError(expected, "no such file", "check the path") from None
    except (OSError, ValueError) as error:
        raise UserError(expected, f"not a .npy file: {error}", fix) from error
    if not isinstance(values, np.ndarray) or not np.issubdtype(values.dtype, np.floating):
        raise UserError(expected, f"{getattr(values, 'dtype', type(values).__name__)}", fix)
    rows = values[None] if values.ndim == len(shape) else values
    if rows.shape[1:] != shape or rows.size == 0:
        raise UserError(expected, f"shape {list(values.shape)}", fix)
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    bad = np.unique(np.nonzero(~np.isfinite(rows).all(-1) | ~rows.any(-1))[0])
    if len(bad):
        named = ", ".join(map(str, bad[:10])) + (", ..." if len(bad) > 10 else "")
        raise UserError(f"finite, non-zero vectors in {path}", f"NaN, infinite or zero vectors in rows {named}", fix)
    norm = float(np.median(np.linalg.norm(rows, axis=-1)))
    if pretrained.unit_norm and abs(norm - 1) > _NORM_SLACK:
        print(
            f"warning: the vectors in {path} have norm {norm:.3g}, those the model was trained on have norm 1; "
            "are they of the same encoder, unscaled?",
            file=sys.stderr,
        )
    return rows


def encode_texts(texts: Sequence[str], pretrained: Pretrained) -> np.ndarray:
    """Embeddings [N, D] of texts by the encoder the model was trained on; [N, M, D] where it has M latents a text.

    Raises:
        UserError: the checkpoint does not name its encoder, the one at hand has other weights, or a text is too short
            for M pieces.
    """
    from mmldlm.data.encoders import Encoder
    from mmldlm.data.text import latent_parts

    identity = pretrained.encoder
    if identity is None:
        raise UserError(
            f'"encoder" in {pretrained.folder}/config.json, which names the encoder of the model\'s latents',
            "no such key",
            "embed the texts yourself and pass --latent-file",
        )
    if not pretrained.knows_encoder:
        raise UserError(
            "a model whose data names the encoder of its latents",
            "its store was packed without --encoder",
            "embed the texts yourself with that encoder and give the latents with --latent-file",
        )
    count, pieces = pretrained.model.config.max_latents, []
    for text in texts:  # cut as prepare cuts them
        parts = latent_parts(text, count)
        if parts is None:
            raise UserError(
                f"texts of at least {count} characters, which the model's {count} latents are of",
                repr(text),
                "leave it out",
            )
        pieces += parts
    return Encoder.from_identity(identity).encode(pieces).reshape(len(texts), *latent_shape(pretrained.model.config))


def _texts(args: argparse.Namespace) -> list[str]:
    texts = args.text
    if args.text_file:
        try:
            texts = Path(args.text_file).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            found = f"{args.text_file}: {reason(error)}"
            raise UserError("a text file, one text a line", found, "check the path") from error
        except UnicodeDecodeError as error:
            raise UserError(
                f"UTF-8 text in {args.text_file}",
                f"byte 0x{error.object[error.start]:02x} at offset {error.start}",
                "save it as UTF-8 (for instance with iconv)",
            ) from None
        texts = [text for text in texts if text.strip()]
    if not texts or any(not text.strip() for text in texts):
        raise UserError("texts that are not empty", f"{texts!r}", "give at least one text, none of them blank")
    return [text.strip() for text in texts]


def tokenize_texts(texts: Sequence[str], pretrained: Pretrained) -> list[list[int]]:
    """Ids without special tokens.

    Raises:
        UserError: a text too long for the model, or of no token.
    """
    ids = pretrained.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    room = pretrained.model.config.max_seq_len - 1
    for text, row in zip(texts, ids):
        if not 1 <= len(row) <= room:
            raise UserError(
                f"texts of 1 to {room} tokens (model.max_seq_len, less one for EOS)",
                f"{len(row)} tokens in {text[:60]!r}",
                "shorten it, or split it into sentences",
            )
    return ids


def _t2l(pretrained: Pretrained, args: argparse.Namespace):
    if args.method == "heun" and pretrained.latent_config.path != "rectified_flow":
        raise UserError("--method ddim", f"heun on path {pretrained.latent_config.path}", "heun needs rectified_flow")
    texts = _texts(args)
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
    )
    norms = latents.norm(dim=-1).tolist()
    records = [
        {"index": i, "text": text, "num_tokens": len(row), "latent": i, "norm": norm}
        for i, (text, row, norm) in enumerate(zip(texts, ids, norms))
    ]
    return records, latents.numpy(), {}


def _unconditional(pretrained: Pretrained, args: argparse.Namespace):
    way = choose_way(pretrained, args.way)
    shared = {"steps": args.num_steps, "sampler": args.sampler, "temperature": args.temperature, "top_p": args.top_p}
    if way == "joint":
        samples, latents = sample_joint(
            pretrained.model,
            args.num_samples,
            text_diffusion=pretrained.text_diffusion,
            latent_diffusion=pretrained.latent_diffusion,
            renormalise=pretrained.renormalise,
            seed=args.seed,
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
        )
        samples = sample_text(pretrained.model, latents, diffusion=pretrained.text_diffusion, seed=args.seed, **shared)
    records = text_records(pretrained, samples)
    for i, record in enumerate(records):
        record.update(latent=i, way=way)
    return records, latents.numpy(), {"way": way}


def text_records(pretrained: Pretrained, samples: TextSamples) -> list[dict[str, Any]]:
    """One JSON-ready record a text."""
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
    columns = [key for key in ("index", "reference", "text", "norm") if key in records[0]]
    for key in columns:
        table.add_column(key, overflow="fold")
    for record in records[:most]:
        table.add_row(*(_shown(record[key]) for key in columns))
    Console(markup=False).print(table)
    if len(records) > most:
        print(f"(the first {most} of {len(records)})")
