"""Stage 1: read the images of a corpus, shard by shard, into pixels or latents with a hash of each
image.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mmldlm.data.images.codec import ImageCodec
from mmldlm.data.images.corpora.corpus import ImageCorpus, ImageSample
from mmldlm.data.images.image_files import UnreadableImage
from mmldlm.data.store.arrays import read_npz, write_npz

SHARD = 256
NOT_FINITE = "NaN or infinite latents"


def read_shard(
    path: Path,
    corpus: ImageCorpus,
    samples: Sequence[ImageSample],
    shape: tuple[int, int, int],
    codec: ImageCodec | None,
) -> None:
    """Read the images of one shard, of shape (S, S, C), and write them as one file, with the
    reasons of the rest.

    Args:
        codec: that encodes them at once, because pixels would need much more space; None: pixels
            are written.
    """
    images, places, reasons = [], [], {}
    corpus.peaks.clear()
    last, found = None, None
    for place, sample in enumerate(samples):
        if last is None or sample.image != last:  # several captions of one image follow each other
            last, found = sample.image, _read(corpus, sample)
        if isinstance(found, str):
            reasons[place] = found
        else:
            images.append(found)
            places.append(place)
    values = np.stack(images) if images else np.empty((0, *shape), np.uint8)
    hashes = np.array([pixel_hash(image) for image in images], np.uint64)
    if codec is not None:
        values, is_finite = _encode(codec, values)
        reasons |= {place: NOT_FINITE for place, good in zip(places, is_finite) if not good}
        places, hashes = (
            [place for place, good in zip(places, is_finite) if good],
            hashes[is_finite],
        )
    write_npz(
        path,
        values=values,
        places=np.array(places, np.int32),
        hashes=hashes,
        peaks=np.array(corpus.peaks, np.int32),
        reasons=np.frombuffer(json.dumps(reasons).encode(), np.uint8),
    )


def _encode(codec: ImageCodec, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return latents float16 [M, N, D] of the images whose latents are finite, and which they are
    [B] bool.
    """
    if not len(images):
        return np.empty((0, codec.num_latents, codec.latent_dim), np.float16), np.zeros(0, bool)
    with np.errstate(over="ignore"):
        latents = codec.encode(images).astype(np.float16)
    is_finite = np.isfinite(latents).all(axis=(1, 2))
    return latents[is_finite], is_finite


def _read(corpus: ImageCorpus, sample: ImageSample) -> np.ndarray | str:
    try:
        return corpus.read(sample)
    except UnreadableImage as error:
        return str(error)


def pixel_hash(image: np.ndarray) -> int:
    """Return a 64-bit hash of an image uint8 [S, S, C]."""
    return int.from_bytes(hashlib.blake2b(image.tobytes(), digest_size=8).digest(), "big")


class ImageShards:
    """The images of a corpus after reading, by row: the number of a sample in corpus order.

    Attributes:
        rows: [N] int64 rows whose image was read, ascending.
        hashes: [N] uint64 hashes of their pixels.
        reasons: row -> why its image could not be read.
        peaks: largest value of each image of 16 bits that declares no range.
    """

    def __init__(self, paths: Sequence[Path]):
        self._paths = list(paths)
        files = [read_npz(path, "places", "hashes", "reasons", "peaks") for path in paths]
        self.rows = np.concatenate(
            [file["places"] + np.int64(i * SHARD) for i, file in enumerate(files)] or [[]]
        )
        self.hashes = np.concatenate([file["hashes"] for file in files] or [[]])
        self.peaks = np.concatenate([file["peaks"] for file in files] or [[]])
        self.reasons = {
            i * SHARD + int(place): reason
            for i, file in enumerate(files)
            for place, reason in json.loads(file["reasons"].tobytes()).items()
        }

    def blocks(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (rows, images uint8 [n, S, S, C], or latents float16 [n, N, D]) of ascending rows,
        shard by shard.
        """
        for number, path in enumerate(self._paths):
            own = rows[(rows >= number * SHARD) & (rows < (number + 1) * SHARD)]
            if len(own):
                file = read_npz(path, "values", "places")
                yield own, file["values"][np.searchsorted(file["places"], own - number * SHARD)]
