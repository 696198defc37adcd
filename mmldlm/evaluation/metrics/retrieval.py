"""Similarity of sampled and encoded latents: cosine, and retrieval among unseen sentences."""

from __future__ import annotations

import numpy as np

_BLOCK = 1024


def normalize(vectors: np.ndarray) -> np.ndarray:
    """Scale [..., D] to norm 1; a zero vector stays zero (its cosine with any vector is 0)."""
    vectors = np.asarray(vectors, dtype=np.float64)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def cosine_similarity(predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return [N] cosines of the rows of two [N, D]; for [N, M, D], means over the M latents of a
    text.
    """
    return mean_over_latents((normalize(predictions) * normalize(targets)).sum(-1))


def mean_over_latents(values: np.ndarray) -> np.ndarray:
    """Return [N] unchanged; for [N, M], the means over the latents of a text."""
    return values if values.ndim == 1 else values.mean(1)


def pool_latents(latents: np.ndarray) -> np.ndarray:
    """Return one vector per text, [N, D]; for [N, M, D], the means over the latents of a text."""
    return latents if latents.ndim == 2 else latents.mean(1)


def ranks(predictions: np.ndarray, gallery: np.ndarray, target_index: np.ndarray) -> np.ndarray:
    """Return the 0-based rank of each query's target among the gallery by cosine, [Q] int64.

    A tie counts against the query, so identical vectors retrieve nothing.

    Args:
        predictions: [Q, D] queries.
        gallery: [N, D].
        target_index: [Q] rows of the gallery.
    """
    predictions, gallery = normalize(predictions), normalize(gallery)
    result = np.empty(len(predictions), dtype=np.int64)
    for start in range(0, len(predictions), _BLOCK):
        rows = slice(start, start + _BLOCK)
        similarity = predictions[rows] @ gallery.T
        target = similarity[np.arange(len(similarity)), target_index[rows]]
        result[rows] = (similarity >= target[:, None] - 1e-12).sum(1) - 1
    return result
