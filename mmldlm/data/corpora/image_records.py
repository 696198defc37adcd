"""Which records are of images with captions: they name an image, under one of the names that are
in use.
"""

from __future__ import annotations

from typing import Any

IMAGE_SUFFIXES = (
    ".png",
    ".jpg",
    ".jpeg",
    ".jpe",
    ".jfif",
    ".webp",
    ".gif",
    ".bmp",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
)
_NOT_READ = (
    ".heic",
    ".heif",
    ".avif",
    ".jp2",
    ".jxl",
    ".svg",
    ".tga",
    ".dng",
)  # images that are not supported
_ALWAYS = ("image", "image_path")
# Names that records of texts have, too: they count where the value ends like the name of an image.
_PERHAPS = (
    "file_name",
    "filename",
    "filepath",
    "file_path",
    "file",
    "path",
    "img",
    "img_path",
    "image_file",
    "image_name",
)


def image_of(record: Any) -> Any:
    """Return the image that a record names, a path in a valid one; None for a record without an
    image.
    """
    if not isinstance(record, dict):
        return None
    for key in _ALWAYS:
        if key in record:
            return record[key]
    for key in _PERHAPS:
        value = record.get(key)
        if isinstance(value, str) and value.lower().endswith(IMAGE_SUFFIXES + _NOT_READ):
            return value
    return None


def image_column(names: list[str], is_picture: list[bool]) -> str | None:
    """Return the column of a table that holds or names images; None for a table of texts.

    Args:
        names: of the columns.
        is_picture: whether each holds the bytes of files, as datasets of images do.
    """
    return next((name for name, holds in zip(names, is_picture) if holds or name in _ALWAYS), None)
