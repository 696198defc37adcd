"""Figures of pictures [N, S, S, C] uint8: errors, similarity and retrieval after centering, seams,
copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mmldlm.data.codebook import nearest_codes
from mmldlm.data.image_codec import ImageCodec
from mmldlm.data.store import Store
from mmldlm.evaluation import metrics
from mmldlm.evaluation.sentences import Sentences
from mmldlm.evaluation.statistics import Estimate, mean, ratio


def as_vectors(images: np.ndarray) -> np.ndarray:
    """Return [N, S * S * C] fp32 pixels in -1 .. 1."""
    return images.reshape(len(images), -1).astype(np.float32) / 127.5 - 1


@dataclass(frozen=True)
class Gallery:
    """The unseen images among which made ones are found again.

    Attributes:
        images: [N, S, S, C] uint8.
        groups: [N] int64; images of one group are hits of each other, as are images of one
            caption.
        center: [S * S * C] mean training image, subtracted before a cosine: all images share most
            of it.
    """

    images: np.ndarray
    groups: np.ndarray
    center: np.ndarray

    def centered(self, images: np.ndarray) -> np.ndarray:
        """Return [N, S * S * C] pixels less the mean training image."""
        return as_vectors(images) - self.center

    def part(self, rows: Sequence[int]) -> Gallery:
        """Return some images alone."""
        return Gallery(self.images[rows], self.groups[rows], self.center)

    def chance_recall(self, rank: int) -> float:
        """Return the recall of a guess: that a random order of the images has one of the right
        group among its first `rank`, on average.
        """
        sizes = np.unique(self.groups, return_counts=True)[1].tolist()
        total = len(self.images)
        orders = math.comb(total, min(rank, total))
        missed = [math.comb(total - size, min(rank, total)) / orders for size in sizes]
        return sum(size * (1 - share) for size, share in zip(sizes, missed)) / total


def group_ids(
    groups: np.ndarray | None, images: np.ndarray, captions: Sequence[Sequence[int]] | None = None
) -> np.ndarray:
    """Return [N] int64: equal for images of one group, of equal pixels or, where captions are
    given, of one caption, also by way of other images.
    """
    keys = [np.unique(images.reshape(len(images), -1), axis=0, return_inverse=True)[1]]
    if groups is not None:
        keys.append(np.unique(groups, return_inverse=True)[1])
    if captions is not None:
        numbers: dict[tuple, int] = {}
        own = [numbers.setdefault(tuple(caption), len(numbers)) for caption in captions]
        keys.append(np.array(own))
    found, before = np.arange(len(images)), None
    while before is None or (found != before).any():
        before = found
        for key in keys:
            # All that share a key take the least number among them.
            least = np.full(len(images), len(images))
            np.minimum.at(least, key.reshape(-1), found)
            found = least[key.reshape(-1)]
    return found


def ranks(made: np.ndarray, gallery: Gallery) -> np.ndarray:
    """Return [Q] int64: how many images of other groups are as near to a made one as its own, or
    nearer.

    Args:
        made: [Q, S, S, C] uint8; the q-th was made from the caption of the q-th image of the
            gallery.
    """
    return metrics.ranks(
        gallery.centered(made),
        gallery.centered(gallery.images),
        np.arange(len(made)),
        gallery.groups,
    )


def seam_ratio(images: np.ndarray, patch: int) -> Estimate:
    """Return the mean step between neighboring pixels across patch borders over that inside of
    patches.
    """
    pixels = images.astype(np.float64)
    across, inside = np.zeros(len(images)), np.zeros(len(images))
    num_across = num_inside = 0
    for axis in (1, 2):
        steps = np.abs(np.diff(pixels, axis=axis)).mean(axis=3 - axis).mean(-1)  # [N, S - 1]
        is_border = np.arange(1, pixels.shape[axis]) % patch == 0
        across += steps[:, is_border].sum(1)
        inside += steps[:, ~is_border].sum(1)
        num_across += int(is_border.sum())
        num_inside += int((~is_border).sum())
    return ratio(across / max(num_across, 1), inside / max(num_inside, 1), "across / inside")


def picture_estimates(
    made: np.ndarray, partner: np.ndarray, gallery: Gallery, patch: int | None
) -> dict[str, Estimate]:
    """Compare made images with those whose captions they were made from.

    Args:
        made: [Q, S, S, C] uint8, of the first Q images of the gallery.
        partner: [Q] another image for each: what was made from its caption is the shuffled
            control.
        patch: Width of a patch; None: the latents are no patches. Seams are measured where patches
            have an inside and neighbors.
    """
    real, unit = gallery.images[: len(made)], f"share, of {len(gallery.images)}"
    right, shuffled, cosine, other = np.zeros((4, len(made)))
    block = max(1, _BLOCK_BYTES // (8 * made[0].size))
    for start in range(0, len(made), block):
        rows = slice(start, start + block)
        for images, error, similarity in (
            (made[rows], right, cosine),
            (made[partner[rows]], shuffled, other),
        ):
            error[rows] = ((as_vectors(real[rows]) - as_vectors(images)) ** 2).mean(1)
            similarity[rows] = metrics.cosine_similarity(
                gallery.centered(images), gallery.centered(real[rows])
            )
    found = ranks(made, gallery)
    estimates = {
        "recall_at_1": mean(found < 1, unit),
        "recall_at_5": mean(found < 5, unit),
        "image_cosine": mean(cosine, "cosine"),
        "image_cosine_gap": mean(cosine - other, "cosine"),
        "pixel_mse": mean(right, "squared, of -1 .. 1"),
        "pixel_mse_shuffled": mean(shuffled, "squared, of -1 .. 1"),
        "pixel_mse_ratio": ratio(right, shuffled, "right / shuffled"),
    }
    if patch is not None and 1 < patch < max(made.shape[1:3]):
        own_seams, real_seams = seam_ratio(made, patch), seam_ratio(real, patch)
        estimates |= {"seam_ratio": own_seams, "seam_ratio_real": real_seams}
        # Constant images have no steps at all, and their ratio says nothing.
        if own_seams.value > 0 and real_seams.value > 0:
            relative = np.hypot(own_seams.se / own_seams.value, real_seams.se / real_seams.value)
            value = own_seams.value / real_seams.value
            estimates["seam_ratio_over_real"] = Estimate(
                value, float(value * relative), "made / real", len(made)
            )
    return estimates


def nearest(
    images: np.ndarray, blocks: Iterable[tuple[int, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the row of the nearest image of the blocks [N] int64, and the root mean square
    distance of their pixels in -1 .. 1 [N] fp64, 0 for equal images alone.

    Args:
        images: [N, S, S, C] uint8.
        blocks: (first row, [n, S, S, C] uint8) of the training split.
    """
    queries = images.reshape(len(images), -1)
    best = np.full(len(queries), np.iinfo(np.int64).max)
    rows = np.zeros(len(queries), dtype=np.int64)
    for first, block in blocks:
        index, squares = nearest_codes(queries, block.reshape(len(block), -1))
        rows = np.where(squares < best, first + index, rows)
        best = np.minimum(best, squares)
    return rows, np.sqrt(best / queries.shape[1]) / 127.5


