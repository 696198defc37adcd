"""The corpus `glyphs`: letters and digits of matplotlib's own fonts, with their Unicode names.
Needs no download.

DejaVu (Bitstream Vera's license) and STIX (OFL) come with matplotlib; the names are the standard
library's.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mmldlm.data.images.corpora.corpus import GLYPHS, ImageCorpus, ImageSample
from mmldlm.errors import UserError
from mmldlm.utils.figures import import_matplotlib

FACES = {
    "sans": "DejaVuSans",
    "serif bold": "DejaVuSerif-Bold",
    "mono": "DejaVuSansMono",
    "sans bold": "DejaVuSans-Bold",
    "serif": "DejaVuSerif",
    "sans oblique": "DejaVuSans-Oblique",
    "serif italic": "DejaVuSerif-Italic",
    "mono bold": "DejaVuSansMono-Bold",
    "roman": "STIXGeneral",
    "roman bold": "STIXGeneralBol",
}
# Digits, Latin, Greek (without the reserved place in its capitals) and Russian letters.
_RANGES = ("09", "AZ", "az", "\u0391\u03a1", "\u03a3\u03a9", "\u03b1\u03c9", "\u0410\u044f")
CHARACTERS = "".join(
    chr(code) for first, last in _RANGES for code in range(ord(first), ord(last) + 1)
)
VALIDATION_SHARE = 0.12


def open_glyphs(size: int, channels: int, faces: int | None = None) -> ImageCorpus:
    """Return 175 letters and digits in the first `faces` of ten faces (default: all), black on
    white.

    Args:
        size: side of an image in pixels.
        channels: 1, or 3 equal ones.

    Raises:
        UserError: an unknown number of faces, or images too small for letters.
    """
    if faces is not None and not 1 <= faces <= len(FACES):
        raise UserError(
            f"--faces from 1 to {len(FACES)}",
            str(faces),
            f"choose how many of: {', '.join(FACES)}",
        )
    if size < 8:
        raise UserError("--image-size of at least 8 for glyphs", str(size), "give 16, or more")
    styles = list(FACES)[:faces]
    samples = [
        ImageSample(f"{style} {character}", f"{style} {unicodedata.name(character).lower()}")
        for style in styles
        for character in CHARACTERS
    ]
    return ImageCorpus(
        f"{GLYPHS}:{len(styles)}",
        samples,
        lambda sample: draw(sample.image[:-2], sample.image[-1], size, channels),
        Counter(read=len(samples)),
        VALIDATION_SHARE,
        words_in_training=True,
        tokenizer="words",
    )


def draw(style: str, character: str, size: int, channels: int) -> np.ndarray:
    """Draw one character of a face: uint8 [size, size, channels]."""
    image = Image.new("L", (size, size), 255)
    place = (size / 2, size - round(3 * size / 16))
    ImageDraw.Draw(image).text(
        place, character, fill=0, font=_font(FACES[style], round(15 * size / 16)), anchor="ms"
    )
    return np.repeat(np.asarray(image)[:, :, None], channels, axis=2)


@lru_cache(maxsize=32)
def _font(face: str, height: int) -> ImageFont.FreeTypeFont:
    path = Path(import_matplotlib().get_data_path(), "fonts", "ttf", f"{face}.ttf")
    return ImageFont.truetype(path, height, layout_engine=ImageFont.Layout.BASIC)
