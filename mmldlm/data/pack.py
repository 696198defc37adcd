"""Pack latents that were made elsewhere into a store: folders of one file per sample, MM-LDLM's
layouts, or texts and latents in one file each.

Input layouts:
  DIR/{train,validation}_data.json         records with latent_path and text or text_path
  DIR/texts/SPLIT/X.txt, DIR/latents/SPLIT/X.npy            pairs by name
  DIR/tokens/SPLIT/X[_tokens].npz, DIR/latents/SPLIT/X.npy  input_ids and attention_mask of the
  given tokenizer
  DIR/X.npy, DIR/X_tokens.npz              the same in one folder
  TEXTS, LATENTS                           one record and one row for every sample
Latents are copied unchanged. Every file is either in the store or counted with the reason of its
omission.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from mmldlm.data.arrays import read_npz_array
from mmldlm.data.encoders.model_files import save_tokenizer
from mmldlm.data.encoders.specs import ENCODERS, UNKNOWN_ENCODER
from mmldlm.data.folder_layouts import SampleFiles, find_samples
from mmldlm.data.latents_file import LatentRow, find_rows
from mmldlm.data.manifest import MANIFEST
from mmldlm.data.prepare import select
from mmldlm.data.prepare import tokenizer as tokenizers
from mmldlm.data.prepare.source import account_for, write_split
from mmldlm.data.prepare.summary import print_summary
from mmldlm.data.prepare.tokenize import token_ids, truncate
from mmldlm.data.prepare.work_dir import (
    check_output_free,
    commit,
    latents_suffix,
    versions,
    write_manifest,
)
from mmldlm.data.sentences import MAX_TEXT_BYTES, content_hash, fold_spaces
from mmldlm.data.store import FORMAT, SPLITS, TOKENIZER_FOLDER, VERSION
from mmldlm.data.unknown_tokens import check_unknown_share
from mmldlm.data.writers import FILES_FORMAT, Block, LatentStatistics, StoreSplit
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import list_files
from mmldlm.utils.formatting import describe_counts, is_utf8, join_some
from mmldlm.utils.input_files import LeftOut, read_text
from mmldlm.utils.json_files import read_json
from mmldlm.utils.paths import check_writable_dir, output_root
from mmldlm.utils.screen import open_console
from mmldlm.utils.validation import not_none

Sample = SampleFiles | LatentRow
_BLOCK = 4096

MAX_TOKEN_BYTES = 64 << 20  # of an array of one sample's tokens, which need far less


@dataclass
class PackOptions:
    """The options of `mmldlm pack`; each field is the option of the same name."""

    source: str
    output_dir: str
    latents: str | None = None
    text_field: str | None = None
    latents_field: str | None = None
    tokenizer: str | None = None
    encoder: str | None = None
    cache_dir: str | None = None
    add_mask_token: bool = False
    min_tokens: int = 1
    max_tokens: int | None = None
    validation_samples: int | None = None
    keep_duplicates: bool = False
    seed: int = 0
    force: bool = False
    latents_per_text: int | None = None


def pack(options: PackOptions, console: Console | None = None) -> Path:
    """Read texts and latents and write a store atomically; return its folder.

    Raises:
        UserError: an unknown layout, more or fewer latents than texts, token files without a
            tokenizer, latents of several dimensions, or too few usable samples.
    """
    started = time.perf_counter()
    console = console or open_console()
    source, root = Path(options.source), output_root(options.output_dir)
    check_output_free(root, options.force)
    check_writable_dir(root.parent, "--output-dir")
    counts: Counter = Counter()
    left_out = LeftOut()
    samples, latents_per_text = _find(options, counts, left_out)
    prepared = _read_manifest(source)
    tokenizer, identity = _load_tokenizer(options, prepared, samples)
    vocab_size = identity["vocab_size"]
    reader = _Reader(options, tokenizer, vocab_size, latents_per_text, counts)
    usable = {split: reader.read(part) for split, part in samples.items()}
    latent_dim = _keep_one_dimension(usable, counts, source)
    encoder = _describe_encoder(options, prepared.get("encoder"), latent_dim)
    latent_shape = (latent_dim,) if latents_per_text == 1 else (latents_per_text, latent_dim)
    chosen = _choose(usable, options, counts)
    for split, rows in chosen.items():
        if len(rows) < 2:
            raise UserError(
                f"at least 2 usable samples for the {split} split in {source}",
                f"{len(rows)} ({describe_counts(counts)})",
                "check what was dropped, and --validation-samples; texts and latents in one file"
                " each are packed with mmldlm pack TEXTS --latents FILE",
            )
    partial = root.with_name(f"{root.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        statistics = LatentStatistics(latent_dim, len(chosen["train"]) * latents_per_text)
        summaries = {}
        for split, rows in chosen.items():
            summary = summaries[split] = write_split(
                StoreSplit(partial, split, latent_shape, vocab_size),
                _blocks(rows, latent_shape),
                tokenizer.unk_token_id,
                statistics if split == "train" else None,
            )
            warning = check_unknown_share(summary["num_unknown"], summary["num_tokens"], split)
            if warning is not None:
                console.print(f"warning: {warning}", soft_wrap=True)
        latent_stats = statistics.result()
        save_tokenizer(tokenizer, partial / TOKENIZER_FOLDER)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "latent_dim": latent_dim,
            **latents_suffix(latents_per_text),
            "encoder": _with_normalize(encoder, latent_stats["norm"]),
            "latent_stats": latent_stats,
            "tokenizer": identity,
            "splits": summaries,
            "corpus": _describe_corpus(source, summaries, counts, left_out),
            "options": {"keep_duplicates": options.keep_duplicates, "seed": options.seed},
            "files": list_files(partial),
            "created_with": versions(),
        }
        write_manifest(partial, manifest)
        commit(partial, root, options.force)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    print_summary(console, root, manifest, time.perf_counter() - started)
    return root


def _find(
    options: PackOptions, counts: Counter, left_out: LeftOut
) -> tuple[Mapping[str, Sequence[Sample]], int]:
    """Return split -> samples, and the latents per text.

    Raises:
        UserError: as of `find_samples` and `find_rows`, or options of the other of both.
    """
    source, latents = Path(options.source), options.latents
    if latents is None and source.suffix.lower() == ".parquet":
        latents = options.source
    if latents is not None:
        rows, count = find_rows(
            source, Path(latents), options.text_field, options.latents_field, counts
        )
        if options.latents_per_text not in (None, count):
            raise UserError(
                f"--latents-per-text {count}, as many as {latents} has",
                str(options.latents_per_text),
                "leave it out",
            )
        return {"train": rows}, count
    if source.is_file():
        fix = "name the .npy, .npz or parquet file of its latents"
        raise UserError(f"--latents FILE for the texts in {source}", "no --latents", fix)
    for name in ("text_field", "latents_field"):
        if getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            fix = f"leave {flag} out"
            raise UserError(f"{flag} with --latents FILE", f"the folder {source}", fix)
    samples = find_samples(source, counts, left_out)
    return samples, options.latents_per_text or _read_manifest(source).get("latents_per_text", 1)


def _load_tokenizer(
    options: PackOptions, prepared: dict[str, Any], samples: Mapping[str, Sequence[Sample]]
) -> tuple[PreTrainedTokenizerFast, dict[str, Any]]:
    """Return the tokenizer and its identity: that of --tokenizer, else the one that `prepare`
    saved in the folder.
    """
    source = Path(options.source)
    own = source / TOKENIZER_FOLDER
    if options.tokenizer is None and "tokenizer" in prepared and own.is_dir():
        tokenizer = tokenizers.load(str(own))
        identity = tokenizers.identity(tokenizer, prepared["tokenizer"]["name"])
        tokenizer.split_special_tokens = True
        return tokenizer, identity
    has_tokens = any(
        isinstance(sample, SampleFiles) and sample.tokens_path
        for part in samples.values()
        for sample in part
    )
    name = options.tokenizer or (None if has_tokens else "minilm")
    if name is None:
        raise UserError(
            f"--tokenizer NAME: the one whose ids are in {source}",
            "none",
            "give it (MM-LDLM's: bert-base-uncased)",
        )
    tokenizer = tokenizers.load(name, options.cache_dir, options.add_mask_token)
    identity = tokenizers.identity(tokenizer, name)
    tokenizer.split_special_tokens = True
    return tokenizer, identity


def _describe_encoder(
    options: PackOptions, prepared: dict[str, Any] | None, latent_dim: int
) -> dict[str, Any]:
    """Return the manifest's entry of the encoder: the folder's own, or how that of --encoder is
    used.

    Raises:
        UserError: --encoder names another than the folder, or one whose latents have another
            dimension.
    """
    name = options.encoder
    if prepared is not None and name not in (None, prepared["name"]):
        raise UserError(
            f"encoder '{prepared['name']}', which made the latents in {options.source}",
            f"--encoder {name}",
            "leave it out",
        )
    if prepared is not None:
        return prepared
    if name is None:
        return {"name": UNKNOWN_ENCODER, "source": "imported"}
    spec = ENCODERS[name]
    low, high = spec.matryoshka or (not_none(spec.latent_dim), not_none(spec.latent_dim))
    if not low <= latent_dim <= high:
        expected = high if low == high else f"{low} to {high}"
        raise UserError(
            f"latents of {expected} components for --encoder {name}",
            f"{latent_dim} in {options.source}",
            "name the encoder that made them, or leave --encoder out",
        )
    return {
        "name": name,
        "source": "imported",
        "pooling": spec.pooling,
        **({"prefix": spec.prefix} if spec.prefix else {}),
        **({"cut_to": latent_dim} if spec.matryoshka else {}),
    }


def _with_normalize(encoder: dict[str, Any], norm: dict[str, float]) -> dict[str, Any]:
    """Return the encoder's entry with `normalize`, measured if it is unknown; of bf16 vectors the
    norm is 1 within half a percent.
    """
    is_unit = bool(abs(norm["min"] - 1) < 1e-2 and abs(norm["max"] - 1) < 1e-2)
    return encoder if "normalize" in encoder else {**encoder, "normalize": is_unit}


def _describe_corpus(
    source: Path, summaries: dict[str, dict[str, int]], counts: Counter, left_out: LeftOut
) -> dict[str, Any]:
    """Return the manifest's entry of the corpus, in which every sample is accounted for."""
    num_packed = sum(summary["num_samples"] for summary in summaries.values())
    return {
        "source": f"files:{source.resolve().name}",
        **account_for(counts, num_packed),
        **({"truncated": counts["truncated"]} if counts["truncated"] else {}),
        "files": counts["files"],
        **left_out.entry(),
    }


