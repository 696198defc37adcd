"""Check that a store is complete and that its samples are usable for training."""

from __future__ import annotations

import array
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.codebook import check_ids
from mmldlm.data.image_codec import ImageCodec, max_image_norm
from mmldlm.data.prepare.select import caption_hashes
from mmldlm.data.prepare.tokenize import token_ids
from mmldlm.data.sentences import content_hash, hash64
from mmldlm.data.store import (
    SPLITS,
    Store,
    check_files,
    check_latents,
    load_tokenizer,
    read_manifest,
)
from mmldlm.data.unknown_tokens import check_unknown_share
from mmldlm.data.writers import LatentStatistics
from mmldlm.errors import UserError

CHECKS = (
    "checksums",
    "tokenizer",
    "shape",
    "token ids",
    "latents",
    "statistics",
    "texts",
    "duplicates",
    "leakage",
)
_BLOCK = 4096
_TOKEN_BLOCK = 1 << 20
# Number of samples whose tokens are compared with their text.
_COMPARED = 1000


@dataclass
class SplitFindings:
    """Measurements of one split.

    Attributes:
        hashes: Sorted uint64 hashes of the contents of all texts.
        norms: Norms of all latents.
        lengths: Number of tokens per sample.
        statistics: Statistics of the latents; None if some are unusable.
        num_unknown: Number of tokens that are [UNK].
        pixels: Of images: sorted distinct uint64 hashes of the decoded images; of codes none,
            which may render two images alike.
        groups: Of images: sorted distinct groups.
    """

    hashes: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    norms: np.ndarray = field(default_factory=lambda: np.empty(0))
    lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    statistics: dict[str, Any] | None = None
    num_unknown: int = 0
    pixels: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    groups: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass
class StoreReport:
    """The results of all checks of a store.

    Attributes:
        checks: Check -> its problems, one sentence each.
        splits: Split -> measurements.
        warnings: Findings that are not damage, but should be known.
    """

    checks: dict[str, list[str]]
    splits: dict[str, SplitFindings]
    warnings: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """The problems of all checks."""
        return [problem for problems in self.checks.values() for problem in problems]


def verify(root: str | os.PathLike) -> list[str]:
    """Return the problems of a store, one sentence each; none for a valid store. See `examine`."""
    return examine(root).problems


def examine(root: str | os.PathLike) -> StoreReport:
    """Run all checks of a store.

    They cover the size and SHA-256 of every file, offsets, latents (dimension, finite and non-zero
    values, norms, statistics), token ids against the tokenizer, duplicate texts in a split, and
    texts in both splits. Of images: their range, repeated pairs of image and caption, and groups
    and pixels in both splits; captions may repeat.

    Raises:
        UserError: `root` is not a store.
    """
    root = Path(root)
    manifest = read_manifest(root)
    checks: dict[str, list[str]] = {name: [] for name in CHECKS}
    for name, entry in manifest["files"].items():
        _collect(checks["checksums"], check_files, root, {"files": {name: entry}}, "checksums")
    _collect(checks["tokenizer"], load_tokenizer, root)
    absent = [split for split in SPLITS if split not in manifest["splits"]]
    checks["shape"] += [f"the {split} split is missing" for split in absent]
    findings_of: dict[str, SplitFindings] = {}
    for split in (split for split in SPLITS if split not in absent):
        try:
            store = Store(root, split, verify="sizes")
        except UserError as error:
            if _sentence(error) not in checks["checksums"]:
                checks["shape"].append(_sentence(error))
            continue
        findings_of[split] = _examine_split(store, checks)
    if len(findings_of) == 2:
        train, validation = findings_of.values()
        checks["leakage"] += find_leaks(train, validation, manifest.get("kind") == "image")
    warnings = cut_warnings(manifest)
    for split, findings in findings_of.items():
        num_tokens = int(findings.lengths.sum())
        try:
            warning = check_unknown_share(findings.num_unknown, num_tokens, split, f"{root}'s")
            warnings += [] if warning is None else [warning]
        except UserError as error:
            checks["token ids"].append(f"{_sentence(error)}: {error.fix}")
    return StoreReport(checks, findings_of, warnings)


def cut_warnings(manifest: dict[str, Any]) -> list[str]:
    """Return one sentence per split in which the encoder has read only the beginning of some
    texts.
    """
    reads = manifest.get("encoder", {}).get("max_length")
    return [
        f"{split['num_cut_by_encoder']:,} of {split['num_samples']:,} texts of {name} are longer"
        f" than the encoder reads ({reads} tokens): their latents say nothing of what comes behind"
        " (prepare with a smaller --max-tokens)"
        for name, split in manifest["splits"].items()
        if split.get("num_cut_by_encoder")
    ]


