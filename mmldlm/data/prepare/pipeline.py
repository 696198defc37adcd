"""``mmldlm prepare``: a corpus becomes a store of texts, tokens and latents. Also torchrun -m mmldlm.data.prepare.

read -> candidates -> tokenize -> samples and splits -> encode -> write. Reading, tokenizing and encoding are cut into
tasks that ranks claim; each task's result is one file or folder that appears whole. So a preparation may be killed at
any time and started again with any number of ranks: what is there is kept, and the bytes that come out are the same.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mmldlm.data.corpora.corpus import Corpus, open_corpus
from mmldlm.data.encoders.encoder import Encoder
from mmldlm.data.encoders.tokenizer_files import read_tokenizer
from mmldlm.data.prepare import encode_stage, select_stage, tokenize_stage
from mmldlm.data.prepare import tokenizer as tokenizers
from mmldlm.data.prepare.options import PrepareOptions, check_options, from_arguments
from mmldlm.data.prepare.publish_stage import (
    TOKENIZER_IDENTITY,
    StoreOutput,
    existing_output,
    publish,
    refuse_other_folders,
)
from mmldlm.data.prepare.read_stage import SelectedTexts, TextShards, read_unit
from mmldlm.data.prepare.select_stage import Samples
from mmldlm.data.prepare.summary import RankProgress, print_summary
from mmldlm.data.prepare.task_queue import RankFailed, TaskQueue, connect
from mmldlm.data.prepare.work_dir import PLAN, WorkDir
from mmldlm.data.store.store import TOKENIZER_FOLDER
from mmldlm.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, MmldlmError, UserError
from mmldlm.utils.atomic_files import whole_folder, write_json


def prepare(options: PrepareOptions, console: Console | None = None, peers: TaskQueue | None = None) -> Path:
    """Reads, filters, tokenizes, splits, encodes and writes; the store appears whole or not at all.

    Args:
        peers: the ranks that do it together; every one of them calls this.

    Returns:
        The folder of the store.

    Raises:
        UserError: bad options, a missing or empty corpus, an output folder that exists, weights or a tokenizer that
            cannot be had, or too many texts that the encoder makes nothing of.
    """
    peers = peers or TaskQueue()
    console = (console or Console()) if peers.rank == 0 else Console(quiet=True)
    try:
        root = check_options(options)
        corpora, held_out = _open_corpora(options)
        if options.overlong is None:
            options = replace(options, overlong="chunk" if any(c.has_documents for c in corpora) else "drop")
        _Preparation(options, root, corpora, held_out, peers, console).run()
    except BaseException as error:
        if not isinstance(error, RankFailed):
            peers.failed(error)
        raise
    peers.close()
    return root


def _open_corpora(options: PrepareOptions) -> tuple[list[Corpus], Corpus | None]:
    def opened(name: str) -> Corpus:
        return open_corpus(name, options.text_field, options.max_documents, options.sentences, options.whole_files)

    held_out = options.validation_corpus
    return [opened(name) for name in options.datasets or [options.corpus]], opened(held_out) if held_out else None


@dataclass
class _Preparation:
    """One launch's share of a preparation."""

    options: PrepareOptions
    root: Path
    corpora: list[Corpus]
    held_out: Corpus | None
    peers: TaskQueue
    console: Console

    def run(self) -> None:
        started = time.perf_counter()
        peers = self.peers
        self.work = WorkDir(self.root, peers)
        self.source = "+".join(corpus.source for corpus in self.corpora)
        self.encoder: Encoder | None = None
        plan = self._plan()
        peers.first_alone("begin", lambda: self._begin(plan))
        if peers.add("whole already", 0):
            return
        try:
            texts = self._read("train", self.corpora)
            held_texts = self._read("validation", [self.held_out]) if self.held_out else None
            splits, counts, held_counts = self._make_samples(texts, held_texts)
            sources = {name: held_texts if name == "validation" and held_texts else texts for name in splits}
            encoded = self._encode_all(splits, sources)

            def write() -> None:
                output = StoreOutput(self.options, self.encoder, self.work, splits, sources, encoded)
                held_source = None if self.held_out is None else self.held_out.source
                manifest = publish(output, self.root, plan, self.source, held_source, counts, held_counts)
                self.work.remove()
                print_summary(self.console, self.root, manifest, time.perf_counter() - started)

            peers.first_alone("write", write)
        except UserError as error:
            peers.failed(error)  # and the others gone, before the ground goes
            if peers.rank == 0 and not list(self.work.folder.glob("encode-*/*")):
                self.work.remove()  # nothing that took long is lost, and other options may follow
            raise

    def _plan(self) -> dict[str, Any]:
        corpora = {"train": self.corpora, "validation": [self.held_out] if self.held_out else []}
        return {
            "options": self.options.identity(),
            "shards": [tokenize_stage.SHARD, encode_stage.SHARD],
            "corpus": {
                name: [f"{corpus.source} {unit.name}" for corpus in part for unit in corpus.units]
                for name, part in corpora.items()
            },
        }

    def _begin(self, plan: dict[str, Any]) -> None:
        options = self.options
        if existing_output(self.root, plan) and not options.force:
            self.console.print(f"{self.root} is whole already, of the same corpus and options", soft_wrap=True)
            self.work.remove()
            self.peers.add("whole already")
            return
        refuse_other_folders(self.root, options.force, plan)
        self.encoder = self._make_encoder()  # before hours of reading: its weights may be missing
        goes_on = self.work.open(plan, options.force)
        if goes_on:
            self.console.print(f"going on with {self.work.folder}", soft_wrap=True)

    def _make_encoder(self) -> Encoder:
        import torch

        device = None
        if torch.cuda.is_available():
            device = f"cuda:{self.peers.local_rank % torch.cuda.device_count()}"
        elif "OMP_NUM_THREADS" not in os.environ:
            ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))
        return Encoder(self.options.encoder, device=device, **self.options.encoder_options())

    # -- reading -----------------------------------------------------------------------------------------------------

    def _read(self, name: str, corpora: list[Corpus]) -> TextShards:
        units = [unit for corpus in corpora for unit in corpus.units]
        paths = self.work.claim_tasks(f"read-{name}", len(units))
        with self.console.status(f"reading {name}"):
            self.work.run(f"read-{name}", paths, lambda i: read_unit(units[i], paths[i]), lambda i: None)
        texts = TextShards(paths)
        if not len(texts):
            counts = texts.counts
            raise UserError(
                f"texts in {'+'.join(corpus.source for corpus in corpora)}",
                f"none kept of {counts['read']} read: {dict(counts)}"
                if counts["read"]
                else "none (the corpus is empty)",
                "check the file, or use the default corpus 'docstrings'",
            )
        self.console.print(f"read {texts.counts['read']:,} texts ({name})", soft_wrap=True)
        return texts

    # -- tokenizing --------------------------------------------------------------------------------------------------

    def _make_samples(
        self, texts: TextShards, held_texts: TextShards | None
    ) -> tuple[dict[str, Samples], Counter, Counter]:
        """Both splits, and what became of every text of the corpus and of the validation corpus."""
        options, no_hashes = self.options, np.empty(0, np.uint64)
        counts = Counter(texts.counts)
        held_counts = Counter() if held_texts is None else Counter(held_texts.counts)
        held = no_hashes if held_texts is None else held_texts.hashes
        rows = select_stage.deduplicate(texts, held, options.keep_duplicates, counts)
        self._load_tokenizer(texts, rows)
        samples = self._tokenize("train", texts, rows, options.max_samples, counts)
        if held_texts is None:
            splits = select_stage.split_validation(samples, options.validation_samples, options.seed)
        else:
            held_rows = select_stage.deduplicate(held_texts, no_hashes, options.keep_duplicates, held_counts)
            validation = self._tokenize("validation", held_texts, held_rows, options.validation_samples, held_counts)
            kept = samples.take(~np.isin(samples.hashes, validation.hashes))  # cuts can make texts equal
            counts["drop_in_validation_corpus"] += len(samples) - len(kept)
            splits = {"train": kept, "validation": validation}
        for name, part in splits.items():
            if len(part) < 2:
                dropped = {key: value for key, value in counts.items() if key.startswith("drop_") and value}
                raise UserError(
                    f"at least 2 samples for the {name} split",
                    f"{len(part)} left of {counts['read']} texts read ({dropped or 'nothing dropped'})",
                    "give a larger corpus, or loosen --min-tokens, --max-tokens, --max-samples or --validation-samples",
                )
        assert not np.isin(splits["train"].hashes, splits["validation"].hashes).any(), "a text lies in both splits"
        return splits, counts, held_counts

    def _load_tokenizer(self, texts: TextShards, rows: np.ndarray) -> None:
        """The tokenizer of every rank is the one that rank 0 made and saved."""
        options = self.options
        folder, identity_path = self.work.folder / TOKENIZER_FOLDER, self.work.folder / TOKENIZER_IDENTITY

        def make() -> None:
            if folder.is_dir() and identity_path.is_file():
                return
            keys = select_stage.split_keys(texts.hashes[rows], options.seed)
            # The texts with the smallest split keys become validation: a tokenizer must not be trained on them.
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
            with whole_folder(folder) as partial:
                tokenizer.save_pretrained(partial)
            write_json(identity_path, tokenizers.identity(tokenizer, options.tokenizer))

        self.peers.first_alone("tokenizer", make)
        again = "delete this folder and start again"
        self.tokenizer = read_tokenizer(folder, f"the tokenizer that rank 0 saved in {folder}", again)
        self.tokenizer.split_special_tokens = True  # "[MASK]" in a text is six characters of it, no mask

    def _tokenize(self, name: str, texts: TextShards, rows: np.ndarray, limit: int | None, counts: Counter) -> Samples:
        options = self.options
        waves = select_stage.SelectionRounds(rows, texts.hashes, limit, options.seed)
        how = (self.tokenizer, options.min_tokens, options.max_tokens, options.overlong, options.latents_per_text)
        shard_rows: list[np.ndarray] = []
        paths: list[Path] = []
        num_kept, number = 0, 0
        with RankProgress(self.console, self.peers, f"tokenizing {name}", "texts") as progress:
            while (wave := waves.next(num_kept)) is not None:
                parts = [
                    wave[start : start + tokenize_stage.SHARD] for start in range(0, len(wave), tokenize_stage.SHARD)
                ]
                stage = f"tokenize-{name}-{number}"
                own = self.work.claim_tasks(stage, len(parts))
                progress.total += len(wave)
                self.work.run(
                    stage,
                    own,
                    lambda i, own=own, parts=parts: tokenize_stage.tokenize_shard(own[i], texts, parts[i], *how),
                    lambda i, parts=parts: progress(len(parts[i])),
                )
                shard_rows, paths, number = shard_rows + parts, paths + own, number + 1
                num_kept += sum(len(tokenize_stage.read_shard(path)["places"]) for path in own)
        if not shard_rows:
            shard_rows, paths = [np.empty(0, np.int64)], self.work.claim_tasks(f"tokenize-{name}-0", 1)
            tokenize_stage.tokenize_shard(paths[0], texts, shard_rows[0], *how)
        samples = select_stage.collect_samples(
            texts, waves, shard_rows, paths, options.keep_duplicates, counts, options.seed
        )
        return samples

    # -- encoding ----------------------------------------------------------------------------------------------------

    def _encode_all(self, splits: dict[str, Samples], sources: dict[str, TextShards]) -> dict[str, list[Path]]:
        """The shards of latents of each split."""
        encoder = self.encoder = self.encoder or self._make_encoder()
        total = sum(map(len, splits.values()))
        encoded: dict[str, list[Path]] = {}
        with RankProgress(self.console, self.peers, f"encoding with {encoder.name}", "sentences", total) as progress:
            for name, samples in splits.items():
                starts = range(0, len(samples), encode_stage.SHARD)
                paths = encoded[name] = self.work.claim_tasks(f"encode-{name}", len(starts))
                told: Counter = Counter()

                def do(number: int, name=name, samples=samples, starts=starts, paths=paths, told=told) -> None:
                    def tell(num_done: int) -> None:
                        told[number] += num_done
                        progress(num_done)

                    part, _ = samples.read(sources[name], starts[number], starts[number] + encode_stage.SHARD)
                    made = encode_stage.encode(encoder, part, self.options.retries, tell, self.options.latents_per_text)
                    encode_stage.write_encoded(paths[number], made)

                def done(number: int, samples=samples, starts=starts, told=told) -> None:
                    progress(min(encode_stage.SHARD, len(samples) - starts[number]) - told[number])

                self.work.run(f"encode-{name}", paths, do, done)
        return encoded


# The command -----------------------------------------------------------------------------------------------------


def main(args: argparse.Namespace) -> int:
    """Runs ``mmldlm prepare`` in this process, one of several ranks or alone; returns the exit code: 5 where a signal
    ended it and the same command continues."""
    options = from_arguments(args)
    peers = connect()
    try:
        prepare(options, peers=peers)
    except MmldlmError as error:
        if peers.world_size == 1:
            raise
        # Who was told of a failure leaves the telling to the rank that failed, unless that one can tell no more.
        if not getattr(error, "is_told", False) and peers.speaks():
            print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        work = WorkDir(Path(os.path.abspath(options.output_dir)), peers).folder
        can_continue = (work / PLAN).is_file()
        how = [f"the same command continues from what is done, in {work}"] if can_continue else []
        if peers.world_size == 1:
            raise KeyboardInterrupt(*how) from None
        if peers.speaks():  # the signal may have reached any rank
            print(": ".join(["interrupted", *how]), file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED if can_continue else EXIT_FAILED
    return EXIT_DONE
