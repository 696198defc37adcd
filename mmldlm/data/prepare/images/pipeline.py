"""Prepare a corpus of images: turn it into a store of captions, tokens and latents.

read -> drop repeats, group, split -> tokenizer -> encode and write. Reading is cut into tasks that ranks claim; their
results are files, so a preparation can be killed and resumed with any number of ranks. The rest is rank 0's: latents
are pixels that only move, or one matrix product.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mmldlm.data.images.corpora.corpus import ImageCorpus
from mmldlm.data.images.corpora.open import open_image_corpus
from mmldlm.data.prepare import tokenizer as tokenizers
from mmldlm.data.prepare.chunking import truncate
from mmldlm.data.prepare.images.options import ImageOptions, check_options, complete_options
from mmldlm.data.prepare.images.publish_stage import ImageSplit, publish_images, write_images
from mmldlm.data.prepare.images.read_stage import SHARD, ImageShards, read_shard
from mmldlm.data.prepare.images.select_stage import caption_hashes, first_pairs, join_groups, split_groups
from mmldlm.data.prepare.publish_stage import check_output_free, existing_output
from mmldlm.data.prepare.select_stage import sample_keys
from mmldlm.data.prepare.summary import RankProgress, print_summary
from mmldlm.data.prepare.task_queue import RankFailed, TaskQueue
from mmldlm.data.prepare.work_dir import WorkDir
from mmldlm.data.store.store import TOKENIZER_FOLDER
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some

_COMPLETE = "already complete"  # counter that rank 0 sets for the other ranks


def prepare_images(options: ImageOptions, console: Console | None = None, queue: TaskQueue | None = None) -> Path:
    """Read, group, split and encode a corpus of images, and write the store atomically.

    Args:
        options: the options of `mmldlm prepare` for images.
        console: receives the messages of rank 0.
        queue: the ranks that work together; every one of them calls this.

    Returns:
        The folder of the store.

    Raises:
        UserError: bad options, a missing or empty corpus, an existing output folder, or too many unreadable images.
    """
    queue = queue or TaskQueue()
    console = (console or Console()) if queue.rank == 0 else Console(quiet=True)
    try:
        options = complete_options(options)
        root = check_options(options)
        _ImagePreparation(options, root, queue, console).run()
    except BaseException as error:
        if not isinstance(error, RankFailed):
            queue.announce_failure(error)
        raise
    queue.close()
    return root


@dataclass
class _ImagePreparation:
    """The share of one rank in a preparation of images."""

    options: ImageOptions
    root: Path
    queue: TaskQueue
    console: Console

    def run(self) -> None:
        started = time.perf_counter()
        self.work = WorkDir(self.root, self.queue)
        corpora = {"train": self._open(self.options.corpus)}
        if self.options.validation_corpus:
            corpora["validation"] = self._open(self.options.validation_corpus)
        plan = {
            "options": self.options.identity(),
            "shards": [SHARD],
            "corpus": {name: [f"{corpus.source} {corpus.digest()[:16]}"] for name, corpus in corpora.items()},
        }
        self.queue.rank_0_first("begin", lambda: self._begin(plan))
        if self.queue.add(_COMPLETE, 0):
            return
        try:
            shards = {name: self._read(name, corpus) for name, corpus in corpora.items()}
            self.queue.rank_0_first("write", lambda: self._write(corpora, shards, plan, started))
        except UserError as error:
            self.queue.announce_failure(error)  # the other ranks must leave before the folder goes
            if self.queue.rank == 0 and not list(self.work.folder.glob("images-*/*")):
                self.work.remove()
            raise

    def _open(self, name: str) -> ImageCorpus:
        options = self.options
        return open_image_corpus(name, options.image_size, options.channels, options.faces, options.data_root)

    def _begin(self, plan: dict[str, Any]) -> None:
        if existing_output(self.root, plan) and not self.options.force:
            self.console.print(f"{self.root} is already complete, from the same corpus and options", soft_wrap=True)
            self.work.remove()
            self.queue.add(_COMPLETE)
            return
        check_output_free(self.root, self.options.force, plan)
        if self.work.open(plan, self.options.force):
            self.console.print(f"resuming from {self.work.folder}", soft_wrap=True)

    def _read(self, name: str, corpus: ImageCorpus) -> ImageShards:
        starts = range(0, len(corpus.samples), SHARD)
        paths = self.work.task_paths(f"images-{name}", len(starts))
        shape = (self.options.image_size, self.options.image_size, self.options.channels)

        def part(number: int) -> list:
            return corpus.samples[starts[number] : starts[number] + SHARD]

        with RankProgress(self.console, self.queue, f"reading {name}", "images", len(corpus.samples)) as progress:
            self.work.run(
                f"images-{name}",
                paths,
                lambda i: read_shard(paths[i], corpus, part(i), shape),
                lambda i: progress(len(part(i))),
            )
        return ImageShards(paths)

    def _write(
        self, corpora: dict[str, ImageCorpus], shards: dict[str, ImageShards], plan: dict[str, Any], started: float
    ) -> None:
        quarantined = self._check_unreadable(corpora, shards)
        chosen = self._choose(corpora, shards)
        folder = self.work.folder / TOKENIZER_FOLDER
        tokenizer = self._make_tokenizer(corpora["train"], chosen["train"][0])
        tokenizer.save_pretrained(folder)
        identity = tokenizers.identity(tokenizer, self.options.tokenizer or corpora["train"].tokenizer)
        tokenizer.split_special_tokens = True  # "[MASK]" in a caption is six characters, not a mask
        splits = {}
        for name, (rows, groups) in chosen.items():
            own = name if name in corpora else "train"
            captions, tokens = self._tokenize(tokenizer, corpora[own], rows)
            splits[name] = ImageSplit(corpora[own], shards[own], rows, groups, captions, tokens)
        output = self.work.folder / "output"
        manifest = write_images(output, splits, self.options, identity, folder, quarantined)
        manifest = publish_images(output, self.root, manifest, splits, plan, self.options.force)
        self.work.remove()
        print_summary(self.console, self.root, manifest, time.perf_counter() - started)

    def _check_unreadable(
        self, corpora: dict[str, ImageCorpus], shards: dict[str, ImageShards]
    ) -> list[dict[str, Any]]:
        """Return split, row, reason, image and caption of every sample whose image could not be read; count them."""
        found: list[dict[str, Any]] = []
        for name, corpus in corpora.items():
            reasons = shards[name].reasons
            corpus.counts["drop_quarantined"] += len(reasons)
            for row, reason in reasons.items():
                sample = corpus.samples[row]
                entry = {"split": name, "row": row, "reason": reason, "image": sample.image, "text": sample.caption}
                found.append(entry)
        total = sum(len(corpus.samples) for corpus in corpora.values())
        names = join_some(dict.fromkeys(f"{entry['image']} ({entry['reason']})" for entry in found), limit=5)
        if len(found) > self.options.max_quarantined * total:
            raise UserError(
                f"at most {self.options.max_quarantined:.2%} of {total:,} samples with an unreadable image",
                f"{len(found)}: {names}",
                f"check these files, or allow more with --max-quarantined; nothing was written, {self.work.folder} "
                "keeps the finished work",
            )
        if found:
            self.console.print(f"left out, unreadable: {names}", soft_wrap=True, markup=False)
        return found

    def _choose(
        self, corpora: dict[str, ImageCorpus], shards: dict[str, ImageShards]
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return the ascending corpus rows and the groups of both splits."""
        options, train = self.options, corpora["train"]
        held = None
        if "validation" in corpora:
            held = self._distinct(corpora["validation"], shards["validation"], options.validation_samples)
        avoided = np.empty(0, np.uint64) if held is None else held[2]
        rows, groups, _, captions = self._distinct(train, shards["train"], options.max_samples, avoided)
        if held is not None:
            # One number means one group: those of the two corpora were joined apart, and share no pixels.
            offset = 1 + max(groups, default=-1)
            chosen = {"train": (rows, groups), "validation": (held[0], held[1] + offset)}
        else:
            words = [train.samples[row].caption.split() for row in rows] if train.words_in_training else None
            share, number = train.validation_share, options.validation_samples
            inside = split_groups(groups, captions, number, share, options.seed, words)
            chosen = {"train": (rows[~inside], groups[~inside]), "validation": (rows[inside], groups[inside])}
        for name, (own, _) in chosen.items():
            if len(own) < 2:
                counts = {key: value for key, value in train.counts.items() if value}
                raise UserError(
                    f"at least 2 samples for the {name} split",
                    f"{len(own)}; {counts}",
                    "give a larger corpus, or loosen --max-samples or --validation-samples",
                )
        return chosen

    def _distinct(
        self, corpus: ImageCorpus, shards: ImageShards, limit: int | None, avoided: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return rows, groups, pixel hashes and caption hashes of the samples to keep; count the rest.

        Args:
            limit: keep at most this many.
            avoided: pixel hashes that must not occur.
        """
        counts: Counter = corpus.counts
        rows, pixels = shards.rows, shards.hashes
        captions = caption_hashes([corpus.samples[row].caption for row in rows])
        kept = np.arange(len(rows)) if self.options.keep_duplicates else first_pairs(pixels, captions)
        counts["drop_duplicate"] += len(rows) - len(kept)
        free = kept if avoided is None else kept[~np.isin(pixels[kept], avoided)]
        counts["drop_in_validation_corpus"] += len(kept) - len(free)
        if limit is not None and len(free) > limit:
            keys = sample_keys(pixels[free] ^ captions[free], self.options.seed)
            counts["drop_not_sampled"] += len(free) - limit
            free = np.sort(free[np.argsort(keys, kind="stable")[:limit]])
        groups = join_groups(pixels[free].tolist(), [corpus.samples[row].group for row in rows[free]])
        return rows[free], groups, pixels[free], captions[free]

    def _make_tokenizer(self, corpus: ImageCorpus, rows: np.ndarray):
        options = self.options
        return tokenizers.load(
            options.tokenizer or corpus.tokenizer,
            options.cache_dir,
            options.add_mask_token,
            texts=[corpus.samples[row].caption for row in rows],  # validation captions are not its business
            vocab_size=options.vocab_size,
        )

    def _tokenize(self, tokenizer, corpus: ImageCorpus, rows: np.ndarray) -> tuple[list[str], list[np.ndarray]]:
        """Return captions and token ids; captions longer than --max-tokens are cut, and counted as truncated."""
        captions = [corpus.samples[row].caption for row in rows]
        encoded = tokenizer(captions, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        for place, ids in enumerate(encoded):
            if len(ids) > self.options.max_tokens:
                encoded[place], captions[place] = truncate(tokenizer, captions[place], self.options.max_tokens)
                corpus.counts["truncated"] += 1
        return captions, [np.asarray(ids, np.int32) for ids in encoded]
