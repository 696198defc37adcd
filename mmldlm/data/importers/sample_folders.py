"""``mmldlm pack DIR``: folders of one file a sample, as MM-LDLM's users have them, become a packed store.

What is read:
  DIR/{train,validation}_data.json         records with latent_path and text or text_path
  DIR/texts/SPLIT/X.txt, DIR/latents/SPLIT/X.npy            pairs by name
  DIR/tokens/SPLIT/X[_tokens].npz, DIR/latents/SPLIT/X.npy  input_ids and attention_mask of the named tokenizer
  DIR/X.npy, DIR/X_tokens.npz              the same in one folder
Latents are taken as they are. Every file is either in the store or counted with the reason why it is not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mmldlm.data.encoders.specs import ENCODERS
from mmldlm.data.importers.folder_layouts import LAYOUTS, SampleFiles, find_samples
from mmldlm.data.prepare import select_stage
from mmldlm.data.prepare import tokenizer as tokenizers
from mmldlm.data.prepare.chunking import truncate
from mmldlm.data.prepare.publish_stage import commit, latents_suffix, refuse_other_folders, versions
from mmldlm.data.prepare.summary import print_summary
from mmldlm.data.sentences import MAX_TEXT_BYTES, content_hash
from mmldlm.data.store.arrays import read_array, read_small_npz
from mmldlm.data.store.latent_statistics import LatentStatistics
from mmldlm.data.store.repair_hints import MANIFEST
from mmldlm.data.store.store import FORMAT, SPLITS, TOKENIZER_FOLDER, VERSION, Store
from mmldlm.data.store.writers import FILES_FORMAT, StoreSplit
from mmldlm.errors import EXIT_DONE, UserError
from mmldlm.utils.atomic_files import list_files, open_regular, write_json
from mmldlm.utils.json_files import read_json
from mmldlm.utils.output_paths import check_writable_dir


@dataclass
class PackOptions:
    """What ``pack`` is asked for; each field is the flag of the same name."""

    source: str
    output_dir: str
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
    """Reads a folder of files and writes a store, which appears whole or not at all.

    Raises:
        UserError: no such layout, no tokenizer for token files, latents without one usual dimension, or nothing usable.
    """
    started = time.perf_counter()
    console = console or Console()
    source, root = Path(options.source), Path(os.path.abspath(options.output_dir))
    refuse_other_folders(root, options.force)
    check_writable_dir(root.parent, "--output-dir")
    counts: Counter = Counter()
    splits = find_samples(source, counts)
    known = _known(source)
    latents_per_text = options.latents_per_text or known.get("latents_per_text", 1)
    has_tokens = any(sample.tokens_path for part in splits.values() for sample in part)
    name = options.tokenizer or (None if has_tokens else "minilm")
    if name is None:
        raise UserError(
            f"--tokenizer NAME: the one whose ids are in {source}", "none", "give it (MM-LDLM's: bert-base-uncased)"
        )
    tokenizer = tokenizers.load(name, options.cache_dir, options.add_mask_token)
    identity = tokenizers.identity(tokenizer, name)
    tokenizer.split_special_tokens = True
    packer = _Packer(options, tokenizer, identity["vocab_size"], counts, latents_per_text)
    texts = {split: packer.look_at(split, samples) for split, samples in splits.items()}
    packer.leave_out_other_dimensions(texts, source)
    hashes = {}
    for split in splits:
        hashes[split] = np.array([content_hash(text) for text, _ in texts[split].values()], np.uint64)
    chosen = _choose(splits, texts, hashes, options, counts)
    for split, rows in chosen.items():
        if len(rows) < 2:
            raise UserError(
                f"at least 2 usable samples for the {split} split in {source}",
                f"{len(rows)}; {dict(counts)}",
                "look at the files that were left out",
            )
    partial = root.with_name(f"{root.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        summaries, statistics = {}, None
        for split, rows in chosen.items():
            writer = StoreSplit(partial, split, packer.latent_shape, identity["vocab_size"])
            seen = LatentStatistics(packer.latent_dim, len(rows) * latents_per_text)
            for block in (rows[start : start + 4096] for start in range(0, len(rows), 4096)):
                pairs = [texts[origin][place] for origin, place in block]
                latents = np.stack([packer.latent(splits[origin][place].latent) for origin, place in block])
                writer.add([text for text, _ in pairs], [ids for _, ids in pairs], latents)
                seen.add(latents)
            summaries[split] = writer.close()
            statistics = seen.result() if split == "train" else statistics
        tokenizer.save_pretrained(partial / TOKENIZER_FOLDER)
        dropped = {key[5:]: value for key, value in sorted(counts.items()) if key.startswith("drop_") and value}
        kept = sum(summary["num_samples"] for summary in summaries.values())
        encoder = known.get("encoder") or {"name": options.encoder or "unknown", "source": "imported"}
        if "normalize" not in encoder:
            norm = statistics["norm"]
            encoder["normalize"] = bool(abs(norm["min"] - 1) < 1e-3 and abs(norm["max"] - 1) < 1e-3)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "latent_dim": packer.latent_dim,
            **latents_suffix(latents_per_text),
            "encoder": encoder,
            "latent_stats": statistics,
            "tokenizer": identity,
            "splits": summaries,
            "corpus": {
                "source": f"files:{source.resolve().name}",
                "read": counts["read"],
                "kept": kept,
                "dropped": dropped,
                **({"truncated": counts["truncated"]} if counts["truncated"] else {}),
                "files": counts["files"],
            },
            "options": {"keep_duplicates": options.keep_duplicates, "seed": options.seed},
            "files": list_files(partial),
            "created_with": versions(),
        }
        assert counts["read"] == kept + sum(dropped.values()), "a sample is not accounted for"
        write_json(partial / MANIFEST, manifest)
        for split in summaries:
            assert len(Store(partial, split)) == summaries[split]["num_samples"]
        commit(partial, root, options.force)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    print_summary(console, root, manifest, time.perf_counter() - started)
    return root


class _Packer:
    """Reads one sample's files; what cannot be used is counted and left out."""

    def __init__(self, options: PackOptions, tokenizer, vocab_size: int, counts: Counter, latents_per_text: int):
        self.options, self.tokenizer, self.vocab_size, self.counts = options, tokenizer, vocab_size, counts
        self.latents_per_text = latents_per_text
        self.latent_dim = 0
        self.places_of_dim: dict[int, list[tuple[str, int]]] = {}
        self.specials = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}

    def look_at(self, split: str, samples: list[SampleFiles]) -> dict[int, tuple[str, np.ndarray]]:
        """Place -> (text, token ids) of the samples whose every part can be used."""
        found = {}
        for place, sample in enumerate(samples):
            self.counts["read"] += 1
            dim, reason = self._look_at_latent(sample.latent)
            text, ids = ("", np.empty(0, np.int64)) if reason else self._text_and_ids(sample)
            if not reason:
                reason = "unreadable_text" if text is None else self._length_reason(ids)
            if reason:
                self.counts[f"drop_{reason}"] += 1
                continue
            limit = self.options.max_tokens
            if limit is not None and len(ids) > limit:
                ids, text = truncate(self.tokenizer, text, limit)
                self.counts["truncated"] += 1
            found[place] = (text, np.asarray(ids, np.int64))
            self.places_of_dim.setdefault(dim, []).append((split, place))
        return found

    def leave_out_other_dimensions(self, texts: dict[str, dict[int, Any]], source: Path) -> None:
        """Settle on the dimension that most latents have; samples of another are counted and taken out of texts.

        Raises:
            UserError: no dimension is that of more than half of them.
        """
        sizes = {dim: len(places) for dim, places in self.places_of_dim.items()}
        if not sizes:
            return
        self.latent_dim = max(sizes, key=sizes.get)
        if 2 * sizes[self.latent_dim] <= sum(sizes.values()):
            found = ", ".join(f"{count} of {dim}" for dim, count in sorted(sizes.items())[:8])
            raise UserError(f"latents of one dimension in {source}", found, "keep latents of one encoder in one folder")
        for dim, places in self.places_of_dim.items():
            for split, place in places if dim != self.latent_dim else ():
                del texts[split][place]
                self.counts["drop_latent_of_another_dimension"] += 1

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Of one sample: [D], or [N, D] with several latents a text."""
        return (self.latent_dim,) if self.latents_per_text == 1 else (self.latents_per_text, self.latent_dim)

    def latent(self, path: Path) -> np.ndarray:
        """[D] or [N, D] float32."""
        return read_array(path).reshape(self.latent_shape).astype(np.float32)

    def _look_at_latent(self, path: Path) -> tuple[int, str | None]:
        """Dimension of a file's latents, and why they cannot be used; None where they can."""
        try:
            vectors = read_array(path)
        except (OSError, ValueError, MemoryError):
            return 0, "unreadable_latent"
        if vectors.dtype.kind != "f":
            return 0, f"latent_of_type_{vectors.dtype.name if vectors.dtype.kind in 'biuc' else 'other'}"
        count = self.latents_per_text
        vectors = vectors[None] if vectors.ndim == 1 else vectors
        if vectors.ndim != 2 or len(vectors) != count or not vectors.shape[1]:
            return 0, "latent_not_one_vector" if count == 1 else f"latent_not_{count}_vectors"
        with np.errstate(over="ignore"):  # of float64; infinities are looked for here
            vectors = vectors.astype(np.float32)
        if not np.isfinite(vectors).all():
            return 0, "latent_not_finite"
        return vectors.shape[1], None if vectors.any(axis=1).all() else "latent_zero"

    def _text_and_ids(self, sample: SampleFiles) -> tuple[str | None, np.ndarray]:
        try:
            if sample.tokens_path is not None:
                ids, mask = map(np.ravel, read_small_npz(sample.tokens_path, "input_ids", "attention_mask"))
                if ids.dtype.kind not in "iu" or mask.dtype.kind not in "biu":
                    return None, np.empty(0, np.int64)
                ids = ids[mask.astype(bool)].astype(np.int64)
                if len(ids) and (ids.min() < 0 or ids.max() >= self.vocab_size):
                    raise UserError(
                        f"ids of tokenizer {self.options.tokenizer} (below {self.vocab_size})",
                        f"{int(ids.min())}..{int(ids.max())} in {sample.tokens_path}",
                        "give the --tokenizer that made them",
                    )
                ids = ids[~np.isin(ids, list(self.specials))]  # CLS, SEP and PAD are no part of a text
                return self.tokenizer.decode(ids), ids
            text = sample.text if sample.text is not None else _read_text(sample.text_path)
        except (OSError, ValueError, IndexError) as error:
            if isinstance(error, UserError):
                raise
            return None, np.empty(0, np.int64)
        text = " ".join(text.split())
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return text, np.asarray(ids, np.int64)

    def _length_reason(self, ids: np.ndarray) -> str | None:
        return "too_short" if len(ids) < max(self.options.min_tokens, 1) else None


