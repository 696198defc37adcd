"""Open a corpus of images by name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from mmldlm.data.corpora.image_records import IMAGE_SUFFIXES
from mmldlm.data.corpora.text_files import kind_of
from mmldlm.data.images.corpora.corpus import DRAWN, EMOJI, GLYPHS, ImageCorpus
from mmldlm.data.images.corpora.emoji import open_emoji
from mmldlm.data.images.corpora.folder import list_folder
from mmldlm.data.images.corpora.glyphs import open_glyphs
from mmldlm.data.images.corpora.records import list_csv, list_json, list_jsonl
from mmldlm.data.images.corpora.tar_shards import find_shards, list_shards
from mmldlm.data.images.image_files import read_image
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some
from mmldlm.utils.input_files import OTHER_KIND, LeftOut, walk_files

_LISTS = {"json": list_json, "jsonl": list_jsonl, "csv": list_csv}


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
        size, channels: of the images that are read.
        faces: of glyphs.
        font: file of the font of emoji.
        data_root: folder to which the image paths of a list are relative (default: that of the
            file).
        white: largest value of gray images of 16 bits.

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
    counts, left_out, peaks = Counter(), LeftOut(), []
    kind = kind_of(path) or path.suffix.lower()[1:]
    if path.is_dir():
        samples, kind = list_folder(path, counts, left_out), "images"
    elif kind in _LISTS:
        samples = _LISTS[kind](path, Path(data_root or path.parent), counts)
    else:
        fix = "convert it to one of these"
        raise UserError(
            "a corpus of images: a folder, .jsonl, .csv, .json or .tar", path.name, fix
        )
    if not samples:
        fix = (
            "check the fields and the names; a list of texts alone is a .txt or a .jsonl of {text}"
        )
        raise UserError(f"images with captions in {path}", f"none; {dict(counts)}", fix)
    return ImageCorpus(
        f"{kind}:{path.resolve().name}",
        samples,
        lambda sample: read_image(sample.path, size, channels, None, white, peaks),
        counts,
        left_out=left_out,
        peaks=peaks,
    )


def _open_shards(
    name: str, shards: list[Path], size: int, channels: int, white: int | None
) -> ImageCorpus:
    path, counts, unreadable, left_out, peaks = Path(name), Counter(), {}, LeftOut(), []
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
        damage = [f"{shard}: {reason}" for shard, reason in unreadable.items()]
        raise UserError(
            f"images with captions (key.jpg with key.txt or key.json) in {name}",
            f"none; {join_some(damage, limit=3) or dict(counts) or left_out.entry()}",
            "check the names inside with tar -tf",
        )
    return ImageCorpus(
        f"tar:{path.name}",
        samples,
        lambda sample: read_image(sample.path, size, channels, sample.part, white, peaks),
        counts,
        unreadable=unreadable,
        left_out=left_out,
        peaks=peaks,
    )