@dataclass
class _Usable:
    """A sample that can be packed.

    Attributes:
        text, ids: Text and token ids, int64 [n].
        dim: Number of components D of its latents.
    """

    sample: Sample
    text: str
    ids: np.ndarray
    dim: int


class _Unusable(Exception):
    """The reason why a sample is left out."""


class _Reader:
    """Reader of samples, which counts and leaves out unusable ones."""

    def __init__(
        self,
        options: PackOptions,
        tokenizer: PreTrainedTokenizerFast,
        vocab_size: int,
        latents_per_text: int,
        counts: Counter,
    ):
        self.options, self.tokenizer, self.vocab_size = options, tokenizer, vocab_size
        self.latents_per_text, self.counts = latents_per_text, counts
        self.specials = list(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id})

    def read(self, samples: Sequence[Sample]) -> list[_Usable]:
        """Return the usable samples."""
        usable = []
        for sample in samples:
            self.counts["read"] += 1
            try:
                usable.append(self._read(sample))
            except _Unusable as reason:
                self.counts[f"drop_{reason}"] += 1
        return usable

    def _read(self, sample: Sample) -> _Usable:
        dim = self._dim_of(sample)
        text, ids = self._text_and_ids(sample)
        least, most = max(self.options.min_tokens, 1), self.options.max_tokens
        if len(ids) < least:
            raise _Unusable("too_short")
        if most is not None and len(ids) > most:
            ids, text = truncate(self.tokenizer, text, most)
            if len(ids) < least:
                raise _Unusable("too_short")
            self.counts["truncated"] += 1
        return _Usable(sample, text, np.asarray(ids, np.int64), dim)

    def _dim_of(self, sample: Sample) -> int:
        """Return the number of components of a sample's latents, if they can be stored."""
        try:
            vectors = sample.read_latent()
        except (OSError, ValueError, MemoryError):
            raise _Unusable("unreadable_latent") from None
        if vectors.dtype.kind != "f":
            kind = vectors.dtype.name if vectors.dtype.kind in "biuc" else "other"
            raise _Unusable(f"latent_of_type_{kind}")
        count = self.latents_per_text
        vectors = vectors[None] if vectors.ndim == 1 else vectors
        if vectors.ndim != 2 or len(vectors) != count or not vectors.shape[1]:
            raise _Unusable(
                "latent_not_one_vector" if count == 1 else f"latent_not_{count}_vectors"
            )
        with np.errstate(over="ignore"):
            # float64 may overflow float32; infinities are checked next.
            vectors = vectors.astype(np.float32)
        if not np.isfinite(vectors).all():
            raise _Unusable("latent_not_finite")
        if not vectors.any(axis=1).all():
            raise _Unusable("latent_zero")
        return vectors.shape[1]

    def _text_and_ids(self, sample: Sample) -> tuple[str, np.ndarray | list[int]]:
        try:
            if isinstance(sample, SampleFiles) and sample.tokens_path is not None:
                return self._read_tokens(sample.tokens_path)
            text = (
                sample.text
                if sample.text is not None
                else read_text(not_none(sample.text_path), MAX_TEXT_BYTES)
            )
            if not is_utf8(text):
                raise ValueError("lone surrogates, to which broken escapes in JSON decode")
        except (OSError, ValueError) as error:
            if isinstance(error, UserError) and not isinstance(error, OSError):
                raise
            raise _Unusable("unreadable_text") from error
        text = fold_spaces(text)
        return text, token_ids(self.tokenizer, text)

    def _read_tokens(self, path: Path) -> tuple[str, np.ndarray]:
        """Return text and token ids of a file of tokens.

        Raises:
            UserError: ids of another tokenizer.
            ValueError, OSError: not a file of tokens.
        """
        ids, mask = (
            read_npz_array(path, key, MAX_TOKEN_BYTES).ravel()
            for key in ("input_ids", "attention_mask")
        )
        is_valid = ids.dtype.kind in "iu" and mask.dtype.kind in "biu" and ids.shape == mask.shape
        if not is_valid:
            raise ValueError("input_ids and attention_mask that do not fit")
        ids = ids[mask.astype(bool)].astype(np.int64)
        if len(ids) and (ids.min() < 0 or ids.max() >= self.vocab_size):
            raise UserError(
                f"ids of tokenizer {self.options.tokenizer} (below {self.vocab_size})",
                f"{int(ids.min())}..{int(ids.max())} in {path}",
                "give the --tokenizer that made them",
            )
        # CLS, SEP and PAD are not part of a text.
        ids = ids[~np.isin(ids, self.specials)]
        return str(self.tokenizer.decode(ids)), ids


