"""How near an embedding made from text comes to the encoder's: cosine, retrieval among unseen sentences, norm."""

from __future__ import annotations

import numpy as np

_BLOCK = 1024


def normalize(vectors: np.ndarray) -> np.ndarray:
    """[..., D] scaled to norm 1; a zero vector stays zero (its cosine with anything is 0)."""
    vectors = np.asarray(vectors, dtype=np.float64)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def cosine_similarity(made: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """[N] cosine of each pair of rows of two [N, D]; of two [N, M, D] the mean over the M latents of a text."""
    return mean_over_latents((normalize(made) * normalize(truth)).sum(-1))


def mean_over_latents(values: np.ndarray) -> np.ndarray:
    """[N] of [N], or of [N, M] the mean over the latents of a text."""
    return values if values.ndim == 1 else values.mean(1)


def pool_latents(latents: np.ndarray) -> np.ndarray:
    """[N, D] that stand for texts in retrieval: their latents, or of [N, M, D] the mean over the latents of a text."""
    return latents if latents.ndim == 2 else latents.mean(1)


def ranks(made: np.ndarray, pool: np.ndarray, right: np.ndarray) -> np.ndarray:
    """[Q] 0-based place of the right row of the pool among all its rows, by cosine with what was made.

    A tie counts against the query, so vectors that are all alike retrieve nothing.

    Args:
        made: [Q, D]. pool: [N, D]. right: [Q] int rows of the pool.
    """
    made, pool = normalize(made), normalize(pool)
    places = np.empty(len(made), dtype=np.int64)
    for start in range(0, len(made), _BLOCK):
        rows = slice(start, start + _BLOCK)
        similar = made[rows] @ pool.T
        own = similar[np.arange(len(similar)), right[rows]]
        places[rows] = (similar >= own[:, None] - 1e-12).sum(1) - 1
    return places
