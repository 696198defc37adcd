"""A corpus of images with captions: an ordered list of samples, and how their images are read.

`glyphs`, `emoji`, a folder of images with captions in .txt files, a .jsonl, .csv or .tsv, a .json
(COCO captions, MM-LDLM's list), or .tar shards.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from mmldlm.data.corpora.tables import TABLES, read_records
from mmldlm.data.corpora.text_files import IMAGE_SUFFIXES, KINDS, FileUnit, image_of, kind_of
from mmldlm.data.sentences import fold_spaces
from mmldlm.errors import UserError
from mmldlm.utils.formatting import is_utf8
from mmldlm.utils.input_files import LeftOut, walk_files
from mmldlm.utils.json_files import read_json_value

GLYPHS, EMOJI = "glyphs", "emoji"
_OF_TEXTS = (*KINDS, ".gz", ".zst")
# Number of records that are examined to know what a file is a list of.
_SNIFFED = 64
# These corpora are drawn, not read from files of the user.
DRAWN = (GLYPHS, EMOJI)
_FORMS = (
    "a list of {image_path, caption, image_id}, or COCO's object with images {id, file_name} and"
    " annotations {image_id, caption}"
)


@dataclass(frozen=True)
class ImageSample:
    """One image with one caption.

    Attributes:
        image: Name of the image, which its samples share: a relative path, or what is drawn. Of
            an absolute path outside of the list's folder it is the name of the file alone.
        caption: Caption, with single spaces.
        group: Name of a group, whose samples count as hits of each other and stay in one split;
            None: of its own.
        path: File of the image; None for a drawing.
        part: Offset and number of bytes of an image inside the file; None: all of it.
    """

    image: str
    caption: str
    group: str | None = None
    path: Path | None = None
    part: tuple[int, int] | None = None

    @property
    def origin(self) -> tuple[str, Path | None, tuple[int, int] | None]:
        """What is read for it. Samples of one image share it; names of two images can be equal."""
        return self.image, self.path, self.part


@dataclass
class ImageCorpus:
    """Samples in a reproducible order.

    Attributes:
        source: Name of the corpus in the manifest.
        samples: Samples whose images are to be read.
        read: Function sample -> image uint8 [S, S, C]; raises UnreadableImage.
        unreadable: Name -> reason of files of several samples that are damaged; each counts as one
            that was read.
        counts: `read` (samples listed), and `drop_<reason>` for those that are not in `samples`.
        validation_share: Fraction of samples in the validation split; None: that of every corpus
            (1,000 or 5 %).
        words_in_training: Whether every word of a validation caption must occur in training.
        may_hold_out: Whether a sample may be in the validation split; None: every one. The share
            is of these.
        tokenizer: Default tokenizer of the captions.
        left_out: Files of its folder, or of its shards, that are not read.
        peaks: Receiver, from `read`, of the largest value of each image of 16 bits whose range the
            file does not declare.
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
    left_out: LeftOut = field(default_factory=LeftOut)
    peaks: list[int] = field(default_factory=list)

    def digest(self) -> str:
        """SHA-256 of the samples, by which a resume knows the corpus, together with the identities
        of `files`.
        """
        digest = hashlib.sha256(self.source.encode())
        for sample in self.samples:
            digest.update(
                json.dumps([sample.image, sample.caption, sample.group]).encode() + b"\n"
            )
        return digest.hexdigest()

    def files(self) -> list[tuple[str, Path]]:
        """Return the name and the file of everything that `read` opens."""
        return [
            (sample.image if sample.part is None else sample.path.name, sample.path)
            for sample in self.samples
            if sample.path is not None
        ]


def holds_images(name: str | os.PathLike) -> bool:
    """Whether a corpus is one of images: by its name, its suffix, the fields of its first record,
    or its files.
    """
    path = Path(name)
    suffix = path.suffix.lower()
    if path.is_file():
        return suffix in (".json", ".tar") or lists_images(path)
    if path.is_dir():
        files = walk_files(path)
        suffixes = Counter(file.suffix.lower() for file in files)
        images = {file.with_suffix("") for file in files if file.suffix.lower() in IMAGE_SUFFIXES}
        captions = {file.with_suffix("") for file in files if file.suffix.lower() == ".txt"}
        num_pictures = len(images) + suffixes[".tar"]
        # With as many pictures as texts and no pair, the names do not match: opening the corpus
        # reports that.
        if images & captions or num_pictures >= max(sum(suffixes[kind] for kind in _OF_TEXTS), 1):
            return True
        return bool(images) and any(is_metadata(file) and lists_images(file) for file in files)
    return str(name) in DRAWN or suffix == ".tar"


def is_metadata(path: Path) -> bool:
    """Whether a file has the name of the list that Hugging Face's datasets of images keep beside
    the images.
    """
    return path.name.lower() in ("metadata.jsonl", "metadata.csv")


