"""A corpus of images with captions: an ordered list of samples, and how their images are read.

`glyphs`, `emoji`, a folder of images with captions in .txt files, a .jsonl, a .json (COCO captions, MM-LDLM's list), or
.tar shards.
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
from mmldlm.utils.input_files import open_text

GLYPHS, EMOJI = "glyphs", "emoji"
_OF_TEXTS = (".txt", ".jsonl", ".parquet", ".gz", ".zst")
DRAWN = (GLYPHS, EMOJI)  # not read from files of the user


@dataclass(frozen=True)
class ImageSample:
    """One image with one caption.

    Attributes:
        image: its name, which samples of one image share: a relative path, or what is drawn.
        caption: with single spaces.
        group: samples that share it count as hits of each other and stay in one split; None: of its own.
        path: the file; None for a drawing.
        part: offset and number of bytes of an image inside the file; None: all of it.
    """

    image: str
    caption: str
    group: str | None = None
    path: Path | None = None
    part: tuple[int, int] | None = None


@dataclass
class ImageCorpus:
    """Samples in a reproducible order.

    Attributes:
        source: its name in the manifest.
        samples: the samples whose images are to be read.
        read: sample -> image uint8 [S, S, C]; raises UnreadableImage.
        unreadable: name -> reason of files of several samples that are damaged; each counts as one that was read.
        counts: `read` (samples listed), and `drop_<reason>` for those that are not in `samples`.
        validation_share: of the validation split; None: that of every corpus (1,000 or 5 %).
        words_in_training: every word of a validation caption must occur in training.
        may_hold_out: whether a sample may be in the validation split; None: every one. The share is of these.
        tokenizer: default tokenizer of its captions.
    """

    source: str
    samples: list[ImageSample]
    read: Callable[[ImageSample], np.ndarray]
    counts: Counter = field(default_factory=Counter)
    validation_share: float | None = None
    words_in_training: bool = False
    may_hold_out: Callable[[ImageSample], bool] | None = None
    tokenizer: str = "train"
    unreadable: dict[str, str] = field(default_factory=dict)

    def digest(self) -> str:
        """SHA-256 of the samples and the sizes of their files, by which a resume knows the corpus."""
        digest, sizes = hashlib.sha256(self.source.encode()), {None: None}
        for sample in self.samples:
            if sample.path not in sizes:
                sizes[sample.path] = _size_of(sample.path)
            row = [sample.image, sample.caption, sample.group, sizes[sample.path]]
            digest.update(json.dumps(row).encode() + b"\n")
        return digest.hexdigest()


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def holds_images(name: str | os.PathLike) -> bool:
    """Whether a corpus is one of images: by its name, its suffix, the fields of its first record, or its files."""
    path = Path(name)
    if path.is_file():
        return path.suffix in (".json", ".tar") or (path.suffix == ".jsonl" and _first_record_has_image(path))
    if path.is_dir():
        files = list(path.rglob("*"))
        images = {file.with_suffix("") for file in files if file.suffix.lower() in SUFFIXES}
        captions = {file.with_suffix("") for file in files if file.suffix == ".txt"}
        num_pictures = len(images) + sum(file.suffix == ".tar" for file in files)
        num_texts = sum(file.suffix in _OF_TEXTS for file in files)
        # As many pictures as texts and no pair: names that do not fit, which opening the corpus says.
        return bool(images & captions) or num_pictures >= max(num_texts, 1)
    return str(name) in DRAWN or path.suffix == ".tar"


def _first_record_has_image(path: Path) -> bool:
    try:
        with open_text(path) as file:
            return not {"image", "image_path"}.isdisjoint(json.loads(next(file)))
    except (OSError, ValueError, StopIteration, TypeError, RecursionError):
        return False
