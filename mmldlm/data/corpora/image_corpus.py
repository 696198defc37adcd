"""Open a corpus of images by name: a drawn one, a folder, a list, or .tar shards."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

from mmldlm.data.corpora.drawn_images import open_emoji, open_glyphs
from mmldlm.data.corpora.image_lists import (
    DRAWN,
    EMOJI,
    GLYPHS,
    ImageCorpus,
    ImageSample,
    is_metadata,
    list_json,
    list_jsonl,
    list_table,
    lists_images,
)
from mmldlm.data.corpora.tar_shards import find_shards, list_shards
from mmldlm.data.corpora.text_files import IMAGE_SUFFIXES, kind_of
from mmldlm.data.images import read_image
from mmldlm.data.sentences import MAX_TEXT_BYTES, TOO_LARGE, fold_spaces
from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_counts, join_some
from mmldlm.utils.input_files import OTHER_KIND, LeftOut, open_regular, walk_files
from mmldlm.utils.validation import not_none

_LISTS = {"json": list_json, "jsonl": list_jsonl, "csv": list_table, "tsv": list_table}


def open_image_corpus(
    name: str,
    size: int,
    channels: int,
    faces: int | None = None,
    font: str | None = None,
    data_root: str | None = None,
    white: int | None = None,
) -> ImageCorpus:
    """Open a corpus by name: `glyphs`, `emoji`, a folder, a .jsonl, a .csv, a .json, or .tar
    shards.

    Args:
        size, channels: Side and channels of the images that are read.
        faces: Number of faces of glyphs.
        font: Font file of emoji.
        data_root: Folder to which the image paths of a list are relative (default: that of the
            file).
        white: Largest value of gray images of 16 bits.

    Raises:
        UserError: not there, of an unknown form, or without a captioned image.
    """
    path = Path(name)
    if not path.exists() and name == GLYPHS:
        return open_glyphs(size, channels, faces)
    if not path.exists() and name == EMOJI:
        return open_emoji(size, channels, font)
    if shards := find_shards(name):
        return _open_shards(name, shards, size, channels, white)
    if not path.exists():
        raise UserError(
            f"a corpus of images at {path}: a folder of images with captions in .txt files, a"
            " .jsonl, a .csv, a .json or .tar shards",
            "nothing there",
            f"check the path, or use one of: {', '.join(DRAWN)}",
        )
    counts: Counter[str] = Counter()
    left_out = LeftOut()
    peaks: list[int] = []
    kind = kind_of(path) or path.suffix.lower()[1:]
    if path.is_dir():
        samples, kind = list_folder(path, counts, left_out), "images"
    elif kind in _LISTS:
        samples = _LISTS[kind](path, Path(data_root or path.parent), counts)
    else:
        fix = "convert it to one of these"
        raise UserError(
            "a corpus of images: a folder, .jsonl, .csv, .tsv, .json or .tar", path.name, fix
        )
    if not samples:
        fix = (
            "check the fields and the names; a list of texts alone is a .txt or a .jsonl of {text}"
        )
        raise UserError(f"images with captions in {path}", f"none; {describe_counts(counts)}", fix)
    return ImageCorpus(
        f"{kind}:{path.resolve().name}",
        samples,
        lambda sample: read_image(not_none(sample.path), size, channels, None, white, peaks),
        counts,
        left_out=left_out,
        peaks=peaks,
    )


def _open_shards(
    name: str, shards: list[Path], size: int, channels: int, white: int | None
) -> ImageCorpus:
    path, left_out = Path(name), LeftOut()
    counts: Counter[str] = Counter()
    unreadable: dict[str, str] = {}
    peaks: list[int] = []
    others = (
        [file for file in walk_files(path, left_out) if file not in set(shards)]
        if path.is_dir()
        else []
    )
    if loose := next((file for file in others if file.suffix.lower() in IMAGE_SUFFIXES), None):
        raise UserError(
            f"a folder of images or one of .tar shards in {path}",
            f"both, {loose.name} and {shards[0].name}",
            "split it",
        )
    for file in others:
        left_out.add(OTHER_KIND, file.relative_to(path))
    samples = list_shards(shards, counts, unreadable, left_out)
    if not samples:
        damage = [f"{shard}: {reason}" for shard, reason in unreadable.items()][:3]
        raise UserError(
            f"images with captions (key.jpg with key.txt or key.json) in {name}",
            "; ".join(
                filter(None, ["none", *damage, describe_counts(counts), left_out.describe()])
            ),
            "check the names inside with tar -tf",
        )
    return ImageCorpus(
        f"tar:{path.name}",
        samples,
        lambda sample: read_image(
            not_none(sample.path), size, channels, sample.part, white, peaks
        ),
        counts,
        unreadable=unreadable,
        left_out=left_out,
        peaks=peaks,
    )


def list_folder(folder: Path, counts: Counter, left_out: LeftOut) -> list[ImageSample]:
    """Return the captioned images below a folder, by name; count images without caption and the
    reverse.

    A metadata.jsonl or metadata.csv has the captions of the images that it names, whatever .txt
    files there are.

    Args:
        left_out: Receiver of the files that are neither images nor captions.

    Raises:
        UserError: no image has a caption.
    """
    images, captions, lists = _sort(folder, counts, left_out)
    samples = [sample for path in lists for sample in _of_metadata(path, folder, counts)]
    listed = {_normal(sample.path) for sample in samples}
    others = [path for path in images if _normal(path) not in listed]
    paired = [path for path in others if path.with_suffix("") in captions]
    if not paired and not samples:
        some = join_some(path.name for path in [*images[:2], *sorted(captions.values())[:2]])
        found = f"{len(images)} images and {len(captions)} .txt files, no pair of one name"
        read = describe_counts(counts) if lists else ""
        raise UserError(
            f"images ({', '.join(IMAGE_SUFFIXES)}) and captions of the same name (cat.png,"
            f" cat.txt) in {folder}",
            "; ".join(filter(None, [found, some, read, left_out.describe()])),
            "write the caption of each image into a .txt file next to it, or a metadata.jsonl of"
            " {file_name, text}; a list with another name can be given itself as the corpus; to"
            " prepare texts, move the images elsewhere",
        )
    without_image = captions.keys() - {path.with_suffix("") for path in paired}
    second = {path.with_suffix("") for path in images if _normal(path) in listed} & without_image
    counts["read"] += len(others) + len(without_image)
    if second:
        counts["drop_second_caption"] += len(second)
    counts["drop_no_image"] += len(without_image) - len(second)
    counts["drop_no_caption"] += len(others) - len(paired)
    for path in paired:
        caption = _read_caption(captions[path.with_suffix("")], counts)
        if caption is not None:
            samples.append(ImageSample(path.relative_to(folder).as_posix(), caption, None, path))
    return samples


def _sort(
    folder: Path, counts: Counter, left_out: LeftOut
) -> tuple[list[Path], dict[Path, Path], list[Path]]:
    """Return the images below a folder, its .txt files by name without suffix, and its lists of
    captions.
    """
    images: list[Path] = []
    captions: dict[Path, Path] = {}
    lists: list[Path] = []
    for path in walk_files(folder, left_out):
        suffix = path.suffix.lower()
        if suffix in IMAGE_SUFFIXES:
            images.append(path)
        elif suffix == ".txt":
            if captions.setdefault(path.with_suffix(""), path) != path:
                # Two captions can have one name: a.TXT beside a.txt.
                counts["read"] += 1
                counts["drop_second_caption"] += 1
        elif is_metadata(path) and lists_images(path):
            lists.append(path)
        else:
            left_out.add(OTHER_KIND, path.relative_to(folder))
    return images, captions, lists


def _of_metadata(path: Path, folder: Path, counts: Counter) -> list[ImageSample]:
    """Return the samples of a list, named by their paths below the folder."""
    listing = list_table if path.suffix.lower() == ".csv" else list_jsonl
    prefix = path.parent.relative_to(folder)
    samples = []
    for sample in listing(path, path.parent, counts):
        image = (prefix / sample.image).as_posix()
        group = f"image {sample.image}"
        samples.append(
            replace(
                sample,
                image=image,
                group=f"image {image}" if sample.group == group else sample.group,
            )
        )
    return samples


def _normal(path: Path | None) -> str:
    return os.path.normpath(path or "")


def _read_caption(path: Path, counts: Counter) -> str | None:
    try:
        with open_regular(path) as file:
            raw = file.read(MAX_TEXT_BYTES + 1)
        if len(raw) > MAX_TEXT_BYTES:
            counts[TOO_LARGE] += 1
            return None
        caption = fold_spaces(raw.decode("utf-8"))
    except OSError:
        counts["drop_unreadable_caption"] += 1
        return None
    except UnicodeDecodeError:
        counts["drop_not_unicode"] += 1
        return None
    if not caption:
        counts["drop_no_caption"] += 1
    return caption or None
