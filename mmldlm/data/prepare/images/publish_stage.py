"""Stage 3: write the samples as one store, with a manifest that accounts for every image and
caption.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from mmldlm.data.codebook import CodeStatistics
from mmldlm.data.corpora.image_lists import GLYPHS
from mmldlm.data.image_codec import ImageCodec
from mmldlm.data.images import is_dark, to_patches
from mmldlm.data.manifest import MANIFEST
from mmldlm.data.prepare.inputs import inputs_entry
from mmldlm.data.prepare.options import ImageOptions
from mmldlm.data.prepare.publish_stage import (
    QUARANTINE,
    TOKENIZER_IDENTITY,
    check_readable,
    commit,
    latents_suffix,
    plan_digest,
    versions,
)
from mmldlm.data.prepare.read import ImageShards
from mmldlm.data.prepare.summary import add_files_not_read
from mmldlm.data.prepare.work_dir import WorkDir
from mmldlm.data.store import FORMAT, TOKENIZER_FOLDER, VERSION, as_float32
from mmldlm.data.unknown_tokens import count_unknown, describe_share
from mmldlm.data.writers import LatentStatistics, StoreSplit
from mmldlm.utils.atomic_files import list_files, write_json, write_text
from mmldlm.utils.formatting import join_some, printable
from mmldlm.utils.input_files import read_text
from mmldlm.utils.json_files import to_json
from mmldlm.utils.walk_files import LeftOut

_MAX_NAMED = 20
_DTYPES = {
    "pixels": np.uint8,
    "pca": np.float16,
    "codes": np.uint16,
    "vae": np.float16,
}  # of latents.npy
_IMAGE_KEYS = ("size", "patch", "channels", "grid", "latents", "vae", "vae_folder")


@dataclass
class ImageSplit:
    """The samples of one split.

    Attributes:
        shards: of its corpus.
        rows: [N] ascending rows of its corpus.
        captions, tokens: N texts and their token ids.
        groups: [N] int64.
    """

    shards: ImageShards
    rows: np.ndarray
    captions: list[str]
    tokens: list[np.ndarray]
    groups: np.ndarray


@dataclass
class CorpusReport:
    """What became of a corpus.

    Attributes:
        source: its name.
        counts: of its samples.
        unreadable: name -> reason of images that could not be read.
        left_out: files that are not read.
        peaks: largest value of each image of 16 bits that declares no range.
    """

    source: str
    counts: Counter
    unreadable: dict[str, str]
    left_out: LeftOut
    peaks: np.ndarray

    def entry(self, kept: int) -> dict[str, Any]:
        """Return the manifest's entry, in which every sample is accounted for."""
        dropped = {
            key[5:]: value
            for key, value in sorted(self.counts.items())
            if key.startswith("drop_") and value
        }
        lost = self.counts["read"] - kept - sum(dropped.values())
        assert lost == 0, f"{lost} samples are not accounted for: {self.counts}, {kept} kept"
        entry = {
            "source": self.source,
            "read": self.counts["read"],
            "kept": kept,
            "dropped": dropped,
        }
        entry |= self.left_out.entry()
        if dark := int(is_dark(self.peaks).sum()):
            entry["dark_16_bit_images"] = dark
        if self.counts["truncated"]:
            entry["truncated"] = self.counts["truncated"]
        if not self.unreadable:
            return entry
        named = [
            f"{printable(name)}: {reason}"
            for name, reason in list(self.unreadable.items())[:_MAX_NAMED]
        ]
        return {
            **entry,
            "unreadable": dict(Counter(self.unreadable.values())),
            "unreadable_images": named,
        }