def _choose(splits, texts, hashes, options: PackOptions, counts: Counter) -> dict[str, list[tuple[str, int]]]:
    """Split -> (split it came from, place) of what goes into the store; validation never shares a text with train."""
    places = {split: np.array(list(texts[split]), np.int64) for split in splits}
    for split in splits:
        keep = np.arange(len(places[split]))
        if not options.keep_duplicates:
            keep = select_stage.first_occurrences(hashes[split])
        if split == "train" and "validation" in splits:
            keep_in = ~np.isin(hashes["train"][keep], hashes["validation"])
            counts["drop_in_validation"] += int((~keep_in).sum())
            counts["drop_duplicate"] += len(places[split]) - len(keep)
            keep = keep[keep_in]
        else:
            counts["drop_duplicate"] += len(places[split]) - len(keep)
        places[split], hashes[split] = places[split][keep], hashes[split][keep]
    if "validation" in splits:
        return {split: [(split, int(place)) for place in places[split]] for split in SPLITS}
    keys = select_stage.split_keys(hashes["train"], options.seed)
    number = min(select_stage.num_validation(len(keys), options.validation_samples), len(keys))
    inside = keys <= np.sort(keys)[number - 1] if number else np.zeros(0, dtype=bool)
    return {
        "train": [("train", int(place)) for place in places["train"][~inside]],
        "validation": [("train", int(place)) for place in places["train"][inside]],
    }


