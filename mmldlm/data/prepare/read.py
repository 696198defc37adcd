"""The reading stage: a corpus, part by part, into flat files of texts, or into pixels or latents
of images, with a hash of the content of each item.
"""

from __future__ import annotations

import array
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from mmldlm.data.arrays import read_npz, write_npz
from mmldlm.data.corpora.image_lists import ImageCorpus, ImageSample
from mmldlm.data.corpora.text_files import ReadUnit
from mmldlm.data.image_codec import ImageCodec
from mmldlm.data.images import UnreadableImage
from mmldlm.data.sentences import content_hash, hash64
from mmldlm.utils.atomic_files import atomic_folder, write_json
from mmldlm.utils.formatting import is_utf8
from mmldlm.utils.input_files import read_text

IMAGES_PER_SHARD = 256
_MAPPED_UNITS = 16
NOT_FINITE = "NaN or infinite latents"


def read_unit(unit: ReadUnit, folder: Path) -> None:
    """Read one unit into text.bin, offsets.npy, hashes.npy and counts.json; memory holds one text
    at a time.
    """
    counts: Counter = Counter()
    offsets, hashes = array.array("q", [0]), array.array("Q")
    with atomic_folder(folder) as partial:
        with open(partial / "text.bin", "wb") as file:
            for text in unit.read(counts):
                if not is_utf8(text):
                    # Broken escapes in JSON decode to lone surrogates.
                    counts["drop_not_unicode"] += 1
                    continue
                raw = text.encode()
                file.write(raw)
                offsets.append(offsets[-1] + len(raw))
                hashes.append(content_hash(text))
        np.save(partial / "offsets.npy", np.array(offsets, dtype=np.int64))
        np.save(partial / "hashes.npy", np.array(hashes, dtype=np.uint64))
        write_json(partial / "counts.json", counts)


