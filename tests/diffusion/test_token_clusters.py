"""Clusters of tokens: bounds, determinism, and that near tokens share one."""

import numpy as np
import pytest

from mmldlm.diffusion.hdlm import cluster_tokens


def blobs(sizes, seed=0):
    """Vectors around one direction per size, in random order, and the blob of each."""
    random = np.random.default_rng(seed)
    kind = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
    return np.eye(len(sizes))[kind] * 5 + 0.3 * random.standard_normal(
        (len(kind), len(sizes))
    ), kind


def test_blobs_are_found_whatever_their_length_and_special_tokens_stay_alone():
    vectors, kind = blobs([30, 30, 30, 30])
    # Cosine: lengths say nothing.
    vectors *= np.random.default_rng(1).uniform(0.1, 10, (len(vectors), 1))
    clusters = cluster_tokens(vectors, 4, alone={0, 7}, seed=3)
    assert clusters[0] == clusters[7] == -1
    rest = np.setdiff1d(np.arange(len(kind)), [0, 7])
    assert len({(kind[i], clusters[i]) for i in rest}) == 4
    assert np.array_equal(clusters, cluster_tokens(vectors, 4, alone=[7, 0], seed=3))


def test_sizes_stay_within_a_tenth_and_five_times_the_mean():
    vectors, _ = blobs([560, 10, 10, 10, 10])
    for num_clusters in (10, 20):
        clusters = cluster_tokens(vectors, num_clusters, alone=(), seed=0)
        sizes = np.bincount(clusters, minlength=num_clusters)
        mean = len(vectors) / num_clusters
        assert (
            len(sizes) == num_clusters
            and sizes.min() >= max(int(0.1 * mean), 1)
            and sizes.max() <= 5 * mean
        )


@pytest.mark.parametrize("num_clusters", [1, 12])
def test_one_cluster_and_a_cluster_a_token(num_clusters):
    vectors = np.repeat(np.eye(3), 4, axis=0)  # copies: k-means++ has nothing left to choose from
    clusters = cluster_tokens(vectors, num_clusters, alone=(), seed=0)
    assert np.bincount(clusters).tolist() == [12 // num_clusters] * num_clusters
