"""``mmldlm prepare``: a corpus becomes a packed store of texts, tokens and latents."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import mmldlm
from mmldlm.data import tokenizers
from mmldlm.data.checksum import sha256_of
from mmldlm.data.corpora import DEFAULT_CORPUS, Corpus, open_corpus
from mmldlm.data.encoders import ENCODERS, Encoder
from mmldlm.data.store import FORMAT, MANIFEST, TOKENIZER_FOLDER, VERSION, Store, check_latents
from mmldlm.data.text import content_hash
from mmldlm.errors import EXIT_DONE, UserError

_TOKENIZE_CHUNK = 4096
_ENCODE_CHUNK = 4096


@dataclass
class PrepareOptions:
    """What ``prepare`` is asked for; each field is the flag of the same name."""

    output_dir: str
    corpus: str = DEFAULT_CORPUS
    validation_corpus: str | None = None
    encoder: str = "minilm"
    tokenizer: str = "minilm"
    cache_dir: str | None = None
    vocab_size: int = 8192
    add_mask_token: bool = False
    text_field: str = "text"
    max_samples: int | None = None
    validation_samples: int | None = None
    min_tokens: int = 3
    max_tokens: int = 62
    overlong: str = "drop"
    keep_duplicates: bool = False
    batch_tokens: int | None = None
    seed: int = 0
    force: bool = False


@dataclass
class Samples:
    """The texts of one split in corpus order, with their content hashes and token ids."""

    texts: list[str]
    hashes: list[int]
    tokens: list[np.ndarray]


def prepare(options: PrepareOptions, console: Console | None = None) -> Path:
    """Reads, filters, tokenizes, splits, encodes and writes; the store appears whole or not at all.

    Returns:
        The folder of the store.

    Raises:
        UserError: bad options, a missing or empty corpus, an output folder that exists, weights or a tokenizer that
            cannot be had, or latents that are not finite or zero.
    """
    console = console or Console()
    started = time.perf_counter()
    root = _check_options(options)
    corpus = open_corpus(options.corpus, options.text_field)
    held_out = open_corpus(options.validation_corpus, options.text_field) if options.validation_corpus else None
    encoder = Encoder(options.encoder, options.batch_tokens)
    counts: Counter = Counter()

    with console.status(f"reading {corpus.source}"):
        texts, hashes = _read(corpus, options, counts)
    console.print(f"read {counts['read']:,} texts of {corpus.source}, {len(texts):,} different", soft_wrap=True)
    validation_texts: list[str] = []
    validation_hashes: list[int] = []
    if held_out is not None:
        validation_texts, validation_hashes = _read(held_out, options, validation_counts := Counter())
        held = set(validation_hashes)
        kept = [row for row, hash_ in enumerate(hashes) if hash_ not in held]
        counts["drop_in_validation_corpus"] = len(hashes) - len(kept)
        texts, hashes = [texts[row] for row in kept], [hashes[row] for row in kept]

    # The texts whose split hash is smallest become validation, so a tokenizer must not be trained on them.
    num_reserved = 0 if held_out else 2 * _num_validation(len(texts), options)
    reserved = set(sorted(_split_keys(hashes, options.seed))[:num_reserved])
    tokenizer = tokenizers.load(
        options.tokenizer,
        options.cache_dir,
        options.add_mask_token,
        texts=(text for text, key in zip(texts, _split_keys(hashes, options.seed)) if key not in reserved),
        vocab_size=options.vocab_size,
    )
    tokenizer_identity = tokenizers.identity(tokenizer, options.tokenizer)

    samples = _tokenize(texts, hashes, tokenizer, options, counts, options.max_samples)
    del texts, hashes
    if held_out is not None:
        limit = options.validation_samples
        validation = _tokenize(validation_texts, validation_hashes, tokenizer, options, validation_counts, limit)
        held = set(validation.hashes)  # again: truncation can make texts equal that were not
        kept = [row for row, hash_ in enumerate(samples.hashes) if hash_ not in held]
        counts["drop_in_validation_corpus"] += len(samples.texts) - len(kept)
        samples = _take(samples, kept)
        splits = {"train": samples, "validation": validation}
    else:
        splits = _split(samples, options)
    for name, part in splits.items():
        if len(part.texts) < 2:
            dropped = {key: value for key, value in counts.items() if key.startswith("drop_")}
            raise UserError(
                f"at least 2 samples for the {name} split",
                f"{len(part.texts)} left of {counts['read']} texts read ({dropped or 'nothing dropped'})",
                "give a larger corpus, or loosen --min-tokens, --max-tokens, --max-samples or --validation-samples",
            )
    _assert_disjoint(splits)

    partial = root.with_name(f"{root.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        statistics = _write_splits(partial, splits, encoder, tokenizer_identity["vocab_size"], console)
        tokenizer.save_pretrained(partial / TOKENIZER_FOLDER)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "latent_dim": encoder.latent_dim,
            "encoder": encoder.identity(),
            "latent_stats": statistics,
            "tokenizer": tokenizer_identity,
            "splits": {name: _split_summary(part) for name, part in splits.items()},
            "corpus": {"source": corpus.source, **_counted(counts, samples)},
            "options": {key: value for key, value in asdict(options).items() if key not in ("output_dir", "force")},
            "files": _list_files(partial),
            "created_with": _versions(),
        }
        for key in ("corpus", "validation_corpus", "cache_dir", "tokenizer"):
            value = manifest["options"][key]
            if value and Path(value).exists():  # where it lay on this machine says nothing about the data
                manifest["options"][key] = Path(value).resolve().name
        if held_out is not None:
            manifest["validation_corpus"] = {
                "source": held_out.source,
                **_counted(validation_counts, splits["validation"]),
            }
        _write_synced(partial / MANIFEST, json.dumps(manifest, indent=1).encode())
        for name in splits:  # what was written opens, and says what was meant
            assert len(Store(partial, name)) == len(splits[name].texts)
        _commit(partial, root, options.force)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _print_summary(console, root, manifest, time.perf_counter() - started)
    return root


def _check_options(options: PrepareOptions) -> Path:
    root = Path(os.path.abspath(options.output_dir))
    if root.exists() and not options.force and (not root.is_dir() or any(root.iterdir())):
        raise UserError(
            f"an --output-dir that does not exist yet: {root}",
            "something is there already",
            "choose another folder, or add --force to replace it once the new store is whole",
        )
    if root.is_dir() and options.force and any(root.iterdir()) and not (root / MANIFEST).is_file():
        raise UserError(
            f"a store to replace at {root}",
            f"a folder with other things in it (no {MANIFEST})",
            "choose another --output-dir; --force only replaces stores",
        )
    if options.encoder not in ENCODERS:
        raise UserError(f"--encoder among: {', '.join(ENCODERS)}", options.encoder, "choose one of these encoders")
    if not 1 <= options.min_tokens <= options.max_tokens:
        raise UserError(
            "1 <= --min-tokens <= --max-tokens", f"{options.min_tokens} and {options.max_tokens}", "change one of them"
        )
    if options.overlong not in ("drop", "truncate"):
        raise UserError("--overlong drop or truncate", options.overlong, "choose one of the two")
    for name in ("max_samples", "validation_samples", "batch_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} of at least 1", str(value), "give a positive number")
    return root


def _read(corpus: Corpus, options: PrepareOptions, counts: Counter) -> tuple[list[str], list[int]]:
    """Different texts and their content hashes, in corpus order."""
    texts: list[str] = []
    hashes: list[int] = []
    seen: set[int] = set()
    for text in corpus:
        hash_ = content_hash(text)
        if hash_ in seen and not options.keep_duplicates:
            counts["drop_duplicate"] += 1
            continue
        seen.add(hash_)
        texts.append(text)
        hashes.append(hash_)
    counts.update(corpus.counts)
    if not texts:
        raise UserError(
            f"texts in {corpus.source}",
            f"none kept of {counts['read']} read: {dict(counts)}" if counts["read"] else "none (the corpus is empty)",
            f"check the file, or use the default corpus '{DEFAULT_CORPUS}'",
        )
    return texts, hashes


def _mixed(values: Sequence[int], salt: int) -> np.ndarray:
    """uint64 keys that order texts at random, as a function of content and salt (the SplitMix64 finaliser)."""
    key = np.asarray(values, dtype=np.uint64) + np.uint64((salt * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64)
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))


def _split_keys(hashes: Sequence[int], seed: int) -> list[int]:
    return _mixed(hashes, 2 * seed).tolist()


def _sample_keys(hashes: Sequence[int], seed: int) -> np.ndarray:
    return _mixed(hashes, 2 * seed + 1)


def _tokenize(
    texts: list[str], hashes: list[int], tokenizer, options: PrepareOptions, counts: Counter, limit: int | None
) -> Samples:
    """Samples of an allowed length in corpus order; with a limit, the first ``limit`` of them in hash order."""
    order = np.arange(len(texts)) if limit is None else np.argsort(_sample_keys(hashes, options.seed), kind="stable")
    kept: list[tuple[int, np.ndarray]] = []
    num_seen = 0
    for chunk in _chunks(order, _TOKENIZE_CHUNK):
        encoded = tokenizer(
            [texts[row] for row in chunk],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        for row, ids in zip(chunk, encoded):
            num_seen += 1
            if len(ids) < options.min_tokens:
                counts["drop_too_short"] += 1
                continue
            if len(ids) > options.max_tokens:
                if options.overlong == "drop":
                    counts["drop_too_long"] += 1
                    continue
                # The stored text is the encoder's input too, so it must be cut where the tokens are.
                ids, texts[row] = _truncate(tokenizer, texts[row], options.max_tokens)
                counts["truncated"] += 1
            kept.append((int(row), np.asarray(ids, dtype=np.int64)))
            if limit is not None and len(kept) == limit:
                break
        if limit is not None and len(kept) == limit:
            break
    if num_seen < len(texts):
        counts["drop_not_sampled"] += len(texts) - num_seen
    kept.sort(key=lambda item: item[0])
    rows = [row for row, _ in kept]
    new_hashes = [content_hash(texts[row]) for row in rows] if counts["truncated"] else [hashes[row] for row in rows]
    samples = Samples([texts[row] for row in rows], new_hashes, [ids for _, ids in kept])
    return _without_repeats(samples, counts) if counts["truncated"] and not options.keep_duplicates else samples


def _truncate(tokenizer, text: str, max_tokens: int) -> tuple[list[int], str]:
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    cut = text[: encoding["offset_mapping"][max_tokens - 1][1]].rstrip()
    return encoding["input_ids"][:max_tokens], cut


def _without_repeats(samples: Samples, counts: Counter) -> Samples:
    """Texts that only differed after the cut are one text now."""
    first: dict[int, int] = {}
    for row, hash_ in enumerate(samples.hashes):
        first.setdefault(hash_, row)
    counts["drop_duplicate"] += len(samples.texts) - len(first)
    return _take(samples, list(first.values()))


def _take(samples: Samples, rows: Sequence[int]) -> Samples:
    return Samples(*([column[row] for row in rows] for column in (samples.texts, samples.hashes, samples.tokens)))


def _num_validation(num_texts: int, options: PrepareOptions) -> int:
    if options.validation_samples is not None:
        return options.validation_samples
    return max(2, min(1000, num_texts // 20))


def _split(samples: Samples, options: PrepareOptions) -> dict[str, Samples]:
    """The smallest split keys are validation; equal texts have equal keys, so they never part."""
    keys = _split_keys(samples.hashes, options.seed)
    wanted = _num_validation(len(keys), options)
    bound = sorted(keys)[wanted - 1] if wanted <= len(keys) else 2**64
    chosen = [key <= bound for key in keys]
    return {
        "train": _take(samples, [row for row, inside in enumerate(chosen) if not inside]),
        "validation": _take(samples, [row for row, inside in enumerate(chosen) if inside]),
    }


def _assert_disjoint(splits: dict[str, Samples]) -> None:
    assert not set(splits["train"].hashes) & set(splits["validation"].hashes), "a text lies in both splits"


# Writing ---------------------------------------------------------------------------------------------------------


def _chunks(rows: Sequence, size: int) -> Iterator[Sequence]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _write_splits(
    partial: Path, splits: dict[str, Samples], encoder: Encoder, vocab_size: int, console: Console
) -> dict[str, Any]:
    total = sum(len(part.texts) for part in splits.values())
    statistics = LatentStatistics(encoder.latent_dim)
    with _Progress(console, total, f"encoding with {encoder.name}") as progress:
        for name, part in splits.items():
            folder = partial / name
            folder.mkdir()
            raw = [text.encode("utf-8") for text in part.texts]
            _save(folder / "text_offsets.npy", _offsets([len(text) for text in raw]))
            _save(folder / "text.npy", np.frombuffer(b"".join(raw), dtype=np.uint8))
            dtype = np.uint16 if vocab_size <= 2**16 else np.int32
            flat = np.concatenate(part.tokens)
            assert 0 <= flat.min() and flat.max() < vocab_size <= np.iinfo(dtype).max + 1
            _save(folder / "token_offsets.npy", _offsets([len(ids) for ids in part.tokens]))
            _save(folder / "tokens.npy", flat.astype(dtype))
            latents = np.lib.format.open_memmap(
                folder / "latents.npy", mode="w+", dtype=np.float32, shape=(len(raw), encoder.latent_dim)
            )
            for start in range(0, len(raw), _ENCODE_CHUNK):
                block = encoder.encode(part.texts[start : start + _ENCODE_CHUNK], progress)
                where = f"what {encoder.name} made of the {name} texts, counted from text {start}"
                check_latents(block, where, encoder.latent_dim)
                latents[start : start + len(block)] = block
                if name == "train":
                    statistics.add(block)
            latents.flush()
            del latents
            _sync(folder / "latents.npy")
    return statistics.result()


class LatentStatistics:
    """Mean, standard deviation, norms and effective rank of latents seen block by block, summed in float64."""

    def __init__(self, latent_dim: int):
        self._num, self._sum = 0, np.zeros(latent_dim)
        self._products = np.zeros((latent_dim, latent_dim))
        self._norms = [np.inf, 0.0, 0.0]

    def add(self, latents: np.ndarray) -> None:
        """Counts a block ``[N, D]`` in."""
        block = latents.astype(np.float64)
        norms = np.linalg.norm(block, axis=1)
        self._num += len(block)
        self._sum += block.sum(0)
        self._products += block.T @ block
        low, total, high = self._norms
        self._norms = [min(low, norms.min()), total + norms.sum(), max(high, norms.max())]

    def result(self) -> dict[str, Any]:
        """The manifest's ``latent_stats``. Effective rank: exp of the entropy of the covariance's normalised
        eigenvalues (Roy and Vetterli, 2007).
        """
        mean = self._sum / self._num
        covariance = self._products / self._num - np.outer(mean, mean)
        eigenvalues = np.clip(np.linalg.eigvalsh(covariance), 0, None)
        total = eigenvalues.sum()
        share = eigenvalues[eigenvalues > 0] / total if total > 0 else np.ones(1)
        return {
            "mean": mean.tolist(),
            "std": np.sqrt(np.clip(np.diag(covariance), 0, None)).tolist(),
            "num_samples": self._num,
            "norm": {"min": self._norms[0], "mean": self._norms[1] / self._num, "max": self._norms[2]},
            "effective_rank": float(np.exp(-(share * np.log(share)).sum())),
        }


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _save(path: Path, array: np.ndarray) -> None:
    with open(path, "wb") as file:
        np.save(file, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _list_files(partial: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    return {
        path.relative_to(partial).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in files
    }


def _commit(partial: Path, root: Path, force: bool) -> None:
    for folder in (*(path for path in partial.rglob("*") if path.is_dir()), partial):
        _sync(folder)
    old = root.with_name(f"{root.name}.old-{os.getpid()}")
    if root.is_dir() and not any(root.iterdir()):
        root.rmdir()
    if root.exists() and not force:
        raise UserError(f"no folder yet at {root}", "another one appeared meanwhile", "choose another --output-dir")
    if root.exists():
        root.rename(old)
    partial.rename(root)
    _sync(root.parent)
    shutil.rmtree(old, ignore_errors=True)


# Reporting -------------------------------------------------------------------------------------------------------


class _Progress:
    """A bar with sentences/s and ETA on a terminal; elsewhere a plain line every ten seconds."""

    def __init__(self, console: Console, total: int, what: str):
        self._console, self._total, self._what = console, total, what
        self._done, self._started, self._printed = 0, time.perf_counter(), time.perf_counter()
        self._bar = None

    def __enter__(self):
        if self._console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]:.0f} sentences/s"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task(self._what, total=self._total, rate=0.0)
            self._bar.start()
        return self

    def __call__(self, num_done: int) -> None:
        self._done += num_done
        now = time.perf_counter()
        rate = self._done / max(now - self._started, 1e-9)
        if self._bar is not None:
            self._bar.update(self._task, advance=num_done, rate=rate)
        elif now - self._printed >= 10:
            self._printed = now
            left = (self._total - self._done) / rate
            self._console.print(
                f"{self._what}: {self._done:,} of {self._total:,}, {rate:.0f} sentences/s, {left:.0f} s left"
            )

    def __exit__(self, *_):
        if self._bar is not None:
            self._bar.stop()


def _counted(counts: Counter, samples: Samples) -> dict[str, Any]:
    kinds = {key: counts[key] for key in ("files", "files_unreadable", "truncated") if counts[key]}
    dropped = {key[5:]: value for key, value in sorted(counts.items()) if key.startswith("drop_") and value}
    return {"read": counts["read"], "kept": len(samples.texts), "dropped": dropped, **kinds}


def _split_summary(samples: Samples) -> dict[str, int]:
    lengths = [len(ids) for ids in samples.tokens]
    return {"num_samples": len(lengths), "num_tokens": sum(lengths), "max_tokens": max(lengths)}


def _versions() -> dict[str, str]:
    packages = ("torch", "transformers", "tokenizers", "numpy")
    return {
        "mmldlm": mmldlm.__version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def _print_summary(console: Console, root: Path, manifest: dict[str, Any], seconds: float) -> None:
    table = Table(title=f"store {root}", show_header=False)
    corpus, statistics = manifest["corpus"], manifest["latent_stats"]
    table.add_row("corpus", corpus["source"])
    table.add_row("texts read", f"{corpus['read']:,}")
    for reason, number in corpus["dropped"].items():
        table.add_row(f"  dropped: {reason.replace('_', ' ')}", f"{number:,}")
    table.add_row("kept", f"{corpus['kept']:,}")
    if corpus.get("truncated"):
        table.add_row("  of them truncated", f"{corpus['truncated']:,}")
    for name, split in manifest["splits"].items():
        lengths = f"mean {split['num_tokens'] / split['num_samples']:.1f}, max {split['max_tokens']}"
        table.add_row(name, f"{split['num_samples']:,} samples, {split['num_tokens']:,} tokens ({lengths})")
    table.add_row("tokenizer", f"{manifest['tokenizer']['key']}, {manifest['tokenizer']['vocab_size']:,} tokens")
    norm = statistics["norm"]
    encoder = manifest["encoder"]
    table.add_row("latents", f"{encoder['name']} ({encoder['source']}), {manifest['latent_dim']} dimensions")
    table.add_row("  norm", f"{norm['mean']:.4f} ({norm['min']:.4f} to {norm['max']:.4f})")
    table.add_row("  effective rank", f"{statistics['effective_rank']:.1f} of {manifest['latent_dim']}")
    table.add_row("size", f"{sum(entry['bytes'] for entry in manifest['files'].values()) / 2**20:.1f} MiB")
    table.add_row("time", f"{seconds:.0f} s")
    console.print(table)
    console.print(f"next: mmldlm config --config-name quickstart data.latent_data_root={root}", soft_wrap=True)


# The command -----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``mmldlm prepare``."""
    add = parser.add_argument
    add(
        "corpus",
        nargs="?",
        default=DEFAULT_CORPUS,
        metavar="CORPUS",
        help=".txt (one sentence a line), .jsonl, a folder of .txt, or 'docstrings' (default; needs no download)",
    )
    add("--output-dir", required=True, metavar="DIR", help="the folder of the store; must not exist yet")
    add("--validation-corpus", metavar="PATH", help="take validation from here instead of holding out training texts")
    add("--encoder", "--latent-model", default="minilm", help=f"one of: {', '.join(ENCODERS)}")
    add(
        "--tokenizer",
        default="minilm",
        metavar="NAME",
        help="an encoder's name (its own tokenizer), a Hugging Face name or folder, or 'train'",
    )
    add("--cache-dir", metavar="DIR", help="where tokenizers from the hub are kept")
    add("--vocab-size", type=int, default=8192, help="vocabulary of --tokenizer train (default %(default)s)")
    add("--add-mask-token", action="store_true", help="add the special tokens that the tokenizer lacks")
    add("--text-field", default="text", help="the field of .jsonl objects (default %(default)s)")
    add("--max-samples", type=int, metavar="N", help="keep N texts, chosen by a hash of their content")
    add("--validation-samples", type=int, metavar="N", help="default: 1000 or 5 %%, whichever is smaller")
    add("--min-tokens", type=int, default=3, help="shorter texts are dropped (default %(default)s)")
    add("--max-tokens", type=int, default=62, help="without the closing EOS (default %(default)s)")
    add("--overlong", choices=("drop", "truncate"), default="drop", help="what to do with longer texts")
    add("--keep-duplicates", action="store_true", help="keep texts that differ only in case, spaces or punctuation")
    add("--batch-tokens", type=int, help="padded tokens in one encoder pass (default 1024, on a GPU 65536)")
    add("--seed", type=int, default=0, help="of the sample and the split (default %(default)s)")
    add("--force", action="store_true", help="replace an existing store once the new one is whole")


def main(args: argparse.Namespace) -> int:
    """Runs ``mmldlm prepare``; returns the exit code."""
    names = PrepareOptions.__dataclass_fields__
    prepare(PrepareOptions(**{name: value for name, value in vars(args).items() if name in names}))
    return EXIT_DONE
