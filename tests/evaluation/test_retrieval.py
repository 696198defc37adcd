"""Ranks of known vectors."""

from __future__ import annotations

import numpy as np

from mmldlm.evaluation import metrics


def test_ranks_and_ties():
    gallery = np.eye(4)
    assert metrics.ranks(gallery * 3, gallery, np.arange(4)).tolist() == [0, 0, 0, 0]
    tilted = np.array([[0.5, 1.0, 0.2, 0.0]])
    assert [int(metrics.ranks(tilted, gallery, np.array([right]))[0]) for right in range(4)] == [
        1,
        0,
        2,
        3,
    ]
    constant = np.ones((4, 4))
    assert metrics.ranks(constant, gallery, np.arange(4)).tolist() == [
        3,
        3,
        3,
        3,
    ]  # alike vectors retrieve nothing
    assert metrics.cosine_similarity(np.zeros((1, 4)), gallery[:1]).tolist() == [0.0]