def _examine_split(store: Store, checks: dict[str, list[str]]) -> SplitFindings:
    where, manifest, findings = store.root / store.split, store.manifest, SplitFindings()
    if not len(store):
        checks["shape"].append(f"{where}: no samples")
        return findings
    for name, offsets in (("text", store.text_offsets), ("token", store.token_offsets)):
        if offsets[0] != 0 or (np.diff(offsets) < 0).any():
            checks["shape"].append(f"{where}/{name}_offsets.npy does not start at 0 and ascend")
            return findings
    findings.lengths = np.asarray(store.lengths)
    if not np.array_equal(findings.lengths, np.diff(store.token_offsets)):
        checks["shape"].append(f"{where}/lengths.npy does not hold the differences of the offsets")
    summary = manifest["splits"][store.split]
    measured = {
        "num_samples": len(store),
        "num_tokens": store.lengths.sum(),
        "max_tokens": store.lengths.max(),
    }
    checks["shape"] += [
        f"{where}: {key} is {measured[key]}, but {summary.get(key)} in the manifest"
        for key in measured
        if measured[key] != summary.get(key)
    ]
    _collect(checks["shape"], lambda: store.documents)
    _collect(checks["shape"], lambda: store.groups)
    if store.lengths.min() == 0:
        checks["shape"].append(
            f"{where}: {int((findings.lengths == 0).sum())} samples without tokens"
        )
    findings.num_unknown = _examine_tokens(store, checks["token ids"])
    _compare_tokens_with_texts(store, checks["token ids"])
    _examine_latents(store, checks, findings)
    hashes = array.array("Q")
    try:
        for index in range(len(store)):
            hashes.append(content_hash(store.text(index)))
    except UserError as error:
        checks["texts"].append(_sentence(error))
    findings.hashes = np.unique(np.array(hashes, np.uint64))
    if store.kind == "image":
        with contextlib.suppress(UserError):
            # Damaged files are reported by their checksums.
            examine_images(store, checks, findings)
        return findings
    if len(findings.hashes) < len(hashes) and not manifest.get("options", {}).get(
        "keep_duplicates"
    ):
        checks["duplicates"].append(
            f"{where}: {len(hashes) - len(findings.hashes)} texts repeat other texts of the split"
        )
    return findings


def _examine_tokens(store: Store, problems: list[str]) -> int:
    """Return the number of unknown tokens."""
    where, vocab_size = store.root / store.split, store.manifest["tokenizer"]["vocab_size"]
    special = [store.manifest["tokenizer"][f"{kind}_token_id"] for kind in ("mask", "pad")]
    num_special, num_unknown, unknown = 0, 0, store.manifest["tokenizer"].get("unk_token_id")
    for start in range(0, len(store.token_ids), _TOKEN_BLOCK):
        block = np.asarray(store.token_ids[start : start + _TOKEN_BLOCK])
        if block.min() < 0 or block.max() >= vocab_size:
            problems.append(
                f"{where}: token ids {block.min()}..{block.max()}, the vocabulary has {vocab_size}"
            )
            return num_unknown
        num_special += int(np.isin(block, special).sum())
        num_unknown += 0 if unknown is None else int((block == unknown).sum())
    if num_special:
        problems.append(f"{where}: {num_special} MASK or PAD tokens in texts")
    return num_unknown


def _compare_tokens_with_texts(store: Store, problems: list[str]) -> None:
    """Compare stored tokens with the tokens of the stored text, on samples spread over the split.

    Both are decoded: a text that was cut inside a word may have other tokens than the word's
    beginning.
    """
    try:
        tokenizer = load_tokenizer(store.root)
        tokenizer.split_special_tokens = True
        rows = np.unique(
            np.linspace(0, len(store) - 1, min(len(store), _COMPARED)).astype(np.int64)
        )
        texts = store.texts(rows)
        stored = [ids.tolist() for ids in store.tokens(rows)]
    except UserError:
        # Their own checks report these.
        return
    encoded = token_ids(tokenizer, texts)
    # Ids that the tokenizer does not have were reported.
    if any(max(ids, default=0) >= len(tokenizer) for ids in stored):
        return
    for row, text, stored_ids, encoded_ids in zip(rows.tolist(), texts, stored, encoded):
        if stored_ids == encoded_ids:
            continue
        # Special tokens in a text, such as "[UNK]", are its characters, which a tokenizer may
        # lower-case.
        found, expected = (
            "".join(str(tokenizer.decode(ids)).split()).casefold()
            for ids in (stored_ids, encoded_ids)
        )
        if found != expected:
            problems.append(
                f"{store.root / store.split}: the tokens of sample {row} are not its text: they"
                f" end in {found[-20:]!r}, the text in {text[-20:]!r}"
            )
            return


