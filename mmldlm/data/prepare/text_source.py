"""Samples of texts, whose latents a sentence encoder makes of them.

read -> deduplicate -> tokenize -> split -> encode. Reading, tokenizing and encoding are cut into
tasks that ranks claim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mmldlm.data.corpora.text_corpus import Corpus, check_text_field, open_corpus
from mmldlm.data.encoders.encoder import Encoder, usable_dtype
from mmldlm.data.prepare import encode, select, tokenize
from mmldlm.data.prepare.encode import device_of_rank
from mmldlm.data.prepare.inputs import FileIdentities, encoder_inputs
from mmldlm.data.prepare.options import PrepareOptions, check_options
from mmldlm.data.prepare.read import SelectedTexts, TextShards, read_unit
from mmldlm.data.prepare.select import Samples
from mmldlm.data.prepare.source import CorpusReport, Source
from mmldlm.data.prepare.summary import RankProgress
from mmldlm.data.prepare.task_queue import TaskQueue
from mmldlm.data.prepare.tokenizer import TRAIN, WORDS
from mmldlm.data.store import FORMAT
from mmldlm.data.unknown_tokens import check_unknown_to_encoder
from mmldlm.data.writers import FILES_FORMAT, Block, FilesSplit, StoreSplit
from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_counts
from mmldlm.utils.input_files import LeftOut
from mmldlm.utils.validation import not_none

# Counter that rank 0 sets for the other ranks.
_REACH = "tokens of a text that the encoder reads"
_SAMPLES_OF_A_CHECK = 2048


class TextSource(Source):
    """Texts of one or more corpora, and their sentence encoder."""

    options: PrepareOptions
    reports: dict[str, CorpusReport]
    samples: dict[str, Samples]

    def __init__(self, options: PrepareOptions, queue: TaskQueue, console: Console):
        super().__init__(options, check_options(options), queue, console)

        def open_named(name: str) -> Corpus:
            return open_corpus(
                name,
                options.text_field,
                options.max_documents,
                options.sentences,
                options.whole_files,
            )

        self.corpora = {"train": [open_named(n) for n in options.datasets or [options.corpus]]}
        if options.validation_corpus:
            self.corpora["validation"] = [open_named(options.validation_corpus)]
        check_text_field(options.text_field, self._all_corpora())
        if options.overlong is None:
            has_documents = any(corpus.has_documents for corpus in self.corpora["train"])
            options = replace(options, overlong="chunk" if has_documents else "drop")
        self.options = options
        self.reports = {}
        self.format = FORMAT if options.layout == "store" else FILES_FORMAT
        self.encoder: Encoder | None = None

    @property
    def tokenizer_name(self) -> str:
        return self.options.tokenizer

    def _all_corpora(self) -> list[Corpus]:
        return [corpus for part in self.corpora.values() for corpus in part]

    def plan(self) -> dict[str, Any]:
        return {
            "shards": [tokenize.TEXTS_PER_SHARD, encode.SAMPLES_PER_SHARD],
            "corpus": {
                name: [
                    f"{corpus.source} {unit.name}"
                    for corpus in self.corpora.get(name, [])
                    for unit in corpus.units
                ]
                for name in ("train", "validation")
            },
        }

    def files(self) -> list[tuple[str, Path]]:
        return [file for corpus in self._all_corpora() for file in corpus.files.items()]

    def versions(self) -> dict[str, str]:
        return {
            name: version
            for corpus in self._all_corpora()
            for name, version in corpus.versions.items()
        }

    def encoder_inputs(self, identities: FileIdentities) -> dict[str, str]:
        options = self.options
        dtype = usable_dtype(options.dtype, device_of_rank(self.queue.local_rank))
        return encoder_inputs(options.encoder, options.cache_dir, dtype, identities)

    def load_encoder(self) -> None:
        if self.encoder is None:
            device = device_of_rank(self.queue.local_rank)
            self.encoder = Encoder(
                self.options.encoder, device=device, **self.options.encoder_options()
            )
            if self.queue.rank == 0:
                self.queue.add(_REACH, self._check_reach(self.encoder))

    def _check_reach(self, encoder: Encoder) -> int:
        """Return the tokens of a text that the encoder reads.

        Raises:
            UserError: --max-tokens allows more, so that the latents of long texts would not say
                how they end.
        """
        options, reach = self.options, encoder.max_text_tokens
        if options.max_tokens <= reach or options.latents_per_text > 1:
            return reach
        if options.overlong == "chunk":
            self.console.print(
                f"pieces of at most {reach} tokens, all that encoder {encoder.name} reads",
                soft_wrap=True,
            )
            return reach
        # The default was not chosen for this encoder: texts that are cut are counted, with a
        # warning.
        if options.max_tokens == PrepareOptions.max_tokens:
            return reach
        raise UserError(
            f"--max-tokens of at most {reach}: encoder {encoder.name} reads"
            f" {encoder.max_length} tokens of a text, special ones and prefix included",
            f"--max-tokens {options.max_tokens} --overlong {options.overlong}",
            f"give --max-tokens {reach}, cut longer texts into pieces with --overlong chunk,"
            " or choose an encoder that reads more",
        )

    def read(self) -> None:
        self.texts = {name: self._read(name, part) for name, part in self.corpora.items()}
        left_out = LeftOut().update(corpus.left_out for corpus in self._all_corpora())
        for name, texts in self.texts.items():
            source = "+".join(corpus.source for corpus in self.corpora[name])
            self.reports[name] = CorpusReport(source, Counter(texts.counts))
        self.reports["train"].left_out = left_out

    def _read(self, name: str, corpora: list[Corpus]) -> TextShards:
        units = [unit for corpus in corpora for unit in corpus.units]
        with self.console.status(f"reading {name}"):
            paths = self.work.run(
                f"read-{name}", len(units), lambda i, path: read_unit(units[i], path)
            )
        texts = TextShards(paths)
        if not len(texts):
            counts = texts.counts
            raise UserError(
                f"texts in {'+'.join(corpus.source for corpus in corpora)}",
                (
                    f"none kept: {describe_counts(counts)}"
                    if counts["read"]
                    else "none (the corpus is empty)"
                ),
                "check the file, or use the default corpus 'docstrings'",
            )
        self.console.print(f"read {texts.counts['read']:,} texts ({name})", soft_wrap=True)
        return texts

    def select(self) -> None:
        # An earlier preparation of this process may have had shards of the same paths.
        tokenize.read_shard.cache_clear()
        options, train = self.options, self.texts["train"]
        held = self.texts.get("validation")
        rows = self._deduplicate("train", None if held is None else held.hashes)
        last_key = None if held is not None else self._last_reserved_key(train.hashes[rows])
        self.queue.rank_0_first("tokenizer", lambda: self._make_tokenizer(train, rows, last_key))
        self.tokenizer = self.read_tokenizer()
        samples = self._tokenize("train", rows, options.max_samples)
        if held is None:
            inside = self._in_validation(samples, last_key)
            samples, validation = samples.take(~inside), samples.take(inside)
            reason = "drop_in_validation"
        else:
            held_rows = self._deduplicate("validation", None)
            validation = self._tokenize("validation", held_rows, options.validation_samples)
            reason = "drop_in_validation_corpus"
        # Cuts can make texts equal that were different.
        remaining = samples.take(~np.isin(samples.hashes, validation.hashes))
        self.reports["train"].counts[reason] += len(samples) - len(remaining)
        self.samples = {"train": remaining, "validation": validation}
        self._check_splits()

    def _deduplicate(self, name: str, held_out: np.ndarray | None) -> np.ndarray:
        """Return the rows that may become samples: not held out and, unless duplicates are kept,
        all different.
        """
        hashes, counts = self.texts[name].hashes, self.reports[name].counts
        rows = np.arange(len(hashes))
        if not self.options.keep_duplicates:
            rows = select.first_occurrences(hashes)
        counts["drop_duplicate"] += len(hashes) - len(rows)
        if held_out is not None:
            is_held = np.isin(hashes[rows], held_out)
            counts["drop_in_validation_corpus"] += int(is_held.sum())
            rows = rows[~is_held]
        if not len(rows):
            raise self._too_few(name, 0)
        return rows

    def _last_reserved_key(self, hashes: np.ndarray) -> np.uint64 | None:
        """Return the key that ends what a tokenizer made of the texts must not be trained on; None
        for a pretrained one.
        """
        options = self.options
        if options.tokenizer not in (TRAIN, WORDS):
            return None
        return select.last_reserved_key(
            hashes, options.validation_samples, options.max_samples, options.seed
        )

    def _make_tokenizer(
        self, texts: TextShards, rows: np.ndarray, last_key: np.uint64 | None
    ) -> None:
        """Make the tokenizer without the texts that may become validation."""
        if last_key is not None:
            rows = rows[select.split_keys(texts.hashes[rows], self.options.seed) > last_key]
        self.make_tokenizer(SelectedTexts(texts, rows))

    def _in_validation(self, samples: Samples, last_key: np.uint64 | None) -> np.ndarray:
        """Return [N] bools, whether a sample is in the validation split: all pieces of a document
        are in one split.
        """
        options, hashes = self.options, self.texts["train"].hashes[samples.rows]
        if not len(hashes):
            raise self._too_few("train", 0)
        inside = select.in_validation(hashes, options.validation_samples, options.seed, last_key)
        expected = select.num_validation(len(hashes), options.validation_samples)
        if last_key is not None and inside.sum() < expected:
            self.console.print(
                f"warning: {inside.sum():,} validation samples instead of {expected:,}: the"
                " tokenizer was made from the other texts",
                soft_wrap=True,
            )
        return inside

    def _tokenize(self, name: str, rows: np.ndarray, limit: int | None) -> Samples:
        options, texts = self.options, self.texts[name]
        selection = select.Selection(rows, texts.hashes, limit, options.seed)
        max_tokens = options.max_tokens
        if options.overlong == "chunk" and options.latents_per_text == 1:
            max_tokens = min(max_tokens, self.queue.add(_REACH, 0))
        rules = tokenize.LengthRules(
            options.min_tokens, max_tokens, not_none(options.overlong), options.latents_per_text
        )

        def tokenize_part(part: int, path: Path) -> None:
            tokenize.tokenize_shard(path, texts, parts[part], self.tokenizer, rules)

        with RankProgress(self.console, self.queue, f"tokenizing {name}", "texts") as progress:
            while parts := selection.next_round():
                progress.total += sum(map(len, parts))
                stage = f"tokenize-{name}-{selection.num_rounds}"
                paths = self.work.run(
                    stage, len(parts), tokenize_part, lambda part: progress(len(parts[part]))
                )
                selection.add(parts, paths)
        counts = self.reports[name].counts
        return selection.collect(options.keep_duplicates, counts, self.tokenizer.unk_token_id)

    def _too_few(self, split: str, count: int) -> UserError:
        report = self.reports.get(split, self.reports["train"])
        more = ", of more documents" if self.options.overlong == "chunk" else ""
        return UserError(
            f"at least 2 samples of {report.source} for the {split} split",
            f"{count} left ({describe_counts(report.counts)})",
            f"give a larger corpus{more}, or loosen --min-tokens, --max-tokens, --max-samples or"
            " --validation-samples",
        )

    def _check_splits(self) -> None:
        for name, part in self.samples.items():
            if len(part) < 2:
                raise self._too_few(name, len(part))
        train, validation = self.samples["train"], self.samples["validation"]
        assert not np.isin(train.hashes, validation.hashes).any(), "a text is in both splits"
        for name, part in self.samples.items():
            self.warn_of_unknown(name, int(part.unknown.sum()), int(part.lengths.sum()))

    def _texts_of(self, split: str) -> TextShards:
        """Return the texts of the corpus of a split."""
        return self.texts.get(split, self.texts["train"])

    def encode(self) -> None:
        self.queue.rank_0_first("unknown to the encoder", self._check_unknown_words)
        self.load_encoder()
        total = sum(map(len, self.samples.values())) * self.options.latents_per_text
        label = f"encoding with {self._encoder.name}"
        with RankProgress(self.console, self.queue, label, "sentences", total) as progress:
            self.encoded = {split: self._encode_split(split, progress) for split in self.samples}

    @property
    def _encoder(self) -> Encoder:
        assert self.encoder is not None, "rank 0 loads it at the start, the others before encoding"
        return self.encoder

    def _check_unknown_words(self) -> None:
        """Check, before hours of encoding, that the encoder's tokenizer knows the texts; on
        samples spread over them.

        Raises:
            UserError: it knows too few of their tokens.
        """
        samples, encoder = self.samples["train"], self._encoder
        count = min(len(samples), _SAMPLES_OF_A_CHECK)
        rows = np.unique(np.linspace(0, len(samples) - 1, count).astype(np.int64))
        part, _ = samples.take(rows).read(self.texts["train"], 0, len(rows))
        num_unknown, num_tokens = np.sum(encoder.num_unknown(part), axis=0).tolist()
        warning = check_unknown_to_encoder(num_unknown, num_tokens, encoder.name)
        if warning is not None:
            self.console.print(f"warning: {warning}", soft_wrap=True)

    def _encode_split(self, split: str, progress: RankProgress) -> list[Path]:
        options, samples, texts = self.options, self.samples[split], self._texts_of(split)
        size = encode.SAMPLES_PER_SHARD
        starts = range(0, len(samples), size)
        # Pieces of a shard that the progress bar has counted already.
        num_counted: Counter = Counter()

        def encode_shard(shard: int, path: Path) -> None:
            def count(num_done: int) -> None:
                num_counted[shard] += num_done
                progress(num_done)

            part, _ = samples.read(texts, starts[shard], starts[shard] + size)
            result = encode.encode(
                self._encoder, part, options.retries, count, options.latents_per_text
            )
            encode.write_encoded(path, result)

        def count_rest(shard: int) -> None:
            num_pieces = min(size, len(samples) - starts[shard]) * options.latents_per_text
            progress(num_pieces - num_counted[shard])

        return self.work.run(f"encode-{split}", len(starts), encode_shard, count_rest)

    @property
    def has_costly_work(self) -> bool:
        return bool(list(self.work.folder.glob("encode-*/*")))

    def quarantined(self) -> list[dict[str, Any]]:
        """Return the split, corpus row, text and reason of every sample without a latent."""
        records: list[dict[str, Any]] = []
        for name, samples in self.samples.items():
            num_bad = 0
            for shard, path in enumerate(self.encoded[name]):
                for position, reason in encode.read_reasons(path).items():
                    row = shard * encode.SAMPLES_PER_SHARD + position
                    text = samples.read(self._texts_of(name), row, row + 1)[0][0]
                    entry = {"split": name, "row": int(samples.rows[row]), "reason": reason}
                    records.append({**entry, "text": text})
                    num_bad += 1
            if len(samples) - num_bad < 2:
                reasons = Counter(entry["reason"] for entry in records)
                raise UserError(
                    f"at least 2 samples with a latent in the {name} split",
                    f"{num_bad} of {len(samples)} without: {describe_counts(reasons)}",
                    "check these texts and the encoder (its weights, --dtype), then prepare again",
                )
            report = self.reports.get(name, self.reports["train"])
            report.counts["drop_quarantined"] += num_bad
        self._check_quarantined(records)
        return records

    def _check_quarantined(self, records: list[dict[str, Any]]) -> None:
        total, most = sum(map(len, self.samples.values())), self.options.max_quarantined
        if len(records) <= most * total:
            return
        reasons = Counter(entry["reason"] for entry in records)
        raise UserError(
            f"at most {most:.2%} of {total:,} samples on which {self._encoder.name} fails",
            f"{len(records)}: {dict(reasons)}, first {records[0]['text'][:80]!r}",
            "check the encoder (its weights, --dtype), or allow more with --max-quarantined;"
            f" nothing was written, {self.work.folder} keeps the finished work",
        )

    @property
    def latent_shape(self) -> tuple[int, ...]:
        count, dim = self.options.latents_per_text, self._encoder.latent_dim
        return (dim,) if count == 1 else (count, dim)

    def encoder_entry(self) -> dict[str, Any]:
        return self._encoder.identity()

    def open_split(self, folder: Path, split: str, vocab_size: int) -> StoreSplit | FilesSplit:
        report = self.reports["train"]
        if self.format == FILES_FORMAT:
            return FilesSplit(folder, split, report.source, self._encoder.name)
        has_documents = bool(report.counts["chunked"])
        return StoreSplit(folder, split, self.latent_shape, vocab_size, has_documents)

    def blocks(self, split: str) -> Iterator[Block]:
        """Yield the samples that have a latent, shard by shard."""
        samples, texts = self.samples[split], self._texts_of(split)
        for shard, path in enumerate(self.encoded[split]):
            start = shard * encode.SAMPLES_PER_SHARD
            stop = start + encode.SAMPLES_PER_SHARD
            encoded = encode.read_encoded(path)
            part, ids = samples.read(texts, start, stop)
            keep = np.flatnonzero(encoded.is_ok)
            yield Block(
                [part[i] for i in keep],
                [ids[i] for i in keep],
                encoded.latents,
                documents=samples.rows[start:stop][keep],
                num_cut=int(encoded.is_cut[keep].sum()),
            )
