"""Several stores as one, for training on a mixture: ids count through the stores in the given order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.store.store import Rows, Store, latent_shape
from mmldlm.errors import UserError

# Latents of two stores are comparable if these entries are equal.
_ENCODER_KEYS = ("name", "weights_sha256", "pooling", "normalize", "prefix", "cut_to")


class MixedStore:
    """One split of several stores that have one tokenizer and one encoder.

    Args:
        stores: of one split.
        weights: share of each store in training; the latent statistics are those of the mixture.

    Raises:
        UserError: their tokenizers, encoders or latent shapes differ.
    """

    def __init__(self, stores: Sequence[Store], weights: Sequence[float]):
        self.stores, self.weights, self.root = list(stores), list(weights), stores[0].root
        first = stores[0].manifest
        for store in stores[1:]:
            for subject, own, expected in (
                ("the tokenizer", store.manifest["tokenizer"].get("sha256"), first["tokenizer"].get("sha256")),
                ("the dimension of latents", store.latent_dim, first["latent_dim"]),
                ("the number of latents per text", store.latents_per_text, first.get("latents_per_text", 1)),
                ("the encoder", *(describe_encoder(manifest) for manifest in (store.manifest, first))),
                ("the form of images", *(_image_of(manifest) for manifest in (store.manifest, first))),
            ):
                if own != expected:
                    raise UserError(
                        f"one tokenizer and one encoder in all stores of data.mixture: {subject} of {self.root} "
                        f"({expected})",
                        f"{own} in {store.root}",
                        "prepare both with the same --tokenizer and --encoder",
                    )
        self.manifest: dict[str, Any] = first
        self.lengths = np.concatenate([store.lengths for store in stores])
        self.num_truncated = sum(store.num_truncated for store in stores)
        self._starts = np.concatenate([[0], np.cumsum([len(store) for store in stores])])

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def kind(self) -> str:
        """What the latents are of: `text` or `image`."""
        return self.stores[0].kind

    @property
    def latent_dim(self) -> int:
        """Number of components D of a latent."""
        return self.stores[0].latent_dim

    @property
    def latents_per_text(self) -> int:
        """Number of latents K per sample."""
        return self.stores[0].latents_per_text

    def _moments(self) -> tuple[np.ndarray, np.ndarray]:
        shares = np.asarray(self.weights) / sum(self.weights)
        means = np.stack([store.latent_mean.astype(np.float64) for store in self.stores])
        squares = np.stack([store.latent_std.astype(np.float64) ** 2 for store in self.stores]) + means**2
        mean = shares @ means
        return mean, np.sqrt(np.clip(shares @ squares - mean**2, 0, None))

    @property
    def latent_mean(self) -> np.ndarray:
        """float32 [D]: mean of the latents of the mixture."""
        return self._moments()[0].astype(np.float32)

    @property
    def latent_std(self) -> np.ndarray:
        """float32 [D]: standard deviation of the latents of the mixture."""
        return self._moments()[1].astype(np.float32)

    def get(self, indices: Sequence[int]) -> Rows:
        """Return the samples at `indices`, as Store.get does."""
        rows = np.asarray(indices, dtype=np.int64).reshape(-1)
        owners = np.searchsorted(self._starts, rows, side="right") - 1
        tokens: list = [None] * len(rows)
        latents = np.empty((len(rows), *latent_shape(self.manifest)), np.float32)
        for owner in np.unique(owners).tolist():
            if not 0 <= owner < len(self.stores):
                raise IndexError(f"indices {rows.min()}..{rows.max()} of a mixture with {len(self)} samples")
            own = np.flatnonzero(owners == owner)
            batch = self.stores[owner].get(rows[own] - self._starts[owner])
            latents[own] = batch.latents
            for position, ids in zip(own.tolist(), batch.tokens):
                tokens[position] = ids
        return Rows(tokens, latents)

    def locate(self, index: int) -> tuple[Path, int]:
        """Return the folder of a sample's split and its row in it."""
        owner = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self.stores[owner].locate(index - int(self._starts[owner]))

    def text(self, index: int) -> str:
        """Return the text of one sample."""
        owner = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self.stores[owner].text(index - int(self._starts[owner]))

    def texts(self, indices: Sequence[int]) -> list[str]:
        """Return the texts of several samples."""
        return [self.text(int(index)) for index in indices]


def describe_encoder(manifest: dict[str, Any]) -> str:
    """Return what decides the latents of an encoder: two with the same description can be compared."""
    encoder = manifest.get("encoder", {})
    return ", ".join(f"{key} {encoder[key]}" for key in _ENCODER_KEYS if encoder.get(key) is not None)


def _image_of(manifest: dict[str, Any]) -> str:
    image = manifest.get("image") or {}
    return ", ".join(f"{key} {image[key]}" for key in ("size", "patch", "channels", "latents") if key in image)
