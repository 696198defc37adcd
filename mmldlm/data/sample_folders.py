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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mmldlm.data.arrays import read_small_npz
from mmldlm.data.encoders.model_files import save_tokenizer
from mmldlm.data.encoders.specs import UNKNOWN_ENCODER
from mmldlm.data.folder_layouts import SampleFiles, find_samples
from mmldlm.data.latents_file import LatentRow, find_rows
from mmldlm.data.manifest import MANIFEST
from mmldlm.data.prepare import select
from mmldlm.data.prepare import tokenizer as tokenizers
from mmldlm.data.prepare.source import account_for, write_split
from mmldlm.data.prepare.summary import print_summary
from mmldlm.data.prepare.tokenize import truncate
from mmldlm.data.prepare.work_dir import check_output_free, finish, latents_suffix, versions
from mmldlm.data.sentences import MAX_TEXT_BYTES, content_hash, fold_spaces
from mmldlm.data.store import FORMAT, SPLITS, TOKENIZER_FOLDER, VERSION
from mmldlm.data.unknown_tokens import check_unknown_share
from mmldlm.data.writers import FILES_FORMAT, Block, LatentStatistics, StoreSplit
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import list_files
from mmldlm.utils.formatting import describe_counts, is_utf8, join_some
from mmldlm.utils.input_files import LeftOut, open_regular
from mmldlm.utils.json_files import read_json
from mmldlm.utils.paths import check_writable_dir, output_root
from mmldlm.utils.screen import open_console