def lists_images(path: Path) -> bool:
    """Whether one of the first records of a .jsonl, .csv or .tsv names an image.

    Raises:
        UserError: its first records cannot be read.
    """
    kind = kind_of(path)
    if kind in TABLES:
        records = read_records(path)
    elif kind == "jsonl":
        records = _json_lines(path, Counter())
    else:
        return False
    return any(image_of(record) is not None for record in islice(records, _SNIFFED))


def _json_lines(path: Path, counts: Counter) -> Iterator[Any]:
    """Yield the value of every line of a .jsonl; None for a line that is not JSON, if it is not
    the first.
    """
    unit = FileUnit(path, "jsonl", 0, None, errors="surrogateescape")
    return (record for _, record in unit.records(counts, keep_bad=True))


def list_jsonl(path: Path, root: Path, counts: Counter) -> list[ImageSample]:
    """Return the samples of a .jsonl of {image, caption or text[, group]}; a caption may be a list
    of captions.

    Lines that are not such records are counted as dropped.

    Raises:
        UserError: it is not readable, or its first line is not JSON.
    """
    records = _json_lines(path, counts)
    return [sample for record in records for sample in samples_of(record, root, counts)]


def list_table(path: Path, root: Path, counts: Counter) -> list[ImageSample]:
    """Return the samples of a .csv or .tsv with columns for the image and its caption.

    Raises:
        UserError: it is not such a table.
    """
    return [sample for record in read_records(path) for sample in samples_of(record, root, counts)]


def list_json(path: Path, root: Path, counts: Counter) -> list[ImageSample]:
    """Return the samples of a .json: COCO's captions, or MM-LDLM's list. Captions of one image are
    one group.

    Raises:
        UserError: not JSON, or of another form.
    """
    content = read_json_value(path, "check the file, or copy it again", 1 << 34)
    if isinstance(content, list):
        records: Iterator[Any] = iter(content)
    elif isinstance(content, dict) and all(
        isinstance(content.get(key), list) for key in ("images", "annotations")
    ):
        records = _of_coco(content, counts)
    else:
        keys = sorted(content)[:6] if isinstance(content, dict) else type(content).__name__
        raise UserError(
            f"{_FORMS}, in {path}", str(keys), "convert it to one of these, or to a .jsonl"
        )
    return [sample for record in records for sample in samples_of(record, root, counts)]


def _of_coco(content: dict[str, Any], counts: Counter) -> Iterator[Any]:
    """Yield a record for every annotation; count images without one as dropped."""
    images = [image for image in content["images"] if isinstance(image, dict)]
    yield from [None] * (len(content["images"]) - len(images))
    names = {str(_whole(image.get("id"))): image.get("file_name") for image in images}
    captioned = set()
    for annotation in content["annotations"]:
        if not isinstance(annotation, dict):
            yield None
            continue
        key = str(_whole(annotation.get("image_id")))
        captioned.add(key)
        yield {"image": names.get(key), "caption": annotation.get("caption"), "group": key}
    without = len(names.keys() - captioned)
    counts["read"] += without
    counts["drop_no_caption"] += without


def samples_of(record: Any, root: Path, counts: Counter) -> Iterator[ImageSample]:
    """Yield the samples of a record of {image, caption or text[, group]}, or count why it has
    none.

    Other names of the image, such as file_name, are those of `image_of`.
    """
    record = record if isinstance(record, dict) else {}
    image = image_of(record)
    captions = _first(record, "caption", "text")
    group = _whole(_first(record, "group", "image_id"))
    for caption in captions if isinstance(captions, list) and captions else [captions]:
        counts["read"] += 1
        if (
            not isinstance(image, str)
            or not image
            or "\0" in image
            or not isinstance(group, str | int | None)
        ):
            counts["drop_bad_record"] += 1
        elif not isinstance(caption, str) or not fold_spaces(caption):
            counts["drop_no_caption"] += 1
        elif not is_utf8(caption + image):
            counts["drop_not_unicode"] += 1
        else:
            own_group = f"image {image}" if group is None else f"group {group}"
            yield ImageSample(_name(image, root), fold_spaces(caption), own_group, root / image)


def _first(record: dict[str, Any], *names: str) -> Any:
    """Return the first value of some fields that is not null; None without one."""
    return next((record[name] for name in names if record.get(name) is not None), None)


def _whole(value: Any) -> Any:
    """Return a whole number as int: tables with missing numbers hold 3 as 3.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _name(image: str, root: Path) -> str:
    """Return the name of an image in the manifest: relative, because paths of this machine mean
    nothing elsewhere.
    """
    path = PurePosixPath(image)
    if not path.is_absolute():
        return image
    # The list may name its folder as it was given, through a link, or as it lies on the disk.
    for folder in (Path(os.path.abspath(root)), root.resolve()):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return path.name
