"""Open a corpus of images by name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from mmldlm.data.images.corpora.corpus import DRAWN, EMOJI, GLYPHS, ImageCorpus
from mmldlm.data.images.corpora.emoji import open_emoji
from mmldlm.data.images.corpora.folder import list_folder
from mmldlm.data.images.corpora.glyphs import open_glyphs
from mmldlm.data.images.corpora.records import list_json, list_jsonl
from mmldlm.data.images.corpora.tar_shards import find_shards, list_shards
from mmldlm.data.images.image_files import SUFFIXES, read_image
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some


def open_image_corpus(
    name: str,
    size: int,
    channels: int,
    faces: int | None = None,
    font: str | None = None,
    data_root: str | None = None,
) -> ImageCorpus:
    """Open a corpus by name: `glyphs`, `emoji`, a folder, a .jsonl, a .json, or .tar shards.

    Args:
        size, channels: of the images that are read.
        faces: of glyphs.
        font: file of the font of emoji.
        data_root: folder to which the image paths of a .jsonl or .json are relative (default: that of the file).

    Raises:
        UserError: not there, of an unknown form, or without a captioned image.
    """
    path = Path(name)
    if not path.exists() and name == GLYPHS:
        return open_glyphs(size, channels, faces)
    if not path.exists() and name == EMOJI:
        return open_emoji(size, channels, font)
    if shards := find_shards(name):
        return _open_shards(name, shards, size, channels)
    if not path.exists():
        raise UserError(
            f"a corpus of images at {path}: a folder of images with captions in .txt files, a .jsonl, a .json or "
            ".tar shards",
            "nothing there",
            f"check the path, or use one of: {', '.join(DRAWN)}",
        )
    counts: Counter = Counter()
    if path.is_dir():
        samples, kind = list_folder(path, counts), "images"
    elif path.suffix in (".json", ".jsonl"):
        listing = list_json if path.suffix == ".json" else list_jsonl
        samples, kind = listing(path, Path(data_root or path.parent), counts), path.suffix[1:]
    else:
        raise UserError("a corpus of images: a folder, .jsonl, .json or .tar", path.name, "convert it to one of these")
    if not samples:
        raise UserError(f"images with captions in {path}", f"none; {dict(counts)}", "check the fields and the names")
    return ImageCorpus(f"{kind}:{path.resolve().name}", samples, lambda s: read_image(s.path, size, channels), counts)


def _open_shards(name: str, shards: list[Path], size: int, channels: int) -> ImageCorpus:
    path, counts, unreadable = Path(name), Counter(), {}
    if path.is_dir() and (loose := next((file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES), None)):
        raise UserError(
            f"a folder of images or one of .tar shards in {path}",
            f"both, {loose.name} and {shards[0].name}",
            "split it",
        )
    samples = list_shards(shards, counts, unreadable)
    if not samples:
        damage = [f"{shard}: {reason}" for shard, reason in unreadable.items()]
        raise UserError(
            f"images with captions (key.jpg with key.txt or key.json) in {name}",
            f"none; {join_some(damage, limit=3) or dict(counts)}",
            "check the names inside with tar -tf",
        )
    return ImageCorpus(
        f"tar:{path.name}",
        samples,
        lambda sample: read_image(sample.path, size, channels, sample.part),
        counts,
        unreadable=unreadable,
    )