def _keep_one_dimension(usable: dict[str, list[_Usable]], counts: Counter, source: Path) -> int:
    """Count and remove samples whose latents are not of the dimension of most; return it.

    Raises:
        UserError: no dimension has more than half of the latents.
    """
    sizes = Counter(sample.dim for part in usable.values() for sample in part)
    if not sizes:
        return 0
    ((dim, most),) = sizes.most_common(1)
    if 2 * most <= sizes.total():
        found = join_some((f"{count} of {dim}" for dim, count in sorted(sizes.items())), limit=8)
        raise UserError(
            f"latents of one dimension in {source}",
            found,
            "keep latents of one encoder in one folder",
        )
    counts["drop_latent_of_another_dimension"] += sizes.total() - most
    for split, part in usable.items():
        usable[split] = [sample for sample in part if sample.dim == dim]
    return dim


def _choose(
    usable: dict[str, list[_Usable]], options: PackOptions, counts: Counter
) -> dict[str, list[_Usable]]:
    """Return the samples of both splits; validation never shares a text with train."""
    hashes = {
        split: np.array([content_hash(sample.text) for sample in part], np.uint64)
        for split, part in usable.items()
    }
    chosen = {}
    for split, part in usable.items():
        rows = np.arange(len(part))
        if not options.keep_duplicates:
            rows = select.first_occurrences(hashes[split])
        counts["drop_duplicate"] += len(part) - len(rows)
        if split == "train" and "validation" in usable:
            is_new = ~np.isin(hashes["train"][rows], hashes["validation"])
            counts["drop_in_validation"] += int((~is_new).sum())
            rows = rows[is_new]
        chosen[split] = rows
    if "validation" not in chosen:
        rows = chosen["train"]
        inside = select.in_validation(
            hashes["train"][rows], options.validation_samples, options.seed
        )
        chosen = {"train": rows[~inside], "validation": rows[inside]}
    return {
        split: [usable.get(split, usable["train"])[row] for row in chosen[split].tolist()]
        for split in SPLITS
    }


def _blocks(samples: list[_Usable], latent_shape: tuple[int, ...]) -> Iterator[Block]:
    for start in range(0, len(samples), _BLOCK):
        block = samples[start : start + _BLOCK]
        vectors = [one.sample.read_latent().reshape(latent_shape) for one in block]
        latents = np.stack(vectors).astype(np.float32)
        yield Block([one.text for one in block], [one.ids for one in block], latents)


def _read_manifest(source: Path) -> dict[str, Any]:
    """Read the manifest of a folder that `mmldlm prepare --layout files` wrote; {} for other
    folders.
    """
    path = source / MANIFEST
    if not path.is_file():
        return {}
    manifest = read_json(path, "delete it, or write the folder again")
    return manifest if manifest.get("format") == FILES_FORMAT else {}
