"""Prepare images with captions: read -> drop repeats -> groups and splits -> tokenize -> write.

Reading is cut into tasks that ranks claim; the result of a task is one file, written atomically.
So a preparation can be killed and resumed with any number of ranks, and the same bytes are written
in the end.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mmldlm.data.corpora.image_corpus import open_image_corpus
from mmldlm.data.corpora.image_lists import ImageCorpus
from mmldlm.data.encoders.model_files import VaeFiles, read_tokenizer, save_tokenizer
from mmldlm.data.encoders.vae import default_device, usable_dtype
from mmldlm.data.image_codec import ImageCodec
from mmldlm.data.images import is_dark
from mmldlm.data.prepare import read as read_stage
from mmldlm.data.prepare import select as select_stage
from mmldlm.data.prepare import tokenizer as tokenizers
from mmldlm.data.prepare.encode import device_of_rank
from mmldlm.data.prepare.encode import load_vae_codec as load_encoder
from mmldlm.data.prepare.fit_codec import fit_codec
from mmldlm.data.prepare.images.publish_stage import (
    CorpusReport,
    ImageSplit,
    print_image_summary,
    publish,
)
from mmldlm.data.prepare.inputs import (
    autoencoder_inputs,
    check_same_encoder,
    check_unchanged,
    file_inputs,
    tokenizer_inputs,
)
from mmldlm.data.prepare.options import (
    ImageOptions,
    check_image_options,
    complete_options,
)
from mmldlm.data.prepare.publish_stage import (
    TOKENIZER_IDENTITY,
    check_output_free,
    existing_output,
)
from mmldlm.data.prepare.read import ImageShards
from mmldlm.data.prepare.select import sample_keys
from mmldlm.data.prepare.summary import RankProgress
from mmldlm.data.prepare.task_queue import RankFailed, TaskQueue
from mmldlm.data.prepare.tokenize import truncate
from mmldlm.data.prepare.work_dir import WorkDir
from mmldlm.data.sentences import content_hash
from mmldlm.data.store import TOKENIZER_FOLDER
from mmldlm.data.unknown_tokens import check_unknown_share, count_unknown
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import atomic_folder, write_json
from mmldlm.utils.formatting import join_some
from mmldlm.utils.screen import open_console

_COMPLETE = "already complete"  # counter that rank 0 sets for the other ranks


def prepare_images(
    options: ImageOptions, console: Console | None = None, queue: TaskQueue | None = None
) -> Path:
    """Read images and captions, split them by group, and write the store atomically; return its
    folder.

    Args:
        options: the options of `mmldlm prepare` for images.
        console: receives the messages of rank 0.
        queue: the ranks that work together; every one of them calls this.

    Raises:
        UserError: bad options, a missing or empty corpus, an existing output folder, or too many
            unreadable images.
    """
    queue = queue or TaskQueue()
    console = (console or open_console()) if queue.rank == 0 else open_console(quiet=True)
    try:
        options = complete_options(options)
        root = check_image_options(options)
        _Preparation(options, root, _open_corpora(options), queue, console).run()
    except BaseException as error:
        if not isinstance(error, RankFailed):
            queue.announce_failure(error)
        raise
    queue.close()
    return root


def _open_corpora(options: ImageOptions) -> dict[str, ImageCorpus]:
    named = {"train": options.corpus, "validation": options.validation_corpus}
    corpora = {
        split: open_image_corpus(
            name,
            options.image_size,
            options.channels,
            options.faces,
            options.font,
            options.data_root,
            options.white,
        )
        for split, name in named.items()
        if name
    }
    if options.max_samples is not None:
        corpus = corpora["train"]
        hashes = np.array(
            [content_hash(f"{sample.caption} {sample.image}") for sample in corpus.samples],
            np.uint64,
        )
        chosen = np.sort(
            np.argsort(sample_keys(hashes, options.seed), kind="stable")[: options.max_samples]
        )
        corpus.counts["drop_not_sampled"] += len(corpus.samples) - len(chosen)
        corpus.samples = [corpus.samples[row] for row in chosen.tolist()]
    return corpora


@dataclass
class _Preparation:
    """The share of one rank in a preparation of images."""

    options: ImageOptions
    root: Path
    corpora: dict[str, ImageCorpus]
    queue: TaskQueue
    console: Console

    def run(self) -> None:
        started = time.perf_counter()
        self.work = WorkDir(self.root, self.queue)
        vae = self.options.find_vae()
        self.identities = self.work.identities()
        self.queue.rank_0_first("begin", lambda: self._begin(vae))
        if self.queue.add(_COMPLETE, 0):
            return
        self._check_encoder(vae)
        self.encoder = None if vae is None else load_encoder(self.options, vae, self.queue)
        shards = {name: self._read(name, corpus) for name, corpus in self.corpora.items()}
        self.queue.rank_0_first("write", lambda: self._write(shards, started))

    def _encoder_inputs(self, vae: VaeFiles | None) -> dict[str, str]:
        if vae is None:
            return {}
        dtype = usable_dtype(
            vae, self.options.dtype, device_of_rank(self.queue.local_rank) or default_device()
        )
        return autoencoder_inputs(vae, dtype, self.identities)

    def _check_encoder(self, vae: VaeFiles | None) -> None:
        if self.queue.rank > 0:
            check_same_encoder(
                self._encoder_inputs(vae), self.work.read_plan()["inputs"], self.queue.rank
            )

    def _files(self) -> list[dict[str, Path]]:
        return [corpus.files() for corpus in self.corpora.values()]

    def _plan(self, vae: VaeFiles | None) -> dict[str, Any]:
        options = self.options
        name = options.tokenizer or self.corpora["train"].tokenizer
        return {
            "options": options.identity(),
            "shards": [read_stage.IMAGES_PER_SHARD],
            "corpus": {
                name: [f"{corpus.source} {corpus.digest()}"]
                for name, corpus in self.corpora.items()
            },
            "inputs": {
                **self._encoder_inputs(vae),
                **tokenizer_inputs(name, options.cache_dir, options.add_mask_token),
                **file_inputs(self._files(), self.identities),
            },
        }

    def _begin(self, vae: VaeFiles | None) -> None:
        with self.console.status("identifying the files of the corpus"):
            plan = self.plan = self._plan(vae)
        if (known := existing_output(self.root, plan)) and not self.options.force:
            self.console.print(f"{self.root} is already complete, {known}", soft_wrap=True)
            self.work.remove()
            self.queue.add(_COMPLETE)
            return
        check_output_free(self.root, self.options.force, plan)
        if self.work.open(plan, self.options.force):
            self.console.print(f"resuming from {self.work.folder}", soft_wrap=True)
        self.identities.save()

    def _read(self, name: str, corpus: ImageCorpus) -> ImageShards:
        stage, size = f"read-images-{name}", read_stage.IMAGES_PER_SHARD
        parts = [
            corpus.samples[start : start + size] for start in range(0, len(corpus.samples), size)
        ]
        paths, shape = self.work.task_paths(stage, len(parts)), (self.options.image_size,) * 2
        with RankProgress(
            self.console, self.queue, f"reading {name}", "images", len(corpus.samples)
        ) as progress:
            self.work.run(
                stage,
                paths,
                lambda i: read_stage.read_images(
                    paths[i], corpus, parts[i], (*shape, self.options.channels), self.encoder
                ),
                lambda i: progress(len(parts[i])),
            )
        return ImageShards(paths)

    def _write(self, shards: dict[str, ImageShards], started: float) -> None:
        check_unchanged(self._files(), self.plan["inputs"], self.identities)
        reports = {
            name: self._report(corpus, shards[name]) for name, corpus in self.corpora.items()
        }
        self._check_unreadable(reports)
        try:
            self._check_depth(reports)
            splits = self._split(shards, reports)
            codec = self._codec(splits["train"])
        except UserError:
            if self.encoder is None:
                self.work.remove()  # only quick work is lost, and other options may follow
            raise
        manifest = publish(self.options, codec, self.work, self.root, self.plan, splits, reports)
        self.work.remove()
        print_image_summary(self.console, self.root, manifest, time.perf_counter() - started)

    def _report(self, corpus: ImageCorpus, shards: ImageShards) -> CorpusReport:
        counts = Counter(corpus.counts)
        counts["drop_unreadable"] += len(shards.reasons) + len(corpus.unreadable)
        unreadable = corpus.unreadable | {
            corpus.samples[row].image: reason for row, reason in sorted(shards.reasons.items())
        }
        return CorpusReport(corpus.source, counts, unreadable, corpus.left_out, shards.peaks)

    def _check_depth(self, reports: dict[str, CorpusReport]) -> None:
        """Check that images of 16 bits use their range, if their files do not declare another one.

        Raises:
            UserError: most of them use less than a quarter of it.
        """
        peaks = np.concatenate([report.peaks for report in reports.values()])
        dark = peaks[is_dark(peaks)] if self.options.white is None else peaks[:0]
        if 2 * len(dark) <= len(peaks):
            return
        bits = max(9, int(dark.max()).bit_length())
        raise UserError(
            "images of 16 bits that use their range, 0 to 65,535",
            f"{len(dark):,} of {len(peaks):,} whose largest value is {dark.max():,} or less",
            f"give the value of white: --white {2**bits - 1} for {bits} bits, --white 65535 if"
            " they are so dark",
        )

    def _check_unreadable(self, reports: dict[str, CorpusReport]) -> None:
        num_bad = sum(report.counts["drop_unreadable"] for report in reports.values())
        total = sum(len(corpus.samples) for corpus in self.corpora.values())
        if num_bad <= self.options.max_quarantined * total:
            return
        named = [
            f"{name}: {reason}"
            for report in reports.values()
            for name, reason in report.unreadable.items()
        ]
        raise UserError(
            f"at most {self.options.max_quarantined:.2%} of {total:,} images that cannot be read",
            f"{num_bad:,}: {join_some(named, limit=5)}",
            "repair or remove these files (--data-root names the folder of a list's images), or"
            f" allow more with --max-quarantined; nothing was written, {self.work.folder} keeps"
            " the finished work",
        )

    def _split(
        self, shards: dict[str, ImageShards], reports: dict[str, CorpusReport]
    ) -> dict[str, ImageSplit]:
        """Return both splits, tokenized; repeated pairs and samples of groups of a validation
        corpus are dropped.
        """
        rows, own, columns = self._kept(shards, reports)
        captions, hashes, pixels, given = columns
        groups = select_stage.join_groups(pixels.tolist(), given)
        corpus, options = self.corpora["train"], self.options
        if "validation" in shards:
            inside = own == 1
            leaks = ~inside & np.isin(groups, groups[inside])
            reports["train"].counts["drop_in_validation_corpus"] += int(leaks.sum())
        else:
            names = [corpus.samples[row].image for row in rows.tolist()]
            keys = select_stage.order_hashes(captions, hashes, names)
            words = [caption.split() for caption in captions] if corpus.words_in_training else None
            test = corpus.may_hold_out
            eligible = (
                None
                if test is None
                else np.array([test(corpus.samples[row]) for row in rows.tolist()])
            )
            inside = select_stage.split_groups(
                groups,
                keys,
                options.validation_samples,
                corpus.validation_share,
                options.seed,
                words,
                eligible,
            )
            leaks = np.zeros(len(rows), dtype=bool)
        chosen = {"train": np.flatnonzero(~inside & ~leaks), "validation": np.flatnonzero(inside)}
        self._check_sizes(chosen, reports)
        tokenizer = self._tokenizer([captions[i] for i in chosen["train"]])
        splits = {}
        for name, positions in chosen.items():
            source = name if name in shards else "train"
            found = self._tokenize(
                tokenizer, [captions[i] for i in positions], reports[source].counts
            )
            kept = np.flatnonzero([len(ids) for _, ids in found])
            num_tokens = sum(len(ids) for _, ids in found)
            num_unknown = count_unknown([ids for _, ids in found], tokenizer.unk_token_id)
            if (warning := check_unknown_share(num_unknown, num_tokens, name)) is not None:
                self.console.print(f"warning: {warning}", soft_wrap=True)
            texts, tokens = [found[i][0] for i in kept], [found[i][1] for i in kept]
            splits[name] = ImageSplit(
                shards[source], rows[positions[kept]], texts, tokens, groups[positions[kept]]
            )
        return splits

    def _kept(self, shards: dict[str, ImageShards], reports: dict[str, CorpusReport]):
        """Return row, corpus (0, 1) and columns (caption, its hash, pixel hash, given group) of
        the kept samples.
        """
        rows, own, columns = [], [], ([], [], [], [])
        for number, (name, part) in enumerate(shards.items()):
            samples = [self.corpora[name].samples[row] for row in part.rows.tolist()]
            hashes = select_stage.caption_hashes([sample.caption for sample in samples])
            keep = np.arange(len(samples))
            if not self.options.keep_duplicates:
                keep = select_stage.first_pairs(part.hashes, hashes)
            reports[name].counts["drop_duplicate"] += len(samples) - len(keep)
            rows.append(part.rows[keep])
            own.append(np.full(len(keep), number))
            # Two corpora may number their images alike.
            given = [samples[i].group and (number, samples[i].group) for i in keep]
            found = (
                [samples[i].caption for i in keep],
                hashes[keep].tolist(),
                part.hashes[keep].tolist(),
                given,
            )
            for column, values in zip(columns, found):
                column.extend(values)
        captions, hashes, pixels, given = columns
        return (
            np.concatenate(rows),
            np.concatenate(own),
            (captions, np.array(hashes, np.uint64), np.array(pixels, np.uint64), given),
        )

    def _check_sizes(
        self, chosen: dict[str, np.ndarray], reports: dict[str, CorpusReport]
    ) -> None:
        for name, positions in chosen.items():
            if len(positions) < 2:
                found = {key: value for key, value in reports["train"].counts.items() if value}
                raise UserError(
                    f"at least 2 images for the {name} split, apart from the groups of the other",
                    f"{len(positions)} ({found})",
                    "give a larger corpus, another --validation-samples, or a --validation-corpus",
                )

    def _tokenizer(self, captions: list[str]):
        """Return the tokenizer, made from training captions alone and saved in the work folder."""
        options = self.options
        folder = self.work.folder / TOKENIZER_FOLDER
        name = options.tokenizer or self.corpora["train"].tokenizer
        tokenizer = tokenizers.load(
            name, options.cache_dir, options.add_mask_token, captions, options.vocab_size
        )
        shutil.rmtree(folder, ignore_errors=True)
        with atomic_folder(folder) as partial:
            save_tokenizer(tokenizer, partial)
        write_json(self.work.folder / TOKENIZER_IDENTITY, tokenizers.identity(tokenizer, name))
        saved = read_tokenizer(
            folder, f"the tokenizer saved in {folder}", "delete this folder and rerun"
        )
        saved.split_special_tokens = True  # "[MASK]" in a caption is six characters, not a mask
        return saved

    def _tokenize(
        self, tokenizer, captions: list[str], counts: Counter
    ) -> list[tuple[str, np.ndarray]]:
        """Return caption and token ids of each; too long captions are cut, those without a token
        have no ids.
        """
        limit = self.options.max_tokens
        found = list(
            zip(
                captions, tokenizer(captions, add_special_tokens=False, verbose=False)["input_ids"]
            )
        )
        for place, (caption, ids) in enumerate(found):
            counts["drop_no_token"] += not ids
            if len(ids) > limit:
                cut, text = truncate(tokenizer, caption, limit)
                found[place] = (text, cut)
                counts["truncated" if cut else "drop_no_token"] += 1
        return [(text, np.asarray(ids, np.int32)) for text, ids in found]

    def _codec(self, train: ImageSplit) -> ImageCodec:
        return self.encoder or fit_codec(self.options, train, self.work.folder, self.console)
