"""Contact sheets: many small images with their captions in one PNG, for looking at them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mmldlm.utils.atomic_files import atomic_file
from mmldlm.utils.figures import import_matplotlib

_CELL, _GAP, _LINE, _FONT = (
    96,
    8,
    13,
    11,
)  # pixels: least width of a cell, its margin, a line of text, its letters
_MAX_LINES = 3


def contact_sheet(
    images: np.ndarray,
    captions: Sequence[str],
    path: str | os.PathLike,
    columns: int | None = None,
) -> None:
    """Write one PNG with every image over its caption, small images enlarged without smoothing.

    Args:
        images: uint8 [n, H, W, C], C of 1 or 3.
        captions: n texts; what does not fit into three lines is cut.
        path: the PNG, written atomically.
        columns: images a row (default: about a square sheet).
    """
    assert len(images) == len(captions) > 0
    factor = max(1, -(-_CELL // images.shape[1]))
    side = images.shape[1] * factor, images.shape[2] * factor
    columns = columns or max(1, round((1.4 * len(images) * side[0] / side[1]) ** 0.5))
    width, height = side[1] + _GAP, side[0] + _GAP + _MAX_LINES * _LINE
    sheet = Image.new(
        "RGB",
        (columns * width + _GAP, -(-len(images) // columns) * height + _GAP),
        (244, 244, 244),
    )
    font, draw = _font(), ImageDraw.Draw(sheet)
    for number, (image, caption) in enumerate(zip(images, captions)):
        left, top = _GAP + number % columns * width, _GAP + number // columns * height
        picture = Image.fromarray(np.squeeze(image, -1) if image.shape[-1] == 1 else image)
        sheet.paste(picture.resize(side[::-1], Image.Resampling.NEAREST), (left, top))
        for line, text in enumerate(_lines(caption, font, side[1])):
            draw.text((left, top + side[0] + 1 + line * _LINE), text, fill=(20, 20, 20), font=font)
    with atomic_file(Path(path)) as file:
        sheet.save(file, format="PNG")


def _font() -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(
        Path(import_matplotlib().get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), _FONT
    )


def _lines(caption: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Break a caption at spaces into lines of at most `width` pixels; words that are too long are
    cut.
    """
    lines: list[str] = []
    for word in caption.split()[:64]:
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and font.getlength(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(word[:64])
    while any(font.getlength(line) > width for line in lines):
        lines = [line if font.getlength(line) <= width else line[:-1] for line in lines]
    if len(lines) > _MAX_LINES:
        lines = [*lines[: _MAX_LINES - 1], f"{lines[_MAX_LINES - 1][:-1]}\u2026"]
    return lines
