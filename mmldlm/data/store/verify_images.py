"""Checks that only stores of images need: repeated pairs, leakage by group and by pixels, and the
codec.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from mmldlm.data.images.codebook import check_ids
from mmldlm.data.images.codec import ImageCodec, max_image_norm
from mmldlm.data.sentences import content_hash
from mmldlm.data.store.store import Store
from mmldlm.errors import UserError


@dataclass
class ImageFindings:
    """Measurements of the images of one split.

    Attributes:
        pixels: sorted distinct uint64 hashes of the decoded images; of codes none, which may
            render two images alike.
        groups: sorted distinct groups.
    """

    pixels: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    groups: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))


def examine_images(store: Store, checks: dict[str, list[str]]) -> ImageFindings:
    """Check the images of one split; problems are added to `checks`.

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
                checks["latents"].append(
                    f"expected {error.expected}, found {error.found}; {error.fix}"
                )
                return ImageFindings()
        norms = np.linalg.norm(block, axis=-1)
        if not (norms <= limit).all():
            checks["latents"].append(
                f"{where}: latents of norm {norms.max():.4g}, those of images are at most"
                f" {limit:.4g}"
            )
            return ImageFindings()
        # Equal images have equal latents of an autoencoder, which is not needed for this.
        for row, image in enumerate(
            block if codec.latents == "vae" else codec.decode(block), start
        ):
            hashes[row] = int.from_bytes(
                hashlib.blake2b(image.tobytes(), digest_size=8).digest(), "big"
            )
    own = np.unique(hashes) if store.num_codes is None else np.empty(0, np.uint64)
    groups = store.groups
    if groups is None or len(groups) != len(store) or groups.dtype != np.int64:
        found = (
            "no groups.npy"
            if groups is None
            else f"groups.npy of {len(groups)} rows, {groups.dtype}"
        )
        checks["shape"].append(f"{where}: {found}, expected {len(store)} of int64")
        return ImageFindings(own)
    captions = np.array([content_hash(store.text(row)) for row in range(len(store))], np.uint64)
    repeated = len(store) - len(np.unique(np.stack([hashes, captions]), axis=1).T)
    if (
        repeated
        and not store.manifest.get("options", {}).get("keep_duplicates")
        and codec.latents == "pixels"
    ):
        checks["duplicates"].append(
            f"{where}: {repeated} images repeat another with the same caption"
        )
    return ImageFindings(own, np.unique(groups))


def image_leaks(train: ImageFindings, validation: ImageFindings) -> list[str]:
    """Describe what both splits share: groups, and images of the same pixels."""
    kinds = (
        ("groups", train.groups, validation.groups),
        ("images of the same pixels", train.pixels, validation.pixels),
    )
    counts = [(name, len(np.intersect1d(left, right))) for name, left, right in kinds]
    return [
        f"{count} {name} are in both train and validation: evaluation would see training images"
        for name, count in counts
        if count
    ]
