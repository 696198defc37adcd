"""A corpus of images with captions: an ordered list of samples, and how their images are read.

`glyphs`, a folder of images with captions in .txt files, a .jsonl, or a .json (COCO captions, MM-LDLM's list).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mmldlm.data.images.image_files import SUFFIXES

GLYPHS = "glyphs"


@dataclass(frozen=True)
class ImageSample:
    """One image with one caption.

    Attributes:
        image: its name, unique in the corpus: a relative path, or what is drawn.
        caption: with single spaces.
        group: samples that share it count as hits of each other and stay in one split; None: of its own.
        path: the file; None for a drawing.
    """

    image: str
    caption: str
    group: str | None = None
    path: Path | None = None


@dataclass
class ImageCorpus:
    """Samples in a reproducible order.

    Attributes:
        source: its name in the manifest.
        samples: the samples whose images are to be read.
        read: sample -> image uint8 [S, S, C]; raises UnreadableImage.
        counts: `read` (samples listed), and `drop_<reason>` for those that are not in `samples`.
        validation_share: of the validation split; None: that of every corpus (1,000 or 5 %).
        words_in_training: every word of a validation caption must occur in training.
        tokenizer: default tokenizer of its captions.
    """

    source: str
    samples: list[ImageSample]
    read: Callable[[ImageSample], np.ndarray]
    counts: Counter = field(default_factory=Counter)
    validation_share: float | None = None
    words_in_training: bool = False
    tokenizer: str = "train"

    def digest(self) -> str:
        """SHA-256 of the samples and the sizes of their files, by which a resume knows the corpus."""
        digest = hashlib.sha256(self.source.encode())
        for sample in self.samples:
            row = [sample.image, sample.caption, sample.group, _size_of(sample.path)]
            digest.update(json.dumps(row).encode() + b"\n")
        return digest.hexdigest()


def _size_of(path: Path | None) -> int | None:
    try:
        return None if path is None else path.stat().st_size
    except OSError:
        return None


def holds_images(name: str | os.PathLike) -> bool:
    """Whether a corpus is one of images: by its name, its suffix, the fields of its first record, or its files."""
    path = Path(name)
    if path.is_file():
        return path.suffix == ".json" or (path.suffix == ".jsonl" and _first_record_has_image(path))
    if path.is_dir():
        images = {file.with_suffix("") for file in path.rglob("*") if file.suffix.lower() in SUFFIXES}
        texts = {file.with_suffix("") for file in path.rglob("*") if file.suffix == ".txt"}
        return bool(images & texts) or bool(images and not texts)
    return str(name) == GLYPHS


def _first_record_has_image(path: Path) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            return not {"image", "image_path"}.isdisjoint(json.loads(next(file)))
    except (OSError, ValueError, StopIteration, TypeError, RecursionError):
        return False
