"""Hypotheses of a store's samples (`mmldlm hypotheses`), as batches read them.

Without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from mmldlm.data.manifest import sample_checksums
from mmldlm.data.mixture import MixedStore
from mmldlm.data.store import Store, check_latents
from mmldlm.errors import UserError

_ROWS_CHECKED = 50_000
# Of what `mmldlm hypotheses` writes. 1 had whole texts of the model, of their own lengths; 2 lays
# their words beside those of the samples, which is how a corrector reads them.
HYPOTHESES_VERSION = 2


class SplitHypotheses:
    """Hypotheses of one split.

    Args:
        root: Folder that `mmldlm hypotheses` wrote.
        samples: Split that they belong to.

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
        entry = self.store.manifest.get("hypotheses", {})
        of, version = entry.get("of"), entry.get("version", 1)
        rows = self.store.documents
        if of != sample_checksums(samples.manifest) or rows is None:
            raise UserError(
                f"hypotheses for the samples of {samples.root} in data.hypotheses={root}",
                "a store without hypotheses" if of is None else "hypotheses for other samples",
                f"write them: mmldlm hypotheses --checkpoint RUN --data {samples.root}"
                " --output-dir DIR",
            )
        if version != HYPOTHESES_VERSION:
            raise UserError(
                f"hypotheses of version {HYPOTHESES_VERSION} in data.hypotheses={root}",
                f"version {version}, of another mmldlm, whose words stand at other places",
                f"write them again: mmldlm hypotheses --checkpoint RUN --data {samples.root}"
                " --output-dir DIR",
            )
        if (
            len(rows) != len(self.store)
            or len(rows)
            and not 0 <= rows.min() <= rows.max() < len(samples)
        ):
            raise UserError(
                f"a sample of {samples.root}/{samples.split} for each hypothesis in {root}",
                f"documents.npy of {len(rows)} rows, {len(self.store)} hypotheses, {len(samples)}"
                " samples",
                "write the hypotheses again",
            )
        for first, block in self.store.latent_blocks(_ROWS_CHECKED):
            check_latents(
                block,
                f"{root}/{samples.split}",
                samples.latent_dim,
                first,
                samples.kind == "image",
            )
        self.row_of = np.full(len(samples), -1, np.int64)
        self.row_of[rows] = np.arange(len(rows))

    def arrays(
        self,
        ids: np.ndarray,
        wanted: np.ndarray,
        shape: tuple[int, int],
        pad: int,
        eos: int,
        vocab_size: int,
        scale: Callable[[np.ndarray], np.ndarray],
    ) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], dict[int, str]]:
        """Return tokens [B, S] int64, latents fp32 in model space, and which are given [B] bool.

        Args:
            ids: Indices of the samples. [B]
            wanted: Samples that are to read one. [B] bool
            shape: Shape (B, S) of the batch's text. A longer hypothesis is cut: no row could read
                it.
            vocab_size: Size of the vocabulary; tokens are below it.
            scale: Function that takes latents to model space.

        Returns:
            The arrays, and why the hypotheses of some of the B samples are left out: position ->
            reason.
        """
        rows = self.row_of[ids]
        has_hypothesis = wanted & (rows >= 0)
        places = np.flatnonzero(has_hypothesis)
        # No other rows: a split may have no hypothesis at all.
        stored = self.store.get(rows[places])
        tokens, reasons = np.full(shape, pad, np.int64), {}
        for row, text, latent in zip(places.tolist(), stored.tokens, stored.latents, strict=True):
            if not np.isfinite(latent).all():
                reasons[row] = (
                    "non-finite values in the latent of its hypothesis, which is left out"
                )
            elif len(text) and not 0 <= text.min() <= text.max() < vocab_size:
                reasons[row] = (
                    f"a token id of its hypothesis outside 0..{vocab_size - 1}, which is left out"
                )
            else:
                words = [*text.tolist(), eos][: shape[1]]
                tokens[row, : len(words)] = words
        has_hypothesis[list(reasons)] = False
        latents = np.zeros((len(ids), *stored.latents.shape[1:]), np.float32)
        latents[has_hypothesis] = scale(stored.latents[has_hypothesis[places]])
        return (tokens, latents, has_hypothesis), reasons
