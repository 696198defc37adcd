"""Clusters of tokens for hierarchical diffusion: spherical k-means whose cluster sizes are
bounded.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from mmldlm.utils.counter_rng import Stream, generator

SMALLEST, LARGEST = 0.1, 5.0  # sizes in units of the mean (HDLM)
# Unit vectors are rounded to this grid. Products and sums of such integers are exact in fp32, in
# any order, so every rank, machine and number of threads finds the same clusters.
_GRID = 1024


def cluster_tokens(
    vectors: np.ndarray, num_clusters: int, alone: Collection[int], seed: int, rounds: int = 20
) -> np.ndarray:
    """K-means by cosine, started with k-means++ (Arthur and Vassilvitskii, SODA 2007).

    A function of its arguments on every machine: draws are counter-based, sums are those of
    integers, and ties go to the lower index.

    Args:
        vectors: [V, D], one per token; zeros where nothing is known of a token, which then goes to
            any cluster.
        num_clusters: n, at most the number of tokens to cluster.
        alone: tokens in no cluster (special tokens).
        seed: of the starting centers.
        rounds: most rounds of k-means; it ends when no token moves.

    Returns:
        [V] int64, cluster of every token, -1 for those alone. Every cluster has between SMALLEST
        and LARGEST times the mean number of tokens, and at least one.

    Raises:
        ValueError: more clusters than tokens.
    """
    words = np.setdiff1d(np.arange(len(vectors)), np.array(sorted(alone), dtype=np.int64))
    if not 1 <= num_clusters <= len(words):
        raise ValueError(f"{num_clusters} clusters of {len(words)} tokens")
    is_known = vectors[words].any(1)
    if is_known.sum() < num_clusters:
        is_known[:] = True
    found = np.empty(len(words), dtype=np.int64)
    found[is_known] = _k_means(vectors[words[is_known]], num_clusters, seed, rounds)
    found[~is_known] = np.arange(len(words) - is_known.sum()) % num_clusters
    clusters = np.full(len(vectors), -1, dtype=np.int64)
    clusters[words] = found
    return clusters


def _k_means(vectors: np.ndarray, num_clusters: int, seed: int, rounds: int) -> np.ndarray:
    """Cluster of every row [rows]; sizes are bounded."""
    points = _unit(vectors.astype(np.float64)).astype(np.float32)
    mean = len(points) / num_clusters
    bounds = (
        max(int(SMALLEST * mean), 1),
        max(int(LARGEST * mean), -(-len(points) // num_clusters)),
    )
    centers = _starting_centers(points, num_clusters, generator(seed, Stream.TOKEN_CLUSTERS))
    found = np.full(len(points), -1)
    for _ in range(rounds):
        before, found = found, _bounded_assignment(points @ centers.T, *bounds)
        if np.array_equal(before, found):
            break
        by_cluster = np.argsort(found, kind="stable")  # no cluster is empty
        starts = np.searchsorted(found[by_cluster], np.arange(num_clusters))
        centers = _unit(np.add.reduceat(points[by_cluster], starts, dtype=np.float64)).astype(
            np.float32
        )
    return found


def _unit(rows: np.ndarray) -> np.ndarray:
    """Unit vectors times _GRID, rounded; a row of zeros stays one."""
    norms = np.sqrt(np.square(rows).sum(1, keepdims=True))
    return np.rint(rows * (_GRID / np.where(norms > 0, norms, 1.0)))


def _starting_centers(points: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """k-means++: every further center is drawn in proportion to its squared distance from those
    chosen.
    """
    chosen = [int(random.integers(len(points)))]
    distance = np.full(len(points), np.inf)
    for _ in range(count - 1):
        cosine = (points @ points[chosen[-1]]).astype(np.float64)
        distance = np.minimum(distance, np.maximum(2 * (_GRID**2 - cosine), 0))
        distance[chosen] = 0
        cumulative = distance.cumsum()
        if cumulative[-1] <= _GRID:  # only copies of chosen points are left
            chosen.append(int(np.setdiff1d(np.arange(len(points)), chosen)[0]))
            continue
        chosen.append(
            int(np.searchsorted(cumulative, random.random() * cumulative[-1], side="right"))
        )
    return points[chosen]


def _bounded_assignment(similarity: np.ndarray, smallest: int, largest: int) -> np.ndarray:
    """[points, n] similarities -> nearest cluster [points], no cluster below `smallest` or above
    `largest`.

    A cluster that is too large keeps its nearest points; the others go to their nearest cluster
    with room. Then those that are too small take their nearest points from clusters that can spare
    them.
    """
    found = similarity.argmax(1)
    sizes = np.bincount(found, minlength=similarity.shape[1])
    pool = []
    for cluster in np.flatnonzero(sizes > largest):
        members = np.flatnonzero(found == cluster)
        pool.append(members[np.argsort(-similarity[members, cluster], kind="stable")[largest:]])
        sizes[cluster] = largest
    for point in np.concatenate(pool) if pool else ():
        cluster = np.where(sizes < largest, similarity[point], -np.inf).argmax()
        found[point], sizes[cluster] = cluster, sizes[cluster] + 1
    for cluster in np.flatnonzero(sizes < smallest):
        for point in np.argsort(-similarity[:, cluster], kind="stable"):
            if sizes[cluster] >= smallest:
                break
            if sizes[found[point]] > smallest and found[point] != cluster:
                sizes[found[point]] -= 1
                found[point], sizes[cluster] = cluster, sizes[cluster] + 1
    return found
