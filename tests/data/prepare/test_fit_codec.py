"""Codebooks: k-means finds clusters and wastes no code, FSQ is a grid; both are functions of
patches and seed.
"""

from __future__ import annotations

import numpy as np

from mmldlm.data.codebook import FSQ_LEVELS, nearest_codes
from mmldlm.data.prepare.fit_codec import distinct_patches, fit_fsq, fit_kmeans


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


def test_fsq_places_codes_on_a_grid_of_the_largest_components():
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.normal(size=(12, 4)))[0].T
    spread = rng.uniform(-1, 1, (5000, 4)) * [90, 50, 30, 20]
    patches = np.clip(np.rint(128 + spread @ axes), 0, 255).astype(np.uint8)
    found = fit_fsq(patches)
    assert len(found) == np.prod(FSQ_LEVELS) == 1000 and found.name == "codes:fsq"
    error = np.sqrt(nearest_codes(patches, found.values)[1].mean())
    assert error < 0.25 * np.sqrt(((patches - patches.mean(0)) ** 2).sum(1).mean())
    assert len(np.unique(nearest_codes(patches, found.values)[0])) > 900
