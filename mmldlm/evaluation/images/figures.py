"""Figures of pictures [N, S, S, C] uint8: errors, similarity and retrieval after centering, seams,
copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mmldlm.evaluation.metrics import retrieval
from mmldlm.evaluation.statistics import Estimate, mean, proportion, ratio

_BLOCK = 512


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

    def first(self, count: int) -> Gallery:
        """Return the first images alone."""
        return Gallery(self.images[:count], self.groups[:count], self.center)


def group_ids(
    groups: np.ndarray | None, images: np.ndarray, captions: Sequence[Sequence[int]] | None = None
) -> np.ndarray:
    """Return [N] int64: equal for images of one group, of equal pixels or, where captions are
    given, of one caption.
    """
    pixels = np.unique(images.reshape(len(images), -1), axis=0, return_inverse=True)[1].reshape(-1)
    found = pixels if groups is None else _joined(groups, pixels)
    if captions is None:
        return found
    numbers: dict[tuple, int] = {}
    return _joined(
        found, np.array([numbers.setdefault(tuple(caption), len(numbers)) for caption in captions])
    )


def _joined(groups: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return groups [N] int64, those that share a value of `others` [N] joined."""
    parent = {int(group): int(group) for group in groups}

    def root(group: int) -> int:
        while parent[group] != group:
            group = parent[group]
        return group

    first: dict[int, int] = {}
    for value, group in zip(others.tolist(), groups.tolist(), strict=True):
        parent[root(int(group))] = root(first.setdefault(value, int(group)))
    return np.array([root(int(group)) for group in groups], dtype=np.int64)


def ranks(made: np.ndarray, gallery: Gallery) -> np.ndarray:
    """Return [Q] int64: how many images of other groups are as near to a made one as its own, or
    nearer.

    Args:
        made: [Q, S, S, C] uint8; the q-th was made from the caption of the q-th image of the
            gallery.
    """
    queries, keys = (
        retrieval.normalize(gallery.centered(images)) for images in (made, gallery.images)
    )
    result = np.empty(len(made), dtype=np.int64)
    for start in range(0, len(made), _BLOCK):
        similarity = queries[start : start + _BLOCK] @ keys.T
        is_hit = gallery.groups[start : start + len(similarity), None] == gallery.groups[None]
        best = np.where(is_hit, similarity, -np.inf).max(1, keepdims=True)
        result[start : start + len(similarity)] = ((similarity >= best - 1e-12) & ~is_hit).sum(1)
    return result


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
        num_across, num_inside = (
            num_across + int(is_border.sum()),
            num_inside + int((~is_border).sum()),
        )
    return ratio(across / max(num_across, 1), inside / max(num_inside, 1), "across / inside")


def picture_estimates(
    made: np.ndarray, partner: np.ndarray, gallery: Gallery, patch: int | None
) -> dict[str, Estimate]:
    """Compare made images with those whose captions they were made from.

    Args:
        made: [Q, S, S, C] uint8, of the first Q images of the gallery.
        partner: [Q] another image for each: what was made from its caption is the shuffled
            control.
        patch: width of a patch; None: the latents are no patches, and seams are not measured.
    """
    real, unit = gallery.images[: len(made)], f"share, of {len(gallery.images)}"
    own, true = as_vectors(made), as_vectors(real)
    right, shuffled = ((true - vectors) ** 2 for vectors in (own, own[partner]))
    cosine, other = (
        retrieval.cosine_similarity(gallery.centered(images), gallery.centered(real))
        for images in (made, made[partner])
    )
    found = ranks(made, gallery)
    estimates = {
        "recall_at_1": proportion(found < 1, unit),
        "recall_at_5": proportion(found < 5, unit),
        "image_cosine": mean(cosine, "cosine"),
        "image_cosine_gap": mean(cosine - other, "cosine"),
        "pixel_mse": mean(right.mean(1), "squared, of -1 .. 1"),
        "pixel_mse_shuffled": mean(shuffled.mean(1), "squared, of -1 .. 1"),
        "pixel_mse_ratio": ratio(right.mean(1), shuffled.mean(1), "right / shuffled"),
    }
    if patch is not None:
        own_seams, real_seams = seam_ratio(made, patch), seam_ratio(real, patch)
        estimates |= {"seam_ratio": own_seams, "seam_ratio_real": real_seams}
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
    distance to it [N] fp64.

    Args:
        images: [N, S, S, C] uint8.
        blocks: (first row, [n, S, S, C] uint8) of the training split.
    """
    queries = as_vectors(images)
    best, rows = np.full(len(queries), np.inf), np.zeros(len(queries), dtype=np.int64)
    for first, block in blocks:
        keys = as_vectors(block)
        squares = (queries**2).sum(1)[:, None] - 2 * queries @ keys.T + (keys**2).sum(1)[None]
        index = squares.argmin(1)
        value = squares[np.arange(len(squares)), index]
        rows = np.where(value < best, first + index, rows)
        best = np.minimum(best, value)
    return rows, np.sqrt(np.maximum(best, 0) / queries.shape[1])