def publish(
    options: ImageOptions,
    codec: ImageCodec,
    work: WorkDir,
    root: Path,
    plan: dict[str, Any],
    splits: dict[str, ImageSplit],
    reports: dict[str, CorpusReport],
) -> dict[str, Any]:
    """Write splits, tokenizer, basis and manifest to the work folder, then rename it; return the
    manifest.

    Args:
        reports: split -> its corpus; that of validation only with a corpus of its own.
    """
    partial = work.folder / "output"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    tokenizer = json.loads(read_text(work.folder / TOKENIZER_IDENTITY))
    summaries, statistics = {}, {}
    for name, split in splits.items():
        summaries[name], statistics[name] = _write_split(
            partial, name, split, codec, tokenizer["vocab_size"]
        )
        summaries[name]["num_unknown"] = count_unknown(split.tokens, tokenizer["unk_token_id"])
    shutil.copytree(work.folder / TOKENIZER_FOLDER, partial / TOKENIZER_FOLDER)
    for name, path in codec.files().items():
        shutil.copyfile(path, partial / name)
    _write_unreadable(partial, reports)
    own = {
        name: sum(
            summary["num_samples"]
            for key, summary in summaries.items()
            if _corpus_of(key, reports) == name
        )
        for name in reports
    }
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "kind": "image",
        "image": {
            **{key: codec.identity[key] for key in _IMAGE_KEYS if key in codec.identity},
            **_codes_entry(codec, statistics),
            "source": reports["train"].source,
        },
        "latent_dim": codec.latent_dim,
        **latents_suffix(codec.num_latents),
        "encoder": _encoder(codec),
        "latent_stats": statistics["train"] if codec.codebook is None else None,
        "tokenizer": tokenizer,
        "splits": summaries,
        "corpus": reports["train"].entry(own["train"]),
        "options": plan["options"],
        "units": plan_digest(plan),
        **inputs_entry(plan["inputs"]),
        "files": list_files(partial),
        "created_with": versions(
            "pillow", "matplotlib", *(["diffusers"] if codec.latents == "vae" else [])
        ),
    }
    if "validation" in reports:
        manifest["validation_corpus"] = reports["validation"].entry(own["validation"])
    write_json(partial / MANIFEST, manifest)
    check_readable(partial, summaries)
    commit(partial, root, options.force)
    return manifest


def _corpus_of(split: str, reports: dict[str, CorpusReport]) -> str:
    return split if split in reports else "train"


def _encoder(codec: ImageCodec) -> dict[str, Any]:
    # normalize is said, never guessed: latents of images can have norms near 1 by chance.
    entry = {"name": codec.name, "source": codec.source, "normalize": False}
    return (
        entry
        if codec.weights_sha256 is None
        else {**entry, "weights_sha256": codec.weights_sha256}
    )


def _codes_entry(codec: ImageCodec, statistics: dict[str, Any]) -> dict[str, Any]:
    """Return the number and kind of codes, and what each split says of them; nothing for other
    latents.
    """
    if codec.codebook is None:
        return {}
    return {
        "codes": len(codec.codebook),
        "codebook": codec.codebook.kind,
        "codebook_statistics": statistics,
    }


def _write_split(
    folder: Path, name: str, split: ImageSplit, codec: ImageCodec, vocab_size: int
) -> tuple[dict[str, int], dict[str, Any]]:
    """Write one split; return its summary and the statistics of its latents (of codes: of their
    use).
    """
    count, dim, codebook = codec.num_latents, codec.latent_dim, codec.codebook
    statistics: LatentStatistics | CodeStatistics = LatentStatistics(dim, len(split.rows) * count)
    if codebook is not None:
        statistics = CodeStatistics(codebook)
    writer = StoreSplit(
        folder,
        name,
        (dim,) if count == 1 else (count, dim),
        vocab_size,
        latent_dtype=_DTYPES[codec.latents],
        with_groups=True,
    )
    start = 0
    for rows, values in split.shards.blocks(split.rows):
        stop = start + len(rows)
        latents = _latents(codec, values)
        if isinstance(statistics, CodeStatistics):
            statistics.add(latents[..., 0].astype(np.int64), to_patches(values, codec.patch))
        else:
            statistics.add(as_float32(latents))
        latents = latents[:, 0] if count == 1 else latents
        writer.add(
            split.captions[start:stop],
            split.tokens[start:stop],
            latents,
            groups=split.groups[start:stop],
        )
        start = stop
    return writer.close(), statistics.result()