Sample = SampleFiles | LatentRow
_BLOCK = 4096


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
    tokenizer, identity = _load_tokenizer(options, source, samples)
    packer = _Packer(options, tokenizer, identity["vocab_size"], counts, latents_per_text)
    texts = {split: packer.inspect(split, part) for split, part in samples.items()}
    packer.drop_other_dimensions(texts, source)
    chosen = _choose(texts, options, counts)
    for split, rows in chosen.items():
        if len(rows) < 2:
            fix = "check what was dropped"
            if options.validation_samples is not None:
                fix += f", and --validation-samples {options.validation_samples}"
            if options.latents is None:
                fix += (
                    "; texts and latents in one file each are packed with mmldlm pack TEXTS"
                    " --latents FILE"
                )
            raise UserError(
                f"at least 2 usable samples for the {split} split in {source}",
                f"{len(rows)} ({describe_counts(counts)})",
                fix,
            )
    partial = root.with_name(f"{root.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        statistics = LatentStatistics(packer.latent_dim, len(chosen["train"]) * latents_per_text)
        summaries = {}
        for split, rows in chosen.items():
            summary = summaries[split] = write_split(
                StoreSplit(partial, split, packer.latent_shape, identity["vocab_size"]),
                packer.blocks(rows, texts, samples),
                tokenizer.unk_token_id,
                statistics if split == "train" else None,
            )
            warning = check_unknown_share(summary["num_unknown"], summary["num_tokens"], split)
            if warning is not None:
                console.print(f"warning: {warning}", soft_wrap=True)
        latent_stats = statistics.result()
        save_tokenizer(tokenizer, partial / TOKENIZER_FOLDER)
        encoder = prepared.get("encoder") or {
            "name": options.encoder or UNKNOWN_ENCODER,
            "source": "imported",
        }
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "latent_dim": packer.latent_dim,
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
        finish(partial, root, manifest, options.force)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    print_summary(console, root, manifest, time.perf_counter() - started)
    return root


def _find(
    options: PackOptions, counts: Counter, left_out: LeftOut
) -> tuple[dict[str, list[Sample]], int]:
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


def _load_tokenizer(options: PackOptions, source: Path, samples: dict[str, list[Sample]]):
    """Return the tokenizer and its identity."""
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


def _with_normalize(encoder: dict[str, Any], norm: dict[str, float]) -> dict[str, Any]:
    """Return the encoder's entry with `normalize`, measured if it is unknown."""
    is_unit = bool(abs(norm["min"] - 1) < 1e-3 and abs(norm["max"] - 1) < 1e-3)
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


class _Packer:
    """Reader of sample files, which counts and leaves out unusable ones.

    Attributes:
        latent_dim: D, known after `drop_other_dimensions`.
    """

    def __init__(
        self,
        options: PackOptions,
        tokenizer,
        vocab_size: int,
        counts: Counter,
        latents_per_text: int,
    ):
        self.options, self.tokenizer, self.vocab_size = options, tokenizer, vocab_size
        self.counts = counts
        self.latents_per_text = latents_per_text
        self.latent_dim = 0
        self.positions_of_dim: dict[int, list[tuple[str, int]]] = {}
        self.specials = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}

    def inspect(self, split: str, samples: list[Sample]) -> dict[int, tuple[str, np.ndarray]]:
        """Return position -> (text, token ids) of the usable samples."""
        vectors = {}
        for position, sample in enumerate(samples):
            self.counts["read"] += 1
            dim, reason = self._inspect_latent(sample)
            text, ids = ("", np.empty(0, np.int64)) if reason else self._text_and_ids(sample)
            if not reason:
                is_short = len(ids) < max(self.options.min_tokens, 1)
                reason = "unreadable_text" if text is None else "too_short" if is_short else None
            if reason:
                self.counts[f"drop_{reason}"] += 1
                continue
            limit = self.options.max_tokens
            if limit is not None and len(ids) > limit:
                ids, text = truncate(self.tokenizer, text, limit)
                if len(ids) < max(self.options.min_tokens, 1):
                    self.counts["drop_too_short"] += 1
                    continue
                self.counts["truncated"] += 1
            vectors[position] = (text, np.asarray(ids, np.int64))
            self.positions_of_dim.setdefault(dim, []).append((split, position))
        return vectors

    def drop_other_dimensions(self, texts: dict[str, dict[int, Any]], source: Path) -> None:
        """Choose the dimension of most latents; count samples of other dimensions and remove them
        from `texts`.

        Raises:
            UserError: no dimension has more than half of the latents.
        """
        sizes = {dim: len(positions) for dim, positions in self.positions_of_dim.items()}
        if not sizes:
            return
        self.latent_dim = max(sizes, key=sizes.get)
        if 2 * sizes[self.latent_dim] <= sum(sizes.values()):
            found = join_some(
                (f"{count} of {dim}" for dim, count in sorted(sizes.items())), limit=8
            )
            raise UserError(
                f"latents of one dimension in {source}",
                found,
                "keep latents of one encoder in one folder",
            )
        for dim, positions in self.positions_of_dim.items():
            for split, position in positions if dim != self.latent_dim else ():
                del texts[split][position]
                self.counts["drop_latent_of_another_dimension"] += 1

    def blocks(
        self,
        rows: list[tuple[str, int]],
        texts: dict[str, dict[int, tuple[str, np.ndarray]]],
        samples: dict[str, list[Sample]],
    ) -> Iterator[Block]:
        """Yield the samples of a split, given by (original split, position)."""
        for block in (rows[start : start + _BLOCK] for start in range(0, len(rows), _BLOCK)):
            pairs = [texts[origin][position] for origin, position in block]
            vectors = [
                samples[origin][position].read_latent().reshape(self.latent_shape)
                for origin, position in block
            ]
            latents = np.stack(vectors).astype(np.float32)
            yield Block([text for text, _ in pairs], [ids for _, ids in pairs], latents)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """The shape of a sample's latents: [D], or [K, D] with several latents per text."""
        return (
            (self.latent_dim,)
            if self.latents_per_text == 1
            else (self.latents_per_text, self.latent_dim)
        )

    def _inspect_latent(self, sample: Sample) -> tuple[int, str | None]:
        """Return the dimension of a sample's latents, and the reason why they are unusable,
        or None.
        """
        try:
            vectors = sample.read_latent()
        except (OSError, ValueError, MemoryError):
            return 0, "unreadable_latent"
        if vectors.dtype.kind != "f":
            kind = vectors.dtype.name if vectors.dtype.kind in "biuc" else "other"
            return 0, f"latent_of_type_{kind}"
        count = self.latents_per_text
        vectors = vectors[None] if vectors.ndim == 1 else vectors
        if vectors.ndim != 2 or len(vectors) != count or not vectors.shape[1]:
            return 0, "latent_not_one_vector" if count == 1 else f"latent_not_{count}_vectors"
        with np.errstate(over="ignore"):
            # float64 may overflow float32; infinities are checked next.
            vectors = vectors.astype(np.float32)
        if not np.isfinite(vectors).all():
            return 0, "latent_not_finite"
        return vectors.shape[1], None if vectors.any(axis=1).all() else "latent_zero"

    def _text_and_ids(self, sample: Sample) -> tuple[str | None, np.ndarray]:
        try:
            if isinstance(sample, LatentRow):
                text = sample.text
            elif sample.tokens_path is not None:
                ids, mask = map(
                    np.ravel, read_small_npz(sample.tokens_path, "input_ids", "attention_mask")
                )
                if ids.dtype.kind not in "iu" or mask.dtype.kind not in "biu":
                    return None, np.empty(0, np.int64)
                ids = ids[mask.astype(bool)].astype(np.int64)
                if len(ids) and (ids.min() < 0 or ids.max() >= self.vocab_size):
                    raise UserError(
                        f"ids of tokenizer {self.options.tokenizer} (below {self.vocab_size})",
                        f"{int(ids.min())}..{int(ids.max())} in {sample.tokens_path}",
                        "give the --tokenizer that made them",
                    )
                # CLS, SEP and PAD are not part of a text.
                ids = ids[~np.isin(ids, list(self.specials))]
                return self.tokenizer.decode(ids), ids
            else:
                text = sample.text if sample.text is not None else _read_text(sample.text_path)
        except (OSError, ValueError, IndexError) as error:
            if isinstance(error, UserError) and not isinstance(error, OSError):
                raise
            return None, np.empty(0, np.int64)
        if not is_utf8(text):
            # Broken escapes in JSON decode to lone surrogates.
            return None, np.empty(0, np.int64)
        text = fold_spaces(text)
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return text, np.asarray(ids, np.int64)


