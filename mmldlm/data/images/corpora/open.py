"""Open a corpus of images by name."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from mmldlm.data.images.corpora.corpus import GLYPHS, ImageCorpus
from mmldlm.data.images.corpora.folder import list_folder
from mmldlm.data.images.corpora.glyphs import open_glyphs
from mmldlm.data.images.corpora.records import list_json, list_jsonl
from mmldlm.data.images.image_files import read_image
from mmldlm.errors import UserError


def open_image_corpus(
    name: str, size: int, channels: int, faces: int | None = None, data_root: str | None = None
) -> ImageCorpus:
    """Open a corpus by name: `glyphs`, a folder, a .jsonl or a .json.

    Args:
        size, channels: of the images that are read.
        faces: of glyphs.
        data_root: folder to which the image paths of a .jsonl or .json are relative (default: that of the file).

    Raises:
        UserError: not there, of an unknown form, or without a captioned image.
    """
    path = Path(name)
    if not path.exists() and name == GLYPHS:
        return open_glyphs(size, channels, faces)
    if not path.exists():
        raise UserError(
            f"a corpus of images at {path}: a folder of images with captions in .txt files, a .jsonl or a .json",
            "nothing there",
            f"check the path, or use '{GLYPHS}', which needs no files",
        )
    counts: Counter = Counter()
    if path.is_dir():
        samples, kind = list_folder(path, counts), "images"
    elif path.suffix in (".json", ".jsonl"):
        listing = list_json if path.suffix == ".json" else list_jsonl
        samples, kind = listing(path, Path(data_root or path.parent), counts), path.suffix[1:]
    else:
        raise UserError("a corpus of images: a folder, a .jsonl or a .json", path.name, "convert it to one of these")
    if not samples:
        raise UserError(f"images with captions in {path}", f"none; {dict(counts)}", "check the fields and the names")
    return ImageCorpus(f"{kind}:{path.resolve().name}", samples, lambda s: read_image(s.path, size, channels), counts)