def _latents(codec: ImageCodec, values: np.ndarray) -> np.ndarray:
    """Return latents as they are stored, of images uint8 [n, S, S, C] or of what the autoencoder
    made of them.
    """
    if codec.latents == "pixels":
        return to_patches(values, codec.patch)
    return (
        values if codec.latents == "vae" else codec.encode(values).astype(_DTYPES[codec.latents])
    )


def _write_unreadable(folder: Path, reports: dict[str, CorpusReport]) -> None:
    lines = [
        to_json({"split": name, "image": printable(image), "reason": reason}) + "\n"
        for name, report in reports.items()
        for image, reason in report.unreadable.items()
    ]
    if lines:
        write_text(folder / QUARANTINE, "".join(lines))


def print_image_summary(
    console: Console, root: Path, manifest: dict[str, Any], seconds: float
) -> None:
    """Print the table that ends a preparation of images."""
    table, image, corpus = (
        Table(title=f"store {root}", show_header=False),
        manifest["image"],
        manifest["corpus"],
    )
    table.add_row("corpus", corpus["source"])
    table.add_row("images read", f"{corpus['read']:,}")
    for reason, number in corpus["dropped"].items():
        table.add_row(f"  dropped: {reason.replace('_', ' ')}", f"{number:,}")
    if "unreadable_images" in corpus:
        table.add_row("  such as", join_some(corpus["unreadable_images"], limit=3, separator="\n"))
    add_files_not_read(table, corpus)
    if "dark_16_bit_images" in corpus:
        table.add_row("  16 bits, below a quarter of white", f"{corpus['dark_16_bit_images']:,}")
    table.add_row("kept", f"{corpus['kept']:,}")
    if "truncated" in corpus:
        table.add_row("  captions cut", f"{corpus['truncated']:,}")
    for name, split in manifest["splits"].items():
        lengths = (
            f"mean {split['num_tokens'] / split['num_samples']:.1f}, max {split['max_tokens']}"
        )
        table.add_row(
            name,
            f"{split['num_samples']:,} images, captions of {split['num_tokens']:,} tokens"
            f" ({lengths})",
        )
        table.add_row("  [UNK]", describe_share(split["num_unknown"], split["num_tokens"]))
    table.add_row(
        "tokenizer",
        f"{manifest['tokenizer']['key']}, {manifest['tokenizer']['vocab_size']:,} tokens",
    )
    color = "gray" if image["channels"] == 1 else "RGB"
    table.add_row(
        "images", f"{image['size']} x {image['size']} {color}, {manifest['encoder']['name']}"
    )
    count = manifest.get("latents_per_text", 1)
    kind = (
        f"of {manifest['latent_dim']}"
        if "codes" not in image
        else f"ids of {image['codes']:,} codes"
    )
    table.add_row("latents", f"{count} {kind} (patch {image['patch']})")
    for name, found in image.get("codebook_statistics", {}).items():
        sharpness = "exact" if found["psnr"] is None else f"PSNR {found['psnr']:.1f} dB"
        use = (
            f"{found['used_codes']:,} codes in use, {found['entropy_bits']:.2f} bits each without"
            " context"
        )
        table.add_row(f"  codebook, {name}", f"{sharpness}; {use}")
    table.add_row(
        "size", f"{sum(entry['bytes'] for entry in manifest['files'].values()) / 2**20:.1f} MiB"
    )
    table.add_row("time", f"{seconds:.0f} s")
    console.print(table)
    console.print(
        f"look: mmldlm verify-data {shlex.quote(str(root))} --sheet FILE.png", soft_wrap=True
    )
    preset = _preset_for(image)
    key = shlex.quote(f"data.latent_data_root={root}")
    console.print(f"next: mmldlm config --config-name {preset} {key}", soft_wrap=True)


def _preset_for(image: dict[str, Any]) -> str:
    """Return the preset that trains on a store with this `image` entry of its manifest."""
    if "codes" in image:
        return "image_text_discrete"
    if image["latents"] == "vae":
        return "image_text_vae_512"
    if image["source"].startswith(f"{GLYPHS}:"):
        return "image_text_quick"
    return (
        "image_text_256"
        if image["latents"] == "pixels" and image["size"] >= 256
        else "image_text_continuous"
    )
