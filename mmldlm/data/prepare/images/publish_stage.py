"""Stage 3: encode the selected images and write the store atomically, with a manifest that accounts for all samples."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.images.codec import BASIS, ImageCodec
from mmldlm.data.images.corpora.corpus import ImageCorpus
from mmldlm.data.images.patches import to_patches
from mmldlm.data.images.pca import fit_components
from mmldlm.data.prepare.images.options import ImageOptions
from mmldlm.data.prepare.images.read_stage import ImageShards
from mmldlm.data.prepare.publish_stage import QUARANTINE, check_readable, commit, merge_counts, plan_digest, versions
from mmldlm.data.store.latent_statistics import LatentStatistics
from mmldlm.data.store.repair_hints import MANIFEST
from mmldlm.data.store.store import FORMAT, TOKENIZER_FOLDER, VERSION, as_float32
from mmldlm.data.store.writers import StoreSplit
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import list_files, sha256_of, write_json


@dataclass
class ImageSplit:
    """The samples of one split.

    Attributes:
        corpus, shards: where they come from, and their pixels.
        rows: [n] int64 ascending rows of the corpus.
        groups: [n] int64.
        captions, tokens: of the samples, cut where they were too long.
    """

    corpus: ImageCorpus
    shards: ImageShards
    rows: np.ndarray
    groups: np.ndarray
    captions: list[str]
    tokens: list[np.ndarray]

    def blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield (positions, images uint8 [b, S, S, C])."""
        start = 0
        for rows, images in self.shards.blocks(self.rows):
            yield slice(start, start + len(rows)), images
            start += len(rows)


def write_images(
    folder: Path,
    splits: dict[str, ImageSplit],
    options: ImageOptions,
    tokenizer: dict[str, Any],
    tokenizer_folder: Path,
    quarantined: list[dict[str, Any]],
) -> dict[str, Any]:
    """Write splits, basis, tokenizer and quarantine into a new folder; return the manifest so far.

    Raises:
        UserError: more components than the training images have.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    codec, variance_kept = _make_codec(folder, splits["train"], options)
    summaries, statistics = {}, {}
    for name, split in splits.items():
        found = LatentStatistics(codec.latent_dim, len(split.rows) * codec.num_latents)
        summaries[name] = _write_split(folder, name, split, codec, tokenizer["vocab_size"], found)
        if name == "train":
            statistics = found.result()
    if quarantined:
        lines = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in quarantined)
        (folder / QUARANTINE).write_text(lines, encoding="utf-8")
    shutil.copytree(tokenizer_folder, folder / TOKENIZER_FOLDER)
    image = {key: getattr(codec, key) for key in ("size", "patch", "channels", "grid", "latents")}
    image |= {"source": splits["train"].corpus.source}
    encoder = {"name": codec.name, "source": "mmldlm", "normalize": False}
    if variance_kept is not None:
        encoder |= {"variance_kept": variance_kept, "basis_sha256": sha256_of(folder / BASIS)}
    return {
        "format": FORMAT,
        "version": VERSION,
        "kind": "image",
        "image": image,
        "latent_dim": codec.latent_dim,
        **({} if codec.num_latents == 1 else {"latents_per_text": codec.num_latents}),
        "encoder": encoder,
        "latent_stats": statistics,
        "tokenizer": tokenizer,
        "splits": summaries,
    }


def publish_images(
    folder: Path, root: Path, manifest: dict[str, Any], splits: dict[str, ImageSplit], plan: dict[str, Any], force: bool
) -> dict[str, Any]:
    """Complete the manifest of a written folder and rename the folder to its place; return the manifest.

    Raises:
        UserError: a folder that appeared at `root` in the meantime.
    """
    train, held_out = splits["train"].corpus, splits["validation"].corpus
    summaries = manifest["splits"]
    manifest["corpus"] = {"source": train.source, **merge_counts(train.counts, summaries, held_out is train)}
    if held_out is not train:
        own = {"validation": summaries["validation"]}
        counted = merge_counts(held_out.counts, own, True)
        manifest["validation_corpus"] = {"source": held_out.source, **counted}
    manifest |= {
        "options": plan["options"],
        "units": plan_digest(plan),
        "files": list_files(folder),
        "created_with": versions("pillow", "matplotlib"),
    }
    write_json(folder / MANIFEST, manifest)
    check_readable(folder, summaries)
    commit(folder, root, force)
    return manifest


def _make_codec(folder: Path, train: ImageSplit, options: ImageOptions) -> tuple[ImageCodec, float | None]:
    size, patch, channels, count = options.image_size, options.patch_size, options.channels, options.num_components
    num_latents = (size // patch) ** 2
    if count is None:
        return ImageCodec(size, patch, channels, "pixels", num_latents, patch * patch * channels), None
    if count >= len(train.rows):
        raise UserError(
            "--latents pca:M with M below the number of training images",
            f"{count} components of {len(train.rows)} images",
            "give fewer components, more images, or --latents pixels",
        )
    values = (as_float32(images) for _, images in train.blocks())
    basis, kept = fit_components(values, count)
    np.save(folder / BASIS, basis)
    return ImageCodec(size, patch, channels, "pca", num_latents, count // num_latents, basis), kept


def _write_split(
    folder: Path, name: str, split: ImageSplit, codec: ImageCodec, vocab_size: int, statistics: LatentStatistics
) -> dict[str, int]:
    shape = (codec.latent_dim,) if codec.num_latents == 1 else (codec.num_latents, codec.latent_dim)
    dtype = np.uint8 if codec.basis is None else np.float32
    writer = StoreSplit(folder, name, shape, vocab_size, latent_dtype=dtype, with_groups=True)
    for own, images in split.blocks():
        latents = (to_patches(images, codec.patch) if codec.basis is None else codec.encode(images)).reshape(-1, *shape)
        writer.add(split.captions[own], split.tokens[own], latents, groups=split.groups[own])
        statistics.add(as_float32(latents))
    return writer.close()
