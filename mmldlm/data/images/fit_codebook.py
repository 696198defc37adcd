"""Make a codebook of patches without training a network: k-means, or finite scalar quantization of
four components.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from mmldlm.data.images.codebook import Codebook, exact_dtype, nearest_codes

FSQ_LEVELS = (8, 5, 5, 5)
_ITERATIONS = 40
_MARGIN = 0.01  # share of the patches beyond each end of the levels


def fit_kmeans(patches: np.ndarray, count: int, seed: int) -> Codebook:
    """Fit Lloyd's k-means (1982) from k-means++ (Arthur and Vassilvitskii, SODA 2007), in whole
    numbers.

    Distances and sums are exact, so the codes do not depend on threads or machine. A code without
    a patch moves to the patch that is worst served.

    Args:
        patches: uint8 [M, D] with at least `count` distinct ones (`distinct_patches`).
        count: Q.
        seed: of the first codes.
    """
    points, weights = distinct_patches(patches)
    assert len(points) >= count
    codes = _first_codes(
        points, weights, count, np.random.Generator(np.random.Philox(key=[seed, 0xC0DE]))
    )
    for _ in range(_ITERATIONS):
        ids, distances = nearest_codes(points, codes)
        sizes = np.bincount(ids, weights, count)
        sums = np.stack([np.bincount(ids, weights * column, count) for column in points.T], axis=1)
        means = np.rint(sums / np.maximum(sizes, 1)[:, None]).astype(np.uint8)
        empty = np.flatnonzero(sizes == 0)
        means[empty] = points[np.argsort(-weights * distances, kind="stable")[: len(empty)]]
        if (means == codes).all():
            break
        codes = means
    return Codebook("kmeans", codes)


def distinct_patches(patches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct patches uint8 [n, D] and how often each occurs fp64 [n]."""
    rows = np.ascontiguousarray(patches)
    keys = rows.view(np.dtype((np.void, rows.shape[1])))[:, 0]
    _, first, counts = np.unique(keys, return_index=True, return_counts=True)
    return rows[first], counts.astype(np.float64)


def _first_codes(
    points: np.ndarray, weights: np.ndarray, count: int, draws: np.random.Generator
) -> np.ndarray:
    """Draw codes among the patches, each with probability of its frequency times its distance to
    the earlier ones.
    """
    table = points.astype(exact_dtype(points.shape[1]))
    lengths = np.square(table).sum(1)

    def distances_to(row: int) -> np.ndarray:
        return (lengths - 2 * table @ table[row] + lengths[row]).astype(np.float64)

    chosen = [
        int(np.searchsorted(np.cumsum(weights), draws.random() * weights.sum(), side="right"))
    ]
    distances = distances_to(chosen[0])
    while len(chosen) < count:
        scores = np.cumsum(weights * distances)
        chosen.append(int(np.searchsorted(scores, draws.random() * scores[-1], side="right")))
        distances = np.minimum(distances, distances_to(chosen[-1]))
    return points[chosen]


def fit_fsq(patches: np.ndarray) -> Codebook:
    """Place codes on a grid of the four largest principal components (after FSQ, Mentzer et al.,
    arXiv 2309.15505).

    8, 5, 5 and 5 even levels from the 1st to the 99th percentile of each component, instead of
    FSQ's learned ones.

    Args:
        patches: uint8 [M, D], D at least 4.
    """
    flat = patches.astype(np.float64)
    mean = flat.mean(0)
    _, vectors = np.linalg.eigh(flat.T @ flat / len(flat) - np.outer(mean, mean))
    components = vectors[:, ::-1][:, : len(FSQ_LEVELS)].T
    components *= np.sign(components[np.arange(len(components)), np.abs(components).argmax(1)])[
        :, None
    ]
    ends = np.quantile((flat - mean) @ components.T, [_MARGIN, 1 - _MARGIN], axis=0)
    levels = [np.linspace(low, high, number) for low, high, number in zip(*ends, FSQ_LEVELS)]
    grid = np.array(list(product(*levels)))
    return Codebook("fsq", np.clip(np.rint(mean + grid @ components), 0, 255).astype(np.uint8))