class TextShards:
    """All texts of a corpus after reading, by row: the number of a text in corpus order.

    Attributes:
        hashes: [N] uint64 content hashes.
        counts: Counters of reading: texts read, and texts dropped by reason.
    """

    def __init__(self, folders: Sequence[Path]):
        self._folders = list(folders)
        # A map keeps a file open, and a corpus can have more units than a process may open files.
        self._map = lru_cache(maxsize=_MAPPED_UNITS)(_map_unit)
        hashes = [np.load(folder / "hashes.npy") for folder in folders]
        self.hashes = np.concatenate(hashes) if hashes else np.empty(0, np.uint64)
        self._starts = np.concatenate([[0], np.cumsum([len(part) for part in hashes])]).astype(
            np.int64
        )
        self.counts: Counter = Counter()
        for folder in folders:
            self.counts.update(json.loads(read_text(folder / "counts.json")))

    def __len__(self) -> int:
        return len(self.hashes)

    def get(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        """Return the texts at some rows."""
        return list(self.iterate(rows))

    def iterate(self, rows: Sequence[int] | np.ndarray) -> Iterator[str]:
        """Yield the texts at some rows."""
        for row in np.asarray(rows, dtype=np.int64).tolist():
            part = int(np.searchsorted(self._starts, row, side="right")) - 1
            offsets, raw = self._map(self._folders[part])
            start, end = offsets[row - self._starts[part] : row - self._starts[part] + 2].tolist()
            yield raw[start:end].tobytes().decode("utf-8")


@dataclass
class SelectedTexts:
    """The texts at some rows, as an iterable that can be read any number of times."""

    texts: TextShards
    rows: np.ndarray

    def __iter__(self) -> Iterator[str]:
        return self.texts.iterate(self.rows)


def _map_unit(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets and the bytes of the texts of a unit, mapped."""
    path = folder / "text.bin"
    offsets = np.load(folder / "offsets.npy", mmap_mode="r")
    raw = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    # Plain views: slicing a numpy memmap costs several times as much.
    return offsets.view(np.ndarray), raw.view(np.ndarray)


def read_images(
    path: Path,
    corpus: ImageCorpus,
    samples: Sequence[ImageSample],
    shape: tuple[int, int, int],
    codec: ImageCodec | None,
) -> None:
    """Read the images of one shard, of shape (S, S, C), and write them as one file, with the
    reasons of the rest.

    Args:
        codec: Codec that encodes them at once, because pixels would need much more space; None:
            pixels are written.
    """
    images: list[np.ndarray] = []
    places: list[int] = []
    reasons: dict[int, str] = {}
    corpus.peaks.clear()
    last = None
    image_or_reason: np.ndarray | str = ""
    for row, sample in enumerate(samples):
        if sample.origin != last:
            # Several captions of one image follow each other; read the image once.
            last, image_or_reason = sample.origin, _read_image(corpus, sample)
        if isinstance(image_or_reason, str):
            reasons[row] = image_or_reason
        else:
            images.append(image_or_reason)
            places.append(row)
    values = np.stack(images) if images else np.empty((0, *shape), np.uint8)
    hashes = np.array([hash64(image.tobytes()) for image in images], np.uint64)
    if codec is not None:
        values, is_finite = _encode_finite(codec, values)
        reasons |= {row: NOT_FINITE for row, good in zip(places, is_finite) if not good}
        places = [row for row, good in zip(places, is_finite) if good]
        hashes = hashes[is_finite]
    write_npz(
        path,
        values=values,
        places=np.array(places, np.int32),
        hashes=hashes,
        peaks=np.array(corpus.peaks, np.int32),
        reasons=np.frombuffer(json.dumps(reasons).encode(), np.uint8),
    )


def _encode_finite(codec: ImageCodec, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return latents float16 [M, N, D] of the images whose latents are finite, and which they are
    [B] bool.
    """
    if not len(images):
        return np.empty((0, codec.num_latents, codec.latent_dim), np.float16), np.zeros(0, bool)
    with np.errstate(over="ignore"):
        latents = codec.encode(images).astype(np.float16)
    is_finite = np.all(np.isfinite(latents), axis=(1, 2))
    return latents[is_finite], is_finite


def _read_image(corpus: ImageCorpus, sample: ImageSample) -> np.ndarray | str:
    """Return the image, or the reason why it is unreadable."""
    try:
        return corpus.read(sample)
    except UnreadableImage as error:
        return str(error)


class ImageShards:
    """The images of a corpus after reading, by row: the number of a sample in corpus order.

    Attributes:
        rows: [N] int64 rows whose image was read, ascending.
        hashes: [N] uint64 hashes of their pixels.
        reasons: Row -> reason why its image could not be read.
        peaks: Largest value of each image of 16 bits that declares no range.
    """

    def __init__(self, paths: Sequence[Path]):
        self._paths = list(paths)
        files = [read_npz(path, "places", "hashes", "reasons", "peaks") for path in paths]
        self.rows = np.concatenate(
            [file["places"] + np.int64(i * IMAGES_PER_SHARD) for i, file in enumerate(files)]
        )
        self.hashes = np.concatenate([file["hashes"] for file in files])
        self.peaks = np.concatenate([file["peaks"] for file in files])
        self.reasons = {
            i * IMAGES_PER_SHARD + int(row): reason
            for i, file in enumerate(files)
            for row, reason in json.loads(file["reasons"].tobytes()).items()
        }

    def blocks(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (rows, images uint8 [n, S, S, C], or latents float16 [n, N, D]) of ascending rows,
        shard by shard.
        """
        first_rows = np.arange(len(self._paths) + 1) * IMAGES_PER_SHARD
        ends = np.searchsorted(rows, first_rows)
        for shard, path in enumerate(self._paths):
            in_shard = rows[ends[shard] : ends[shard + 1]]
            if len(in_shard):
                file = read_npz(path, "values", "places")
                yield (
                    in_shard,
                    file["values"][
                        np.searchsorted(file["places"], in_shard - shard * IMAGES_PER_SHARD)
                    ],
                )
