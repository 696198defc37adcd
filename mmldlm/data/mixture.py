"""Several stores as one, for training on a mixture: ids count through the stores in the given
order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.lengths import Lengths
from mmldlm.data.store import BaseStore, Rows, Store, latent_shape
from mmldlm.errors import UserError

# Latents of two stores are comparable if these entries are equal.
_ENCODER_KEYS = (
    "name",
    "weights_sha256",
    "pooling",
    "normalize",
    "prefix",
    "cut_to",
    "lower_case",
    "include_prompt",
    "is_bare",
    "modules",
)


class MixedStore(BaseStore):
    """One split of several stores that have one tokenizer and one encoder.

    Stores of images as pixels may differ in the size of their images. Then `get` takes samples of
    one size at a time, and manifest, root and latents_per_text are those of the largest.

    Args:
        stores: Stores of one split.
        weights: Relative weight of each store in training and in the latent statistics.

    Attributes:
        grids: [rows, columns] of the latents of images of several sizes, the smallest first; None:
            all have one size.

    Raises:
        UserError: their tokenizers, encoders or latent shapes differ.
    """

    def __init__(self, stores: Sequence[Store], weights: Sequence[float]):
        self.stores, self.weights = list(stores), list(weights)
        # `max` returns the first of several equal stores.
        largest = max(stores, key=lambda store: store.latents_per_text)
        self.root, self.manifest = largest.root, largest.manifest
        has_sizes = all(
            (store.manifest.get("image") or {}).get("latents") == "pixels" for store in stores
        )
        common = _common_entries(self.manifest, has_sizes)
        for store in stores:
            own = _common_entries(store.manifest, has_sizes)
            for subject, expected in common.items():
                if (value := own[subject]) != expected:
                    raise UserError(
                        f"one tokenizer and one encoder in all stores of data.mixture: {subject}"
                        f" of {self.root} ({expected})",
                        f"{value} in {store.root}",
                        "prepare both with the same --tokenizer and --encoder (images:"
                        " --patch-size and --latents)",
                    )
        grids = {
            store.latents_per_text: store.manifest["image"]["grid"]
            for store in stores
            if has_sizes
        }
        self.grids = [grids[count] for count in sorted(grids)] if len(grids) > 1 else None
        self.lengths = Lengths.joined([store.lengths for store in stores])
        self.num_truncated = sum(store.num_truncated for store in stores)
        self._starts = np.concatenate([[0], np.cumsum([len(store) for store in stores])])

    def __len__(self) -> int:
        return len(self.lengths)

    def _moments(self) -> tuple[np.ndarray, np.ndarray]:
        fractions = np.asarray(self.weights) / sum(self.weights)
        means = np.stack([store.latent_mean.astype(np.float64) for store in self.stores])
        squares = (
            np.stack([store.latent_std.astype(np.float64) ** 2 for store in self.stores])
            + means**2
        )
        mean = fractions @ means
        return mean, np.sqrt(np.clip(fractions @ squares - mean**2, 0, None))

    @property
    def latent_mean(self) -> np.ndarray:
        """float32 [D]: mean of the latents of the mixture."""
        return self._moments()[0].astype(np.float32)

    @property
    def latent_std(self) -> np.ndarray:
        """float32 [D]: standard deviation of the latents of the mixture."""
        return self._moments()[1].astype(np.float32)

    def get(self, indices: Sequence[int] | np.ndarray) -> Rows:
        """Return the samples at `indices`, as Store.get does; a ValueError where their sizes
        differ.
        """
        parts = list(self._by_store(indices))
        shapes = {latent_shape(store.manifest) for store, _, _ in parts}
        if len(shapes) > 1:
            raise ValueError(f"samples of one size at a time, not of latents {sorted(shapes)}")
        tokens: list = [None] * len(indices)
        dtype = np.float32 if self.num_codes is None else np.int64
        shape = shapes.pop() if shapes else latent_shape(self.manifest)
        latents = np.empty((len(indices), *shape), dtype)
        for store, places, rows in parts:
            part = store.get(rows)
            latents[places] = part.latents
            for place, ids in zip(places.tolist(), part.tokens):
                tokens[place] = ids
        return Rows(tokens, latents)

    def tokens(self, indices: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """Return the token ids of the samples at `indices`, as Store.tokens does."""
        tokens: list = [None] * len(indices)
        for store, places, rows in self._by_store(indices):
            for place, ids in zip(places.tolist(), store.tokens(rows)):
                tokens[place] = ids
        return tokens

    def _by_store(
        self, indices: Sequence[int] | np.ndarray
    ) -> Iterator[tuple[Store, np.ndarray, np.ndarray]]:
        """Yield each store that has some of the samples, their places in `indices`, and their rows
        in it.
        """
        wanted = np.asarray(indices, dtype=np.int64).reshape(-1)
        if len(wanted) and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(
                f"indices {wanted.min()}..{wanted.max()} of a mixture with {len(self)} samples"
            )
        owners = self._owners(wanted)
        for owner in np.unique(owners).tolist():
            places = np.flatnonzero(owners == owner)
            yield self.stores[owner], places, wanted[places] - self._starts[owner]

    def locate(self, index: int) -> tuple[Path, int]:
        """Return the folder of a sample's split and its row in it."""
        owner = int(self._owners(index))
        return self.stores[owner].locate(index - int(self._starts[owner]))

    def text(self, index: int) -> str:
        """Return the text of one sample."""
        owner = int(self._owners(index))
        return self.stores[owner].text(index - int(self._starts[owner]))

    def _owners(self, indices: int | np.ndarray) -> np.ndarray:
        """Return the position of the store that each sample is of."""
        return np.searchsorted(self._starts, indices, side="right") - 1


def describe_encoder(manifest: dict[str, Any]) -> str:
    """Return what decides the latents of an encoder: two with the same description can be
    compared.
    """
    encoder = manifest.get("encoder", {})
    return ", ".join(
        f"{key} {encoder[key]}" for key in _ENCODER_KEYS if encoder.get(key) is not None
    )


def _common_entries(manifest: dict[str, Any], has_sizes: bool) -> dict[str, Any]:
    """Return what the stores of a mixture have in common; with `has_sizes` not the size of their
    images.
    """
    image, keys = manifest.get("image") or {}, ("patch", "channels", "latents")
    entries = {
        "the tokenizer": manifest["tokenizer"].get("sha256"),
        "the dimension of latents": manifest["latent_dim"],
        "the encoder": describe_encoder(manifest),
        "the form of images": ", ".join(f"{key} {image[key]}" for key in keys if key in image),
    }
    if has_sizes:
        return entries
    count = manifest.get("latents_per_text", 1)
    return {
        **entries,
        "the number of latents per text": count,
        "the size of images": image.get("size"),
    }
