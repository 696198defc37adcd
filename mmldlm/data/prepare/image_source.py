"""Samples of images with captions, whose latents the codec of images makes of the images.

read -> drop repeats -> groups and splits -> tokenize -> fit the codec. Reading is cut into tasks
that ranks claim; an autoencoder encodes at once what is read. The rest is quick: rank 0 does it
alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from mmldlm.data.codebook import CodeStatistics
from mmldlm.data.corpora.image_corpus import open_image_corpus
from mmldlm.data.corpora.image_lists import ImageCorpus, ImageSample
from mmldlm.data.encoders.vae import usable_dtype
from mmldlm.data.image_codec import ImageCodec, VaeCodec
from mmldlm.data.images import is_dark, to_patches
from mmldlm.data.prepare import read, select
from mmldlm.data.prepare.encode import device_of_rank
from mmldlm.data.prepare.fit_codec import fit_codec
from mmldlm.data.prepare.inputs import FileIdentities, autoencoder_inputs
from mmldlm.data.prepare.options import (
    CompleteImageOptions,
    ImageOptions,
    check_image_options,
    complete_options,
)
from mmldlm.data.prepare.read import ImageShards
from mmldlm.data.prepare.source import CorpusReport, Source
from mmldlm.data.prepare.summary import RankProgress
from mmldlm.data.prepare.task_queue import TaskQueue
from mmldlm.data.prepare.tokenize import token_ids, truncate
from mmldlm.data.sentences import content_hash
from mmldlm.data.unknown_tokens import count_unknown
from mmldlm.data.writers import Block, LatentStatistics, StoreSplit
from mmldlm.errors import UserError
from mmldlm.utils.formatting import count_noun, describe_counts, join_some, printable
from mmldlm.utils.resources import require_memory

_MAX_NAMED = 20
# Bytes of memory for each byte of the images of a shard: the images twice while they are read; and
# on writing their patches, with those as float32 and twice as float64 for the statistics.
_COPIES_OF_VAE, _COPIES = 2, 22
# Dtypes of latents.npy.
_DTYPES = {"pixels": np.uint8, "pca": np.float16, "codes": np.uint16, "vae": np.float16}
_IMAGE_KEYS = ("size", "patch", "channels", "grid", "latents", "vae", "vae_folder")


@dataclass
class ImageReport(CorpusReport):
    """Outcome of reading a corpus of images.

    Attributes:
        unreadable: Name and reason of every image that could not be read.
        peaks: Largest value of each image of 16 bits that declares no range.
    """

    unreadable: list[tuple[str, str]] = field(default_factory=list)
    peaks: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    def details(self) -> dict[str, Any]:
        entry = self.left_out.entry()
        if self.counts["truncated"]:
            entry["truncated"] = self.counts["truncated"]
        if self.unreadable:
            entry["unreadable"] = dict(Counter(reason for _, reason in self.unreadable))
            entry["unreadable_images"] = [
                f"{printable(name)}: {reason}" for name, reason in self.unreadable[:_MAX_NAMED]
            ]
        return entry


@dataclass
class ImageSplit:
    """Samples of one split.

    Attributes:
        shards: Images of its corpus.
        rows: [N] ascending rows of its corpus.
        captions, tokens: N texts and their token ids.
        groups: [N] int64 groups.
    """

    shards: ImageShards
    rows: np.ndarray
    captions: list[str]
    tokens: list[np.ndarray]
    groups: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)


@dataclass
class _Candidates:
    """Samples of all corpora that may be chosen.

    Attributes:
        samples: N samples.
        rows: [N] rows in their corpus.
        in_validation_corpus: [N] whether they are of a validation corpus.
        caption_hashes, pixel_hashes: [N] uint64.
        groups: [N] int64 groups: samples of one picture, or of one group of their corpus.
    """

    samples: list[ImageSample]
    rows: np.ndarray
    in_validation_corpus: np.ndarray
    caption_hashes: np.ndarray
    pixel_hashes: np.ndarray
    groups: np.ndarray = field(init=False)

    def __post_init__(self):
        # Two corpora may number their groups alike.
        named = [
            sample.group and (inside, sample.group)
            for sample, inside in zip(self.samples, self.in_validation_corpus.tolist())
        ]
        self.groups = select.join_groups(self.pixel_hashes.tolist(), named)


class ImageSource(Source):
    """Images of one corpus, or of two with a validation corpus, and their codec."""

    options: CompleteImageOptions
    reports: dict[str, ImageReport]
    samples: dict[str, ImageSplit]

    def __init__(self, options: ImageOptions, queue: TaskQueue, console: Console):
        complete = complete_options(options)
        super().__init__(complete, check_image_options(complete), queue, console)
        self.reports = {}
        self.vae = complete.find_vae()
        self.corpora = _open_corpora(complete)
        if queue.rank == 0:
            self._check_memory()
        self.codec: ImageCodec | None = None
        # Split -> statistics of its codes, complete when `blocks` is through.
        self.code_statistics: dict[str, CodeStatistics] = {}
        self.packages = ("pillow", "matplotlib", *(["diffusers"] if self.vae else []))
        self._has_read = False

    def _check_memory(self) -> None:
        """Check, before hours of reading, that rank 0 can write a shard of the images.

        Raises:
            UserError: its memory does not hold one.
        """
        options = self.options
        most = max(len(corpus.samples) for corpus in self.corpora.values())
        count = min(most, read.IMAGES_PER_SHARD)
        size, channels = options.image_size, options.channels
        copies = _COPIES_OF_VAE if self.vae else _COPIES
        require_memory(
            count * size**2 * channels * copies,
            f"{count_noun(count, 'image')} of {size} x {size} pixels, which are written at once",
            "give a smaller --image-size",
        )

    @property
    def tokenizer_name(self) -> str:
        return self.options.tokenizer or self.corpora["train"].tokenizer

    def plan(self) -> dict[str, Any]:
        return {
            "shards": [read.IMAGES_PER_SHARD],
            "corpus": {
                name: [f"{corpus.source} {corpus.digest()}"]
                for name, corpus in self.corpora.items()
            },
        }

    def files(self) -> list[tuple[str, Path]]:
        return [file for corpus in self.corpora.values() for file in corpus.files()]

    def encoder_inputs(self, identities: FileIdentities) -> dict[str, str]:
        if self.vae is None:
            return {}
        dtype = usable_dtype(self.vae, self.options.dtype, device_of_rank(self.queue.local_rank))
        return autoencoder_inputs(self.vae, dtype, identities)

    def load_encoder(self) -> None:
        options, files = self.options, self.vae
        if files is None or self.codec is not None:
            return
        device = device_of_rank(self.queue.local_rank)
        dtype = usable_dtype(files, options.dtype, device)
        folder = None if files.source.startswith("hub:") else str(files.folder.resolve())
        codec = VaeCodec.of_files(files, options.image_size, dtype, folder)
        self.codec = codec.ready(device=device, batch_size=options.batch_size)

    def read(self) -> None:
        self.load_encoder()
        self.shards = {name: self._read(name, corpus) for name, corpus in self.corpora.items()}
        for name, corpus in self.corpora.items():
            shards, counts = self.shards[name], Counter(corpus.counts)
            counts["drop_unreadable"] += len(shards.reasons) + len(corpus.unreadable)
            # An image with several captions is named once.
            images = {
                corpus.samples[row].origin: reason
                for row, reason in sorted(shards.reasons.items())
            }
            unreadable = [(image, reason) for (image, *_), reason in images.items()]
            self.reports[name] = ImageReport(
                corpus.source,
                counts,
                corpus.left_out,
                [*corpus.unreadable.items(), *unreadable],
                shards.peaks,
            )
        self._check_unreadable()
        self._has_read = True

    def _read(self, name: str, corpus: ImageCorpus) -> ImageShards:
        options, samples, size = self.options, corpus.samples, read.IMAGES_PER_SHARD
        stage, label = f"read-images-{name}", f"reading {name}"
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        shape = (options.image_size, options.image_size, options.channels)
        with RankProgress(self.console, self.queue, label, "images", len(samples)) as progress:
            paths = self.work.run(
                stage,
                len(parts),
                lambda i, path: read.read_images(path, corpus, parts[i], shape, self.codec),
                lambda i: progress(len(parts[i])),
            )
        return ImageShards(paths)

    def _check_unreadable(self) -> None:
        reports, most = self.reports.values(), self.options.max_quarantined
        num_bad = sum(report.counts["drop_unreadable"] for report in reports)
        total = sum(len(corpus.samples) for corpus in self.corpora.values())
        if num_bad <= most * total:
            return
        named = [f"{n}: {reason}" for report in reports for n, reason in report.unreadable]
        raise UserError(
            f"at most {most:.2%} of {total:,} images that cannot be read",
            f"{num_bad:,}: {join_some(named, limit=5)}",
            "repair or remove these files (--data-root names the folder of a list's images), or"
            f" allow more with --max-quarantined; nothing was written, {self.work.folder} keeps"
            " the finished work",
        )

    @property
    def has_costly_work(self) -> bool:
        return self.vae is not None or not self._has_read

    def select(self) -> None:
        self.queue.rank_0_first("select", self._select)

    def _select(self) -> None:
        self._check_depth()
        candidates = self._candidates()
        chosen = self._split(candidates)
        self._check_sizes(chosen)
        self.make_tokenizer([candidates.samples[i].caption for i in chosen["train"]])
        self.tokenizer = self.read_tokenizer()
        self.samples = {
            name: self._tokenize(name, candidates, positions) for name, positions in chosen.items()
        }
        self._check_sizes(self.samples)

    def _check_depth(self) -> None:
        """Check that images of 16 bits use their range, if their files do not declare another one.

        Raises:
            UserError: most of them use less than a quarter of it.
        """
        peaks = np.concatenate([report.peaks for report in self.reports.values()])
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

    def _candidates(self) -> _Candidates:
        """Return the samples of all corpora, without repeated pairs of image and caption."""
        chosen: list[ImageSample] = []
        columns = []
        for name, shards in self.shards.items():
            samples = [self.corpora[name].samples[row] for row in shards.rows.tolist()]
            hashes = select.caption_hashes([sample.caption for sample in samples])
            keep = np.arange(len(samples))
            if not self.options.keep_duplicates:
                keep = select.first_pairs(shards.hashes, hashes)
            self.reports[name].counts["drop_duplicate"] += len(samples) - len(keep)
            chosen += [samples[i] for i in keep]
            inside = np.full(len(keep), name == "validation")
            columns.append((shards.rows[keep], inside, hashes[keep], shards.hashes[keep]))
        return _Candidates(chosen, *map(np.concatenate, zip(*columns)))

    def _split(self, candidates: _Candidates) -> dict[str, np.ndarray]:
        """Return the positions of both splits; training drops samples whose group is in a
        validation corpus.
        """
        if "validation" in self.corpora:
            inside = candidates.in_validation_corpus
            leaks = ~inside & np.isin(candidates.groups, candidates.groups[inside])
            self.reports["train"].counts["drop_in_validation_corpus"] += int(leaks.sum())
            return {
                "train": np.flatnonzero(~inside & ~leaks),
                "validation": np.flatnonzero(inside),
            }
        corpus, options, samples = self.corpora["train"], self.options, candidates.samples
        captions = [sample.caption for sample in samples]
        names = [sample.image for sample in samples]
        words = [caption.split() for caption in captions]
        test = corpus.may_hold_out
        inside = select.split_groups(
            candidates.groups,
            select.order_hashes(captions, candidates.caption_hashes, names),
            options.validation_samples,
            corpus.validation_share,
            options.seed,
            words if corpus.words_in_training else None,
            None if test is None else np.array([test(sample) for sample in samples]),
        )
        return {"train": np.flatnonzero(~inside), "validation": np.flatnonzero(inside)}

    def _check_sizes(self, chosen: Mapping[str, Sized]) -> None:
        for name, part in chosen.items():
            if len(part) < 2:
                report = self.reports.get(name, self.reports["train"])
                raise UserError(
                    f"at least 2 images of {report.source} for the {name} split, apart from the"
                    " groups of the other",
                    f"{len(part)} left ({describe_counts(report.counts)})",
                    "give a larger corpus, another --validation-samples, or a --validation-corpus",
                )

    def _tokenize(self, name: str, candidates: _Candidates, positions: np.ndarray) -> ImageSplit:
        """Tokenize the captions of a split; too long ones are cut. Samples without a token are
        dropped, and those that the cut made equal.
        """
        corpus = name if name in self.shards else "train"
        counts, limit = self.reports[corpus].counts, self.options.max_tokens
        captions = [candidates.samples[i].caption for i in positions]
        encoded = token_ids(self.tokenizer, captions)
        texts, tokens, rows = [], [], []
        seen: set[tuple[int, str]] = set()
        for position, caption, ids in zip(positions.tolist(), captions, encoded):
            if len(ids) > limit:
                ids, caption = truncate(self.tokenizer, caption, limit)
                counts["truncated"] += bool(ids)
            if not ids:
                counts["drop_no_token"] += 1
                continue
            pair = int(candidates.pixel_hashes[position]), caption
            if pair in seen and not self.options.keep_duplicates:
                counts["drop_duplicate"] += 1
                continue
            seen.add(pair)
            texts.append(caption)
            tokens.append(np.asarray(ids, np.int32))
            rows.append(position)
        num_unknown = count_unknown(tokens, self.tokenizer.unk_token_id)
        self.warn_of_unknown(name, num_unknown, sum(map(len, tokens)))
        return ImageSplit(
            self.shards[corpus], candidates.rows[rows], texts, tokens, candidates.groups[rows]
        )

    def encode(self) -> None:
        self.queue.rank_0_first("fit", self._fit_codec)

    def _fit_codec(self) -> None:
        if self.codec is None:
            train = self.samples["train"]
            self.codec = fit_codec(
                self.options, train.shards, train.rows, self.work.folder, self.console
            )

    @property
    def _codec(self) -> ImageCodec:
        assert self.codec is not None, "it is fitted or loaded before samples are written"
        return self.codec

    def quarantined(self) -> list[dict[str, Any]]:
        return [
            {"split": name, "image": printable(image), "reason": reason}
            for name, report in self.reports.items()
            for image, reason in report.unreadable
        ]

    @property
    def latent_shape(self) -> tuple[int, ...]:
        count, dim = self._codec.num_latents, self._codec.latent_dim
        return (dim,) if count == 1 else (count, dim)

    def encoder_entry(self) -> dict[str, Any]:
        identity = self._codec.identity
        fitted = identity.get("basis_sha256") or identity.get("codebook_sha256")
        origin = identity.get("vae", {"source": "mmldlm", "weights_sha256": fitted})
        # `normalize` is stated instead of guessed: latents of images can have norms near 1 by
        # chance.
        entry = {"name": self._codec.name, "source": origin["source"], "normalize": False}
        weights = origin["weights_sha256"]
        return entry if weights is None else {**entry, "weights_sha256": weights}

    def kind_entry(self) -> dict[str, Any]:
        identity, codebook = self._codec.identity, self._codec.codebook
        image = {key: identity[key] for key in _IMAGE_KEYS if key in identity}
        if codebook is not None:
            image |= {"codes": len(codebook), "codebook": codebook.kind}
            image["codebook_statistics"] = {
                name: statistics.result() for name, statistics in self.code_statistics.items()
            }
        return {"kind": "image", "image": {**image, "source": self.reports["train"].source}}

    def open_statistics(self) -> LatentStatistics | None:
        return super().open_statistics() if self._codec.codebook is None else None

    def codec_files(self) -> dict[str, Path]:
        return self._codec.files()

    def open_split(self, folder: Path, split: str, vocab_size: int) -> StoreSplit:
        dtype = _DTYPES[self._codec.latents]
        return StoreSplit(
            folder, split, self.latent_shape, vocab_size, latent_dtype=dtype, with_groups=True
        )

    def blocks(self, split: str) -> Iterator[Block]:
        codec, samples, start = self._codec, self.samples[split], 0
        if codec.codebook is not None:
            self.code_statistics[split] = CodeStatistics(codec.codebook)
        for rows, values in samples.shards.blocks(samples.rows):
            stop = start + len(rows)
            latents = _stored_latents(codec, values)
            if codec.codebook is not None:
                patches = to_patches(values, codec.patch)
                self.code_statistics[split].add(latents[..., 0].astype(np.int64), patches)
            yield Block(
                samples.captions[start:stop],
                samples.tokens[start:stop],
                latents[:, 0] if codec.num_latents == 1 else latents,
                groups=samples.groups[start:stop],
            )
            start = stop


def _open_corpora(options: CompleteImageOptions) -> dict[str, ImageCorpus]:
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
        names = [f"{sample.caption} {sample.image}" for sample in corpus.samples]
        hashes = np.array([content_hash(name) for name in names], np.uint64)
        order = np.argsort(select.sample_keys(hashes, options.seed), kind="stable")
        chosen = np.sort(order[: options.max_samples])
        corpus.counts["drop_not_sampled"] += len(corpus.samples) - len(chosen)
        corpus.samples = [corpus.samples[row] for row in chosen.tolist()]
    return corpora


def _stored_latents(codec: ImageCodec, values: np.ndarray) -> np.ndarray:
    """Return latents as they are stored, from images uint8 [n, S, S, C] or from latents of the
    autoencoder.
    """
    if codec.latents == "pixels":
        return to_patches(values, codec.patch)
    if codec.latents == "vae":
        return values
    return codec.encode(values).astype(_DTYPES[codec.latents])
