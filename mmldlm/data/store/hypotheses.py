"""Hypotheses of a store's samples (`mmldlm hypotheses`), as the corrector's batches read them. Without torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mmldlm.data.store.manifest import sample_checksums
from mmldlm.data.store.mixture import MixedStore
from mmldlm.data.store.store import Store, check_latents
from mmldlm.errors import UserError

_ROWS_CHECKED = 50_000


class SplitHypotheses:
    """Hypotheses of one split.

    Args:
        root: folder that `mmldlm hypotheses` wrote.
        samples: the split that they belong to.

    Raises:
        UserError: they belong to another store, or are damaged.
    """

    def __init__(self, root: str | Path, samples: Store | MixedStore):
        if isinstance(samples, MixedStore):
            raise UserError(
                "data.hypotheses with data.latent_data_root, one store",
                "data.mixture",
                "name the store that the hypotheses were written for",
            )
        self.store = Store(root, samples.split)
        of = self.store.manifest.get("hypotheses", {}).get("of")
        rows = self.store.documents
        if of != sample_checksums(samples.manifest) or rows is None:
            raise UserError(
                f"hypotheses for the samples of {samples.root} in data.hypotheses={root}",
                "a store without hypotheses" if of is None else "hypotheses for other samples",
                f"write them: mmldlm hypotheses --checkpoint RUN --data {samples.root} --output-dir DIR",
            )
        for first, block in self.store.latent_blocks(_ROWS_CHECKED):
            check_latents(block, f"{root}/{samples.split}", samples.latent_dim, first, samples.kind == "image")
        self.row_of = np.full(len(samples), -1, np.int64)
        self.row_of[rows] = np.arange(len(rows))

    def arrays(
        self, ids: np.ndarray, wanted: np.ndarray, shape: tuple[int, int], pad: int, eos: int, mean: np.ndarray,
        std: np.ndarray,
    ) -> dict[str, np.ndarray]:  # fmt: skip
        """Return hypothesis_tokens [B, S] int64, hypothesis_latents fp32 in model space, hypothesis_given [B] bool.

        Args:
            ids: [B] of the samples.
            wanted: [B] bool, samples that are to read one.
            shape: (B, S) of the batch's text. A longer hypothesis is cut: no row could read it.
            mean, std: [D], the scaling into model space.
        """
        rows = self.row_of[ids]
        given = wanted & (rows >= 0)
        found = self.store.get(np.maximum(rows, 0))
        given &= np.isfinite(found.latents).reshape(len(ids), -1).all(1)
        tokens = np.full(shape, pad, np.int64)
        for row in np.flatnonzero(given):
            text = [*found.tokens[row].tolist(), eos][: shape[1]]
            tokens[row, : len(text)] = text
        latents = np.where(given.reshape(-1, *(1,) * (found.latents.ndim - 1)), (found.latents - mean) / std, 0.0)
        return {
            "hypothesis_tokens": tokens,
            "hypothesis_latents": latents.astype(np.float32),
            "hypothesis_given": given,
        }
