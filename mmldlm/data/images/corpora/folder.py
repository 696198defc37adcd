"""A folder of images, each with its caption in a .txt file of the same name next to it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from mmldlm.data.images.corpora.corpus import ImageSample
from mmldlm.data.images.image_files import SUFFIXES
from mmldlm.data.sentences import MAX_TEXT_BYTES, TOO_LARGE
from mmldlm.errors import UserError
from mmldlm.utils.formatting import count_noun, join_some
from mmldlm.utils.input_files import open_regular


def list_folder(folder: Path, counts: Counter) -> list[ImageSample]:
    """Return the captioned images below a folder, by name; count images without caption and the reverse.

    Raises:
        UserError: no image has a caption.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    images = [path for path in files if path.suffix.lower() in SUFFIXES]
    captions = {path.with_suffix(""): path for path in files if path.suffix == ".txt"}
    paired = [path for path in images if path.with_suffix("") in captions]
    if not paired:
        found = f"{count_noun(len(images), 'image')} and {count_noun(len(captions), '.txt file')}"
        some = join_some(path.name for path in [*images[:2], *sorted(captions.values())[:2]])
        raise UserError(
            f"images ({', '.join(SUFFIXES)}) and captions of the same name (cat.png, cat.txt) in {folder}",
            f"{found}, no pair of one name: {some}" if some else "neither of them",
            "write the caption of each image into a .txt file next to it; to prepare texts, move the images elsewhere",
        )
    without_image = captions.keys() - {path.with_suffix("") for path in paired}
    counts["read"] += len(images) + len(without_image)
    counts["drop_no_image"] += len(without_image)
    counts["drop_no_caption"] += len(images) - len(paired)
    samples = []
    for path in paired:
        caption = _read_caption(captions[path.with_suffix("")], counts)
        if caption is not None:
            samples.append(ImageSample(path.relative_to(folder).as_posix(), caption, None, path))
    return samples


def _read_caption(path: Path, counts: Counter) -> str | None:
    try:
        with open_regular(path) as file:
            raw = file.read(MAX_TEXT_BYTES + 1)
        if len(raw) > MAX_TEXT_BYTES:
            counts[TOO_LARGE] += 1
            return None
        caption = " ".join(raw.decode("utf-8-sig").split())
    except OSError:
        counts["drop_unreadable_caption"] += 1
        return None
    except UnicodeDecodeError:
        counts["drop_not_unicode"] += 1
        return None
    if not caption:
        counts["drop_no_caption"] += 1
    return caption or None