MAX_COMPARED = 200_000
"""Training images compared, spread over the split; it bounds the time, blocks bound the memory."""
MAX_DECODED = 2_000
"""The same where an autoencoder must make them, several times in an evaluation."""
_BLOCK_BYTES = 1 << 26


class TrainingImages:
    """Reads the training split as pixels, of `limit` images or little more, spread evenly over it.

    Args:
        store: Store of images, any split.
        codec: Codec of its latents.
    """

    def __init__(self, store: Store, codec: ImageCodec):
        self.store = Store(store.root, "train")
        self.limit = MAX_DECODED if codec.latents == "vae" else MAX_COMPARED
        self.codec = codec

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first row, images [n, S, S, C] uint8)."""
        rows = max(1, _BLOCK_BYTES // math.prod(self.codec.image_shape))
        for first, latents in self.store.latent_blocks(self.limit):
            for start in range(0, len(latents), rows):
                yield first + start, self.codec.decode(latents[start : start + rows])

    def mean(self) -> np.ndarray:
        """Return the mean image [S * S * C] in -1 .. 1."""
        total, count = np.zeros(1), 0
        for _, images in self.blocks():
            total, count = total + as_vectors(images).sum(0, dtype=np.float64), count + len(images)
        return (total / count).astype(np.float32)

    def captions(self, rows: np.ndarray) -> list[list[int]]:
        """Return the ids of captions, without EOS."""
        return [tokens.tolist() for tokens in self.store.tokens(rows)]

    def names(
        self, images: np.ndarray, groups: np.ndarray | None, sentences: Sentences
    ) -> list[set]:
        """Return N sets of captions (tuples of ids) of all images that are equal to, or in one
        group with, each image.

        Args:
            images: [N, S, S, C] uint8, unseen.
            groups: [N] of these, as in the store; None where it has none.
        """
        own = group_ids(groups, images).tolist()
        names: dict[int, set] = {group: set() for group in own}
        # Of the pixels, or of the number of a group in the store.
        group_of: dict[bytes | int, int] = {}
        for row, group in enumerate(own):
            names[group].add(tuple(sentences.tokens[row]))
            group_of[images[row].tobytes()] = group
            if groups is not None:
                group_of[int(groups[row])] = group
        stored = None if groups is None else self.store.groups
        for first, block in self.blocks():
            for row, image in enumerate(block, first):
                known = group_of.get(image.tobytes())
                if known is None and stored is not None:
                    known = group_of.get(int(stored[row]))
                if known is not None:
                    names[known].add(tuple(self.captions(np.array([row]))[0]))
        return [names[group] for group in own]
