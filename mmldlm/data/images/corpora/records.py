"""Lists of images with captions: .jsonl, COCO's captions, and the list of the earlier MM-LDLM
scripts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mmldlm.data.corpora.image_records import image_of
from mmldlm.data.corpora.text_files import FileUnit
from mmldlm.data.images.corpora.corpus import ImageSample, read_csv
from mmldlm.data.sentences import fold_spaces
from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_os_error, is_utf8
from mmldlm.utils.input_files import read_bytes

_FORMS = (
    "a list of {image_path, caption, image_id}, or COCO's object with images {id, file_name} and"
    " annotations {image_id, caption}"
)


def list_jsonl(path: Path, root: Path, counts: Counter) -> list[ImageSample]:
    """Return the samples of a .jsonl of {image, caption or text[, group]}; a caption may be a list
    of captions.

    Lines that are not such records are counted as dropped.

    Raises:
        UserError: it is not readable, or its first line is not JSON.
    """
    unit, overlong = FileUnit(path, "jsonl", 0, None, errors="surrogateescape"), Counter()
    records = unit.records(overlong, keep_bad=True)
    samples = [sample for _, record in records for sample in samples_of(record, root, counts)]
    counts.update(overlong)
    return samples


def list_csv(path: Path, root: Path, counts: Counter) -> list[ImageSample]:
    """Return the samples of a .csv with columns for the image and its caption.

    Raises:
        UserError: it is not such a table.
    """
    return [sample for record in read_csv(path) for sample in samples_of(record, root, counts)]


def list_json(path: Path, root: Path, counts: Counter) -> list[ImageSample]:
    """Return the samples of a .json: COCO's captions, or MM-LDLM's list. Captions of one image are
    one group.

    Raises:
        UserError: not JSON, or of another form.
    """
    try:
        content = json.loads(read_bytes(path, 1 << 34))
    except OSError as error:
        raise UserError(f"a readable {path}", describe_os_error(error), "check the file") from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"JSON in {path}", f"damaged file: {str(error)[:200]}", "copy the file again"
        ) from None
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
    names = {str(image.get("id")): image.get("file_name") for image in images}
    captioned = set()
    for annotation in content["annotations"]:
        if not isinstance(annotation, dict):
            yield None
            continue
        key = str(annotation.get("image_id"))
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
    captions = record.get("caption", record.get("text"))
    group = record.get("group", record.get("image_id"))
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
            own = f"image {image}" if group is None else f"group {group}"
            yield ImageSample(_name(image, root), fold_spaces(caption), own, root / image)


def _name(image: str, root: Path) -> str:
    """Return the name of an image in the manifest: relative, because paths of this machine mean
    nothing elsewhere.
    """
    path = PurePosixPath(image)
    if not path.is_absolute():
        return image
    return (
        path.relative_to(root.resolve()).as_posix()
        if path.is_relative_to(root.resolve())
        else path.name
    )