def _read_text(path: Path) -> str:
    with open_regular(path) as file:
        raw = file.read(MAX_TEXT_BYTES + 1)
    if len(raw) > MAX_TEXT_BYTES:
        raise ValueError(f"{path}: more than {MAX_TEXT_BYTES} bytes")
    return raw.decode("utf-8")


def _known(source: Path) -> dict[str, Any]:
    """The manifest beside a folder that `mmldlm prepare --layout files` wrote."""
    path = source / MANIFEST
    if not path.is_file():
        return {}
    manifest = read_json(path, "delete it, or write the folder again")
    return manifest if manifest.get("format") == FILES_FORMAT else {}


# The command -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``mmldlm pack``."""
    add = parser.add_argument
    add("source", metavar="DIR", help=f"a folder with {LAYOUTS}")
    add("--output-dir", required=True, metavar="STORE", help="the folder of the store; must not exist yet")
    add("--tokenizer", metavar="NAME", help="for token files the one that made them (default for texts: minilm)")
    add("--encoder", choices=sorted(ENCODERS), help="what made the latents, where that is known")
    add("--cache-dir", metavar="DIR", help="where tokenizers from the hub are kept")
    add("--add-mask-token", action="store_true", help="add the special tokens that the tokenizer lacks")
    add("--min-tokens", type=int, default=1, help="shorter texts are dropped (default %(default)s)")
    add("--max-tokens", type=int, help="longer texts are cut (their latents are of the whole texts)")
    add("--validation-samples", type=int, metavar="N", help="where there is no validation split (1000 or 5 %%)")
    add("--keep-duplicates", action="store_true", help="keep texts that differ only in case, spaces or punctuation")
    add(
        "--latents-per-text", type=int, metavar="N", help="vectors in every .npy file (default: 1, or as prepare wrote)"
    )
    add("--seed", type=int, default=0, help="of the split (default %(default)s)")
    add("--force", action="store_true", help="replace an existing store once the new one is whole")


def main(args: argparse.Namespace) -> int:
    """Runs ``mmldlm pack``; returns the exit code."""
    names = PackOptions.__dataclass_fields__
    pack(PackOptions(**{name: value for name, value in vars(args).items() if name in names}))
    return EXIT_DONE
