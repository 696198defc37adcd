"""Prepare a corpus: turn it into a store of texts, tokens and latents.

read -> candidates -> tokenize -> samples and splits -> encode -> write. Reading, tokenizing and
encoding are cut into tasks that ranks claim; the result of a task is one file or folder, written
atomically. So a preparation can be killed and resumed with any number of ranks: finished tasks are
kept, and the same bytes are written in the end.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mmldlm.data.corpora.text_corpus import Corpus, open_corpus
from mmldlm.data.encoders.encoder import Encoder, usable_device, usable_dtype
from mmldlm.data.encoders.model_files import read_tokenizer, save_tokenizer
from mmldlm.data.prepare import (
    encode as encode_stage,
)
from mmldlm.data.prepare import (
    select as select_stage,
)
from mmldlm.data.prepare import (
    tokenize as tokenize_stage,
)
from mmldlm.data.prepare import tokenizer as tokenizers
from mmldlm.data.prepare.encode import device_of_rank
from mmldlm.data.prepare.inputs import (
    check_same_encoder,
    check_unchanged,
    encoder_inputs,
    file_inputs,
    tokenizer_inputs,
)
from mmldlm.data.prepare.options import PrepareOptions, check_options
from mmldlm.data.prepare.publish_stage import (
    TOKENIZER_IDENTITY,
    StoreOutput,
    check_output_free,
    existing_output,
    publish,
)
from mmldlm.data.prepare.read import SelectedTexts, TextShards, read_unit
from mmldlm.data.prepare.select import Samples
from mmldlm.data.prepare.summary import RankProgress, print_summary
from mmldlm.data.prepare.task_queue import RankFailed, TaskQueue
from mmldlm.data.prepare.work_dir import WorkDir
from mmldlm.data.store import TOKENIZER_FOLDER
from mmldlm.data.unknown_tokens import check_unknown_share, check_unknown_to_encoder
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import atomic_folder, write_json
from mmldlm.utils.screen import open_console
from mmldlm.utils.walk_files import LeftOut

_COMPLETE = "already complete"  # counters that rank 0 sets for the other ranks
_READS = "tokens of a text that the encoder reads"
_SAMPLES_OF_A_CHECK = 2048


def prepare(
    options: PrepareOptions, console: Console | None = None, queue: TaskQueue | None = None
) -> Path:
    """Read, filter, tokenize, split and encode a corpus, and write the store atomically.

    Args:
        options: the options of `mmldlm prepare`.
        console: receives the messages of rank 0.
        queue: the ranks that work together; every one of them calls this.

    Returns:
        The folder of the store.

    Raises:
        UserError: bad options, a missing or empty corpus, an existing output folder, missing
            weights or tokenizer, or too many texts on which the encoder fails.
    """
    queue = queue or TaskQueue()
    console = (console or open_console()) if queue.rank == 0 else open_console(quiet=True)
    try:
        root = check_options(options)
        corpora, held_out = _open_corpora(options)
        if options.overlong is None:
            options = replace(
                options, overlong="chunk" if any(c.has_documents for c in corpora) else "drop"
            )
        _Preparation(options, root, corpora, held_out, queue, console).run()
    except BaseException as error:
        if not isinstance(error, RankFailed):
            queue.announce_failure(error)
        raise
    queue.close()
    return root


def _open_corpora(options: PrepareOptions) -> tuple[list[Corpus], Corpus | None]:
    def open_named(name: str) -> Corpus:
        return open_corpus(
            name, options.text_field, options.max_documents, options.sentences, options.whole_files
        )

    held_out = options.validation_corpus
    corpora = [open_named(name) for name in options.datasets or [options.corpus]]
    return corpora, open_named(held_out) if held_out else None


@dataclass
class _Preparation:
    """The share of one rank in a preparation."""

    options: PrepareOptions
    root: Path
    corpora: list[Corpus]
    held_out: Corpus | None
    queue: TaskQueue
    console: Console

    def run(self) -> None:
        started = time.perf_counter()
        self.work = WorkDir(self.root, self.queue)
        self.identities = self.work.identities()
        self.source = "+".join(corpus.source for corpus in self.corpora)
        self.encoder: Encoder | None = None
        self.queue.rank_0_first("begin", self._begin)
        if self.queue.add(_COMPLETE, 0):
            return
        self.num_read_by_encoder = self.queue.add(_READS, 0)
        try:
            self._check_encoder()
            texts = self._read("train", self.corpora)
            held_texts = self._read("validation", [self.held_out]) if self.held_out else None
            self.queue.rank_0_first("inputs", self._check_unchanged)
            splits, counts, held_counts = self._make_samples(texts, held_texts)
            sources = {
                name: held_texts if name == "validation" and held_texts else texts
                for name in splits
            }
            encoded = self._encode_splits(splits, sources)

            def write() -> None:
                output = StoreOutput(
                    self.options, self.encoder, self.work, splits, sources, encoded
                )
                held_source = None if self.held_out is None else self.held_out.source
                left_out = LeftOut().update(corpus.left_out for corpus in self._all_corpora())
                manifest = publish(
                    output,
                    self.root,
                    self.plan,
                    self.source,
                    held_source,
                    counts,
                    held_counts,
                    left_out,
                )
                self.work.remove()
                print_summary(self.console, self.root, manifest, time.perf_counter() - started)

            self.queue.rank_0_first("write", write)
        except UserError as error:
            self.queue.announce_failure(error)  # the other ranks must leave before the folder goes
            if self.queue.rank == 0 and not list(self.work.folder.glob("encode-*/*")):
                self.work.remove()  # only quick work is lost, and other options may follow
            raise

    def _all_corpora(self) -> list[Corpus]:
        return [*self.corpora, *([self.held_out] if self.held_out else [])]

    def _files(self) -> list[dict[str, Path]]:
        return [corpus.files for corpus in self._all_corpora()]

    def _check_unchanged(self) -> None:
        check_unchanged(self._files(), self.plan["inputs"], self.identities)

    def _encoder_inputs(self) -> dict[str, str]:
        options = self.options
        dtype = usable_dtype(options.dtype, usable_device(device_of_rank(self.queue.local_rank)))
        return encoder_inputs(options.encoder, options.cache_dir, dtype, self.identities)

    def _check_encoder(self) -> None:
        if self.queue.rank > 0:
            check_same_encoder(
                self._encoder_inputs(), self.work.read_plan()["inputs"], self.queue.rank
            )

    def _plan(self) -> dict[str, Any]:
        options = self.options
        corpora = {"train": self.corpora, "validation": [self.held_out] if self.held_out else []}
        return {
            "options": options.identity(),
            "shards": [tokenize_stage.TEXTS_PER_SHARD, encode_stage.SAMPLES_PER_SHARD],
            "corpus": {
                name: [f"{corpus.source} {unit.name}" for corpus in part for unit in corpus.units]
                for name, part in corpora.items()
            },
            "inputs": {
                **self._encoder_inputs(),
                **tokenizer_inputs(options.tokenizer, options.cache_dir, options.add_mask_token),
                **file_inputs(self._files(), self.identities),
                **{
                    name: version
                    for corpus in self._all_corpora()
                    for name, version in corpus.versions.items()
                },
            },
        }

    def _begin(self) -> None:
        with self.console.status("identifying the files of the corpus"):
            plan = self.plan = self._plan()
        if (known := existing_output(self.root, plan)) and not self.options.force:
            self.console.print(f"{self.root} is already complete, {known}", soft_wrap=True)
            self.work.remove()
            self.queue.add(_COMPLETE)
            return
        check_output_free(self.root, self.options.force, plan)
        self.encoder = self._make_encoder()  # before hours of reading: its weights may be missing
        self.queue.add(_READS, self._check_reach(self.encoder))
        if self.work.open(plan, self.options.force):
            self.console.print(f"resuming from {self.work.folder}", soft_wrap=True)
        self.identities.save()

    def _check_reach(self, encoder: Encoder) -> int:
        """Return the tokens of a text that the encoder reads.

        Raises:
            UserError: --max-tokens allows more, so that the latents of long texts would not say
                how they end.
        """
        options, reach = self.options, encoder.max_text_tokens
        if options.max_tokens <= reach or options.latents_per_text > 1:
            return reach
        if options.overlong != "chunk":
            if (
                options.max_tokens == PrepareOptions.max_tokens
            ):  # the default, which nobody chose for this encoder
                return reach  # texts that are cut are counted, with a warning
            raise UserError(
                f"--max-tokens of at most {reach}: encoder {encoder.name} reads"
                f" {encoder.spec.max_length} tokens of a text, special ones and prefix included",
                f"--max-tokens {options.max_tokens} --overlong {options.overlong}",
                f"give --max-tokens {reach}, cut longer texts into pieces with --overlong chunk,"
                " or choose an encoder that reads more",
            )
        self.console.print(
            f"pieces of at most {reach} tokens, all that encoder {encoder.name} reads",
            soft_wrap=True,
        )
        return reach

    def _make_encoder(self) -> Encoder:
        device = device_of_rank(self.queue.local_rank)
        return Encoder(self.options.encoder, device=device, **self.options.encoder_options())

    def _read(self, name: str, corpora: list[Corpus]) -> TextShards:
        units = [unit for corpus in corpora for unit in corpus.units]
        paths = self.work.task_paths(f"read-{name}", len(units))
        with self.console.status(f"reading {name}"):
            self.work.run(
                f"read-{name}", paths, lambda i: read_unit(units[i], paths[i]), lambda i: None
            )
        texts = TextShards(paths)
        if not len(texts):
            counts = texts.counts
            raise UserError(
                f"texts in {'+'.join(corpus.source for corpus in corpora)}",
                (
                    f"none kept of {counts['read']} read: {dict(counts)}"
                    if counts["read"]
                    else "none (the corpus is empty)"
                ),
                "check the file, or use the default corpus 'docstrings'",
            )
        self.console.print(f"read {texts.counts['read']:,} texts ({name})", soft_wrap=True)
        return texts

    def _make_samples(
        self, texts: TextShards, held_texts: TextShards | None
    ) -> tuple[dict[str, Samples], Counter, Counter]:
        """Return both splits, and the counters of the corpus and of the validation corpus."""
        options, no_hashes = self.options, np.empty(0, np.uint64)
        counts = Counter(texts.counts)
        held_counts = Counter() if held_texts is None else Counter(held_texts.counts)
        held_hashes = no_hashes if held_texts is None else held_texts.hashes
        rows = select_stage.deduplicate(texts, held_hashes, options.keep_duplicates, counts)
        self._load_tokenizer(texts, rows)
        samples = self._tokenize("train", texts, rows, options.max_samples, counts)
        if held_texts is None:
            splits = select_stage.split_validation(
                samples, options.validation_samples, options.seed
            )
        else:
            held_rows = select_stage.deduplicate(
                held_texts, no_hashes, options.keep_duplicates, held_counts
            )
            validation = self._tokenize(
                "validation", held_texts, held_rows, options.validation_samples, held_counts
            )
            kept = samples.take(
                ~np.isin(samples.hashes, validation.hashes)
            )  # cuts can make texts equal
            counts["drop_in_validation_corpus"] += len(samples) - len(kept)
            splits = {"train": kept, "validation": validation}
        for name, part in splits.items():
            if len(part) < 2:
                dropped = {
                    key: value
                    for key, value in counts.items()
                    if key.startswith("drop_") and value
                }
                raise UserError(
                    f"at least 2 samples for the {name} split",
                    f"{len(part)} left of {counts['read']} texts read"
                    f" ({dropped or 'nothing dropped'})",
                    "give a larger corpus, or loosen --min-tokens, --max-tokens, --max-samples or"
                    " --validation-samples",
                )
        assert not np.isin(splits["train"].hashes, splits["validation"].hashes).any(), (
            "a text is in both splits"
        )
        for name, part in splits.items():
            warning = check_unknown_share(int(part.unknown.sum()), int(part.lengths.sum()), name)
            if warning is not None:
                self.console.print(f"warning: {warning}", soft_wrap=True)
        return splits, counts, held_counts

    def _load_tokenizer(self, texts: TextShards, rows: np.ndarray) -> None:
        """Load, on every rank, the tokenizer that rank 0 made and saved."""
        options = self.options
        folder, identity_path = (
            self.work.folder / TOKENIZER_FOLDER,
            self.work.folder / TOKENIZER_IDENTITY,
        )

        def make() -> None:
            if folder.is_dir() and identity_path.is_file():
                return
            keys = select_stage.split_keys(texts.hashes[rows], options.seed)
            # The texts with the smallest split keys become validation: a tokenizer must not be
            # trained on them.
            num_reserved = 2 * select_stage.num_validation(len(keys), options.validation_samples)
            reserved = np.sort(keys)[: 0 if self.held_out else num_reserved]
            tokenizer = tokenizers.load(
                options.tokenizer,
                options.cache_dir,
                options.add_mask_token,
                texts=SelectedTexts(texts, rows[~np.isin(keys, reserved)]),
                vocab_size=options.vocab_size,
            )
            shutil.rmtree(folder, ignore_errors=True)
            with atomic_folder(folder) as partial:
                save_tokenizer(tokenizer, partial)
            write_json(identity_path, tokenizers.identity(tokenizer, options.tokenizer))

        self.queue.rank_0_first("tokenizer", make)
        fix = "delete this folder and rerun"
        self.tokenizer = read_tokenizer(
            folder, f"the tokenizer that rank 0 saved in {folder}", fix
        )
        self.tokenizer.split_special_tokens = (
            True  # "[MASK]" in a text is six characters, not a mask
        )

    def _tokenize(
        self, name: str, texts: TextShards, rows: np.ndarray, limit: int | None, counts: Counter
    ) -> Samples:
        options = self.options
        rounds = select_stage.SelectionRounds(rows, texts.hashes, limit, options.seed)
        max_tokens = options.max_tokens
        if options.overlong == "chunk" and options.latents_per_text == 1:
            max_tokens = min(max_tokens, self.num_read_by_encoder)
        rules = tokenize_stage.LengthRules(
            options.min_tokens, max_tokens, options.overlong, options.latents_per_text
        )
        shard_rows: list[np.ndarray] = []
        paths: list[Path] = []
        num_kept, number = 0, 0
        with RankProgress(self.console, self.queue, f"tokenizing {name}", "texts") as progress:
            while (round_rows := rounds.next(num_kept)) is not None:
                size = tokenize_stage.TEXTS_PER_SHARD
                parts = [
                    round_rows[start : start + size] for start in range(0, len(round_rows), size)
                ]
                progress.total += len(round_rows)
                new_paths = self._tokenize_round(
                    f"tokenize-{name}-{number}", texts, parts, rules, progress
                )
                shard_rows, paths, number = shard_rows + parts, paths + new_paths, number + 1
                num_kept += sum(
                    len(tokenize_stage.read_shard(path)["places"]) for path in new_paths
                )
        if not shard_rows:
            shard_rows, paths = (
                [np.empty(0, np.int64)],
                self.work.task_paths(f"tokenize-{name}-0", 1),
            )
            tokenize_stage.tokenize_shard(paths[0], texts, shard_rows[0], self.tokenizer, rules)
        return select_stage.collect_samples(
            texts,
            rounds,
            shard_rows,
            paths,
            options.keep_duplicates,
            counts,
            options.seed,
            self.tokenizer.unk_token_id,
        )

    def _tokenize_round(
        self,
        stage: str,
        texts: TextShards,
        parts: list[np.ndarray],
        rules: tokenize_stage.LengthRules,
        progress: RankProgress,
    ) -> list[Path]:
        paths = self.work.task_paths(stage, len(parts))
        self.work.run(
            stage,
            paths,
            lambda i: tokenize_stage.tokenize_shard(
                paths[i], texts, parts[i], self.tokenizer, rules
            ),
            lambda i: progress(len(parts[i])),
        )
        return paths

    def _encode_splits(
        self, splits: dict[str, Samples], sources: dict[str, TextShards]
    ) -> dict[str, list[Path]]:
        """Encode all samples; return the shards of latents per split."""
        self.queue.rank_0_first(
            "unknown to the encoder",
            lambda: self._check_unknown_words(splits["train"], sources["train"]),
        )
        encoder = self.encoder = self.encoder or self._make_encoder()
        total = sum(map(len, splits.values()))
        with RankProgress(
            self.console, self.queue, f"encoding with {encoder.name}", "sentences", total
        ) as progress:
            return {
                name: self._encode_split(f"encode-{name}", samples, sources[name], progress)
                for name, samples in splits.items()
            }

    def _check_unknown_words(self, samples: Samples, texts: TextShards) -> None:
        """Check, before hours of encoding, that the encoder's tokenizer knows the texts; on
        samples spread over them.

        Raises:
            UserError: it knows too few of their tokens.
        """
        assert self.encoder is not None  # rank 0 made it at the start
        rows = np.unique(
            np.linspace(0, len(samples) - 1, min(len(samples), _SAMPLES_OF_A_CHECK)).astype(
                np.int64
            )
        )
        part, _ = samples.take(rows).read(texts, 0, len(rows))
        num_unknown, num_tokens = np.sum(self.encoder.num_unknown(part), axis=0).tolist()
        warning = check_unknown_to_encoder(num_unknown, num_tokens, self.encoder.name)
        if warning is not None:
            self.console.print(f"warning: {warning}", soft_wrap=True)

    def _encode_split(
        self, stage: str, samples: Samples, texts: TextShards, progress: RankProgress
    ) -> list[Path]:
        options, starts = self.options, range(0, len(samples), encode_stage.SAMPLES_PER_SHARD)
        paths = self.work.task_paths(stage, len(starts))
        num_counted: Counter = Counter()  # samples of a shard that are in the progress already

        def encode(number: int) -> None:
            def count(num_done: int) -> None:
                num_counted[number] += num_done
                progress(num_done)

            part, _ = samples.read(
                texts, starts[number], starts[number] + encode_stage.SAMPLES_PER_SHARD
            )
            result = encode_stage.encode(
                self.encoder, part, options.retries, count, options.latents_per_text
            )
            encode_stage.write_encoded(paths[number], result)

        def count_rest(number: int) -> None:
            progress(
                min(encode_stage.SAMPLES_PER_SHARD, len(samples) - starts[number])
                - num_counted[number]
            )

        self.work.run(stage, paths, encode, count_rest)
        return paths