def _choose(
    texts: dict[str, dict[int, tuple[str, np.ndarray]]], options: PackOptions, counts: Counter
) -> dict[str, list[tuple[str, int]]]:
    """Map each split to the (original split, position) of its samples; validation never shares a
    text with train.
    """
    positions = {split: np.array(list(part), np.int64) for split, part in texts.items()}
    hashes = {
        split: np.array([content_hash(text) for text, _ in part.values()], np.uint64)
        for split, part in texts.items()
    }
    for split in texts:
        keep = np.arange(len(positions[split]))
        if not options.keep_duplicates:
            keep = select.first_occurrences(hashes[split])
        counts["drop_duplicate"] += len(positions[split]) - len(keep)
        if split == "train" and "validation" in texts:
            is_new = ~np.isin(hashes["train"][keep], hashes["validation"])
            counts["drop_in_validation"] += int((~is_new).sum())
            keep = keep[is_new]
        positions[split], hashes[split] = positions[split][keep], hashes[split][keep]
    if "validation" in texts:
        return {
            split: [(split, int(position)) for position in positions[split]] for split in SPLITS
        }
    inside = select.in_validation(hashes["train"], options.validation_samples, options.seed)
    return {
        "train": [("train", int(position)) for position in positions["train"][~inside]],
        "validation": [("train", int(position)) for position in positions["train"][inside]],
    }


def _read_text(path: Path) -> str:
    with open_regular(path) as file:
        raw = file.read(MAX_TEXT_BYTES + 1)
    if len(raw) > MAX_TEXT_BYTES:
        raise ValueError(f"{path}: more than {MAX_TEXT_BYTES} bytes")
    return raw.decode("utf-8")


def _read_manifest(source: Path) -> dict[str, Any]:
    """Read the manifest of a folder that `mmldlm prepare --layout files` wrote; {} for other
    folders.
    """
    path = source / MANIFEST
    if not path.is_file():
        return {}
    manifest = read_json(path, "delete it, or write the folder again")
    return manifest if manifest.get("format") == FILES_FORMAT else {}