def _examine_latents(store: Store, checks: dict[str, list[str]], findings: SplitFindings) -> None:
    # Ids have neither norms nor statistics; examine_images checks their range.
    if store.num_codes is not None:
        return
    where, manifest = store.root / store.split, store.manifest
    statistics, norms = LatentStatistics(store.latent_dim, len(store) * store.latents_per_text), []
    is_valid, zero_ok = True, store.kind == "image"
    for start, block in store.latent_blocks(len(store)):
        is_valid &= _collect(
            checks["latents"], check_latents, block, str(where), store.latent_dim, start, zero_ok
        )
        norms.append(np.linalg.norm(block, axis=-1).ravel())
        if is_valid:
            statistics.add(block)
    findings.norms = np.concatenate(norms)
    finite = findings.norms[np.isfinite(findings.norms)]
    if (
        manifest.get("encoder", {}).get("normalize", False)
        and len(finite)
        and np.abs(finite - 1).max() > 1e-3
    ):
        checks["latents"].append(
            f"{where}: norms {finite.min():.4f}..{finite.max():.4f}, the encoder's latents have"
            " norm 1"
        )
    if not is_valid:
        return
    findings.statistics = statistics.result()
    if store.split == "train":
        scale = max(float(store.latent_std.max()), 1e-12)
        for name in ("mean", "std"):
            gaps = np.subtract(findings.statistics[name], manifest["latent_stats"][name])
            gap = np.abs(gaps).max() / scale
            if gap > 1e-3:
                checks["statistics"].append(
                    f"{where}: {name} of the latents differs from the manifest's by {gap:.2g}"
                    " standard deviations"
                )


def _collect(problems: list[str], check: Callable, *args: object) -> bool:
    """Run a check; return whether it passed, or add its problem."""
    try:
        check(*args)
    except UserError as error:
        problems.append(_sentence(error))
        return False
    return True


def _sentence(error: UserError) -> str:
    return f"expected {error.expected}, found {error.found}"


def examine_images(store: Store, checks: dict[str, list[str]], findings: SplitFindings) -> None:
    """Check the images of one split; problems are added to `checks`, pixels and groups to
    `findings`.

    Raises:
        UserError: the codec's files are damaged.
    """
    where, codec = store.root / store.split, ImageCodec.open(store.manifest, store.root)
    limit, hashes = max_image_norm(store.manifest), np.empty(len(store), np.uint64)
    for start, block in store.latent_blocks(len(store)):
        if store.num_codes is not None:
            try:
                check_ids(block, store.num_codes, f"{where}/latents.npy", start)
            except UserError as error:
                checks["latents"].append(f"{_sentence(error)}; {error.fix}")
                return
        norms = np.linalg.norm(block, axis=-1)
        if not (norms <= limit).all():
            checks["latents"].append(
                f"{where}: latents of norm {norms.max():.4g}, those of images are at most"
                f" {limit:.4g}"
            )
            return
        # Equal images have equal latents of an autoencoder, which is not needed for this.
        images = block if codec.latents == "vae" else codec.decode(block)
        for row, image in enumerate(images, start):
            hashes[row] = hash64(image.tobytes())
    if store.num_codes is None:
        findings.pixels = np.unique(hashes)
    if store.groups is None:
        checks["shape"].append(f"{where}: no groups.npy, expected {len(store)} of int64")
        return
    findings.groups = np.unique(store.groups)
    captions = caption_hashes([store.text(row) for row in range(len(store))])
    repeated = len(store) - len(np.unique(np.stack([hashes, captions]), axis=1).T)
    if (
        repeated
        and not store.manifest.get("options", {}).get("keep_duplicates")
        and codec.latents == "pixels"
    ):
        checks["duplicates"].append(
            f"{where}: {repeated} images repeat another with the same caption"
        )


def find_leaks(train: SplitFindings, validation: SplitFindings, of_images: bool) -> list[str]:
    """Describe what both splits share: texts; of images, whose captions may be alike, groups and
    pixels.
    """
    items = "images" if of_images else "texts"
    if of_images:
        kinds = {
            "groups": (train.groups, validation.groups),
            "images of the same pixels": (train.pixels, validation.pixels),
        }
    else:
        kinds = {"texts": (train.hashes, validation.hashes)}
    counts = {name: len(np.intersect1d(*both)) for name, both in kinds.items()}
    return [
        f"{count} {name} are in both train and validation: evaluation would see training {items}"
        for name, count in counts.items()
        if count
    ]
