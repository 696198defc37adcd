"""Codebooks: k-means finds clusters and wastes no code, a function of patches and seed."""

from __future__ import annotations

import numpy as np

from mmldlm.data.codebook import nearest_codes
from mmldlm.data.prepare.fit_codec import distinct_patches, fit_kmeans


def patches_around(centers: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, len(centers), count)
    return (centers[rows].astype(int) + rng.integers(-3, 4, (count, centers.shape[1]))).astype(
        np.uint8
    )


def test_separate_clusters_are_found_whatever_the_order_of_patches():
    centers = np.array(
        [[20, 20, 200, 200], [200, 20, 20, 20], [100, 100, 100, 100], [30, 220, 30, 220]], np.uint8
    )
    patches = patches_around(centers, 600)
    found = fit_kmeans(patches, 4, seed=3)
    assert np.sort(nearest_codes(centers, found.values)[1]).max() <= 4 and len(found) == 4
    shuffled = patches[np.random.default_rng(9).permutation(len(patches))]
    np.testing.assert_array_equal(fit_kmeans(shuffled, 4, seed=3).values, found.values)


def test_more_codes_are_sharper_and_none_is_wasted():
    patches = np.random.default_rng(0).integers(0, 256, (900, 6), dtype=np.uint8)
    patches[:500] = 255  # most patches are white: one code is enough for them
    errors = []
    for count in (2, 16, 128, len(distinct_patches(patches)[0])):
        ids, distances = nearest_codes(patches, fit_kmeans(patches, count, seed=1).values)
        assert len(np.unique(ids)) == count
        errors.append(int(distances.sum()))
    assert errors == sorted(errors, reverse=True) and errors[-1] == 0


def test_distinct_patches_and_their_numbers():
    points, counts = distinct_patches(np.array([[1, 2], [0, 9], [1, 2]], np.uint8))
    assert points.tolist() == [[0, 9], [1, 2]] and counts.tolist() == [1, 2]
