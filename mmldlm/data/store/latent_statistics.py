"""Statistics of a store's latents, accumulated block by block."""

from __future__ import annotations

from typing import Any

import numpy as np

# Rows in the covariance: its cost grows with D^2, and more rows do not change its spectrum.
COVARIANCE_ROWS = 262_144


class LatentStatistics:
    """Mean, standard deviation, norms and effective rank of latents, accumulated in float64.

    Args:
        latent_dim: D.
        num_expected: number of rows to come; above `covariance_rows` the effective rank uses every
            n-th block only.
        covariance_rows: about the most rows in the covariance.
    """

    def __init__(
        self, latent_dim: int, num_expected: int = 0, covariance_rows: int = COVARIANCE_ROWS
    ):
        self._num, self._sum, self._squares = 0, np.zeros(latent_dim), np.zeros(latent_dim)
        self._products, self._product_sum = (
            np.zeros((latent_dim, latent_dim)),
            np.zeros(latent_dim),
        )
        self._num_products = 0
        self._stride = -(-num_expected // covariance_rows) if num_expected > covariance_rows else 1
        self._num_blocks = 0
        self._norms = [np.inf, 0.0, 0.0]

    def add(self, latents: np.ndarray) -> None:
        """Add the vectors of a block [..., D]."""
        if not len(latents):
            return
        block = latents.reshape(-1, latents.shape[-1]).astype(np.float64)
        norms = np.linalg.norm(block, axis=1)
        self._num += len(block)
        self._sum += block.sum(0)
        self._squares += np.square(block).sum(0)
        if self._num_blocks % self._stride == 0:
            self._products += block.T @ block
            self._product_sum += block.sum(0)
            self._num_products += len(block)
        self._num_blocks += 1
        low, total, high = self._norms
        self._norms = [min(low, norms.min()), total + norms.sum(), max(high, norms.max())]

    def result(self) -> dict[str, Any]:
        """Return the manifest's `latent_stats`.

        The effective rank is exp of the entropy of the covariance's normalized eigenvalues (Roy
        and Vetterli, 2007), over `effective_rank_samples` rows.
        """
        mean = self._sum / self._num
        variance = np.clip(self._squares / self._num - np.square(mean), 0, None)
        centre = self._product_sum / self._num_products
        covariance = self._products / self._num_products - np.outer(centre, centre)
        eigenvalues = np.clip(np.linalg.eigvalsh(covariance), 0, None)
        total = eigenvalues.sum()
        share = eigenvalues[eigenvalues > 0] / total if total > 0 else np.ones(1)
        return {
            "mean": mean.tolist(),
            "std": np.sqrt(variance).tolist(),
            "num_samples": self._num,
            "norm": {
                "min": self._norms[0],
                "mean": self._norms[1] / self._num,
                "max": self._norms[2],
            },
            "effective_rank": float(np.exp(-(share * np.log(share)).sum())),
            "effective_rank_samples": self._num_products,
        }
