"""Principal components of small images, for latents `pca:M`."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

MAX_VALUES = 4096  # of an image: the covariance has that many rows, and is decomposed as a whole


def fit_components(blocks: Iterable[np.ndarray], count: int) -> tuple[np.ndarray, float]:
    """Fit the components of largest variance (Hotelling, 1933).

    Args:
        blocks: images float32 [B, S, S, C].
        count: number of components M, below the number of images.

    Returns:
        float32 [M + 1, S * S * C], the mean and then the components, each with its largest entry
        positive; and the share of the variance that they keep.
    """
    num, total, products = 0, 0.0, 0.0
    for block in blocks:
        flat = block.reshape(len(block), -1).astype(np.float64)
        num, total, products = num + len(flat), total + flat.sum(0), products + flat.T @ flat
    mean = total / num
    variances, vectors = np.linalg.eigh(products / num - np.outer(mean, mean))
    order = np.argsort(variances)[::-1][:count]
    components = vectors[:, order].T
    largest = components[np.arange(len(components)), np.abs(components).argmax(1)]
    components *= np.sign(largest)[:, None]
    kept = float(variances[order].sum() / max(variances.clip(0).sum(), 1e-12))
    return np.concatenate([mean[None], components]).astype(np.float32), kept
