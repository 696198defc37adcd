"""The training images of a store, decoded block by block: mean, nearest neighbors, names of equal
pictures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mmldlm.data.image_codec import ImageCodec
from mmldlm.data.store import Store
from mmldlm.evaluation.images.figures import as_vectors, group_ids
from mmldlm.evaluation.sentences import Sentences

MAX_COMPARED = 200_000
"""Training images compared, spread over the split; it bounds the time, blocks bound the memory."""
MAX_DECODED = 2_000
"""The same where an autoencoder must make them, several times in an evaluation."""
_BLOCK_BYTES = 1 << 27


class TrainingImages:
    """Reads the training split as pixels.

    Args:
        store: of images, of any split.
        codec: of its latents.
        limit: read about this many images, spread evenly (default: MAX_COMPARED, or MAX_DECODED).
    """

    def __init__(self, store: Store, codec: ImageCodec, limit: int | None = None):
        self.store = Store(store.root, "train")
        self.limit = limit or (MAX_DECODED if codec.latents == "vae" else MAX_COMPARED)
        self.codec = codec

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first row, images [n, S, S, C] uint8)."""
        rows = max(1, _BLOCK_BYTES // math.prod(self.codec.image_shape))
        for first, latents in self.store.latent_blocks(self.limit):
            for start in range(0, len(latents), rows):
                yield first + start, self.codec.decode(latents[start : start + rows])

    def mean(self) -> np.ndarray:
        """Return the mean image [S * S * C] in -1 .. 1."""
        total, count = np.zeros(1), 0
        for _, images in self.blocks():
            total, count = total + as_vectors(images).sum(0, dtype=np.float64), count + len(images)
        return (total / count).astype(np.float32)

    def captions(self, rows: np.ndarray) -> list[list[int]]:
        """Return the ids of captions, without EOS."""
        return [tokens.tolist() for tokens in self.store.get(rows).tokens]

    def names(
        self, images: np.ndarray, groups: np.ndarray | None, sentences: Sentences
    ) -> list[set]:
        """Return N sets of captions (tuples of ids) of all images that are equal to, or in one
        group with, each image.

        Args:
            images: [N, S, S, C] uint8, unseen.
            groups: [N] of these, as in the store; None where it has none.
        """
        found: dict[object, set] = {}
        own = group_ids(groups, images).tolist()
        pixels = [image.tobytes() for image in images]
        for group, picture, tokens in zip(own, pixels, sentences.tokens, strict=True):
            names = found.setdefault(("group", group), set())
            names.add(tuple(tokens))
            found.setdefault(picture, names)
        if groups is not None:
            for group, original in zip(own, groups.tolist()):
                found[("stored", original)] = found["group", group]
        stored = self.store.groups
        for first, block in self.blocks():
            for row, image in enumerate(block, first):
                keys: list[object] = [image.tobytes()]
                if groups is not None and stored is not None:
                    keys.append(("stored", int(stored[row])))
                names = next((found[key] for key in keys if key in found), None)
                if names is not None:
                    names.add(tuple(self.captions(np.array([row]))[0]))
        return [found["group", group] for group in own]
