"""The corpora that are drawn: `glyphs` and `emoji`.

`glyphs` are letters and digits of matplotlib's own fonts with their Unicode names; it needs no
download. DejaVu (Bitstream Vera's license) and STIX (OFL) come with matplotlib; the names are the
standard library's.

`emoji` are the pictures of Noto Color Emoji with the names of Unicode's CLDR: Debian's
fonts-noto-color-emoji (pictures Apache-2.0, font OFL) and PyPI's emoji (BSD); both are local.
"""

from __future__ import annotations

import importlib
import os
import unicodedata
from collections import Counter
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import numpy as np
from PIL import Image, ImageDraw, ImageFont, features

from mmldlm.data.corpora.image_lists import EMOJI, GLYPHS, ImageCorpus, ImageSample
from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import sha256_of
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
    chr(code) for ends in _RANGES for code in range(ord(ends[0]), ord(ends[1]) + 1)
)
_GLYPHS_HELD_OUT = 0.12
FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
_EMOJI_HELD_OUT = 0.12
# The only size of its bitmaps, their width, and the free rows above them.
_STRIKE, _CANVAS, _TOP = (109, 136, 4)
_SKIN_TONE = "skin tone"
_SET_UP = "apt-get install fonts-noto-color-emoji, or give its NotoColorEmoji.ttf with --font FILE"


def open_glyphs(size: int, channels: int, faces: int | None = None) -> ImageCorpus:
    """Return 175 letters and digits in the first `faces` of ten faces (default: all), black on
    white.

    Args:
        size: Side of an image in pixels.
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
        lambda sample: draw_glyph(sample.image[:-2], sample.image[-1], size, channels),
        Counter(read=len(samples)),
        _GLYPHS_HELD_OUT,
        words_in_training=True,
        tokenizer="words",
    )


def draw_glyph(style: str, character: str, size: int, channels: int) -> np.ndarray:
    """Draw one character of a face: uint8 [size, size, channels]."""
    image = Image.new("L", (size, size), 255)
    baseline = (size / 2, size - round(3 * size / 16))
    ImageDraw.Draw(image).text(
        baseline, character, fill=0, font=_font(FACES[style], round(15 * size / 16)), anchor="ms"
    )
    return np.repeat(np.asarray(image)[:, :, None], channels, axis=2)


@lru_cache(maxsize=32)
def _font(face: str, height: int) -> ImageFont.FreeTypeFont:
    path = Path(import_matplotlib().get_data_path(), "fonts", "ttf", f"{face}.ttf")
    return ImageFont.truetype(str(path), height, layout_engine=ImageFont.Layout.BASIC)


def open_emoji(
    size: int, channels: int, font_file: str | os.PathLike | None = None
) -> ImageCorpus:
    """Return the fully qualified emoji that the font draws as one picture, over white, with their
    English names.

    Only names with a skin tone are held out, so that validation has unseen compositions of seen
    words.

    Args:
        size: Side of an image in pixels.
        channels: 3 (RGB) or 1 (gray).
        font_file: Noto Color Emoji with bitmaps (default: where Debian's package puts it).

    Raises:
        UserError: no such font, no package `emoji`, a Pillow that cannot join sequences, or images
            too small.
    """
    if size < 8:
        raise UserError("--image-size of at least 8 for emoji", str(size), "give 32, or more")
    path = Path(font_file or FONT)
    font, names = _open_emoji_font(path), _emoji_package()
    qualified = names.STATUS["fully_qualified"]
    # Sorted, so that another order in the package changes nothing.
    emoji = sorted(
        (char, entry["en"])
        for char, entry in names.EMOJI_DATA.items()
        if entry["status"] == qualified
    )
    samples = [
        ImageSample(char, name.strip(":").replace("_", " "))
        for char, name in emoji
        if _has(font, char)
    ]
    if not samples:
        raise UserError(f"a font with emoji in {path}", f"none of {len(emoji):,} emoji", _SET_UP)
    return ImageCorpus(
        f"{EMOJI}:{names.__version__}:{path.name}:{sha256_of(path)[:12]}",
        samples,
        lambda sample: _draw_emoji(font, sample.image, size, channels),
        Counter(read=len(emoji), drop_not_in_font=len(emoji) - len(samples)),
        _EMOJI_HELD_OUT,
        words_in_training=True,
        may_hold_out=lambda sample: _SKIN_TONE in sample.caption,
        tokenizer="words",
    )


def _emoji_package() -> ModuleType:
    try:
        return importlib.import_module("emoji")
    except ImportError:
        raise UserError(
            "the package emoji, for names", "it is not installed", "pip install 'mmldlm[emoji]'"
        ) from None


def _open_emoji_font(path: Path) -> ImageFont.FreeTypeFont:
    if not features.check("raqm"):
        raise UserError(
            "a Pillow with libraqm, which joins sequences of emoji",
            "one without",
            "pip install --force-reinstall pillow",
        )
    if not path.is_file():
        raise UserError("the font Noto Color Emoji", f"no file {path}", _SET_UP)
    try:
        return ImageFont.truetype(str(path), _STRIKE, layout_engine=ImageFont.Layout.RAQM)
    except OSError as error:
        raise UserError(
            f"Noto Color Emoji with its bitmaps of {_STRIKE} pixels in {path}", str(error), _SET_UP
        ) from None


def _has(font: ImageFont.FreeTypeFont, char: str) -> bool:
    """Whether the font draws an emoji as one picture: newer ones are blank, newer sequences fall
    into their parts.
    """
    left, top, right, bottom = font.getbbox(char)
    return bottom > top and right > left and font.getlength(char) <= _CANVAS + 1


def _draw_emoji(font: ImageFont.FreeTypeFont, char: str, size: int, channels: int) -> np.ndarray:
    """Draw one emoji: uint8 [size, size, channels]."""
    image = Image.new("RGB", (_CANVAS, _CANVAS), "white")
    ImageDraw.Draw(image).text((0, _TOP), char, font=font, embedded_color=True)
    image = image.resize((size, size), Image.Resampling.LANCZOS).convert(
        "L" if channels == 1 else "RGB"
    )
    return np.array(image, np.uint8).reshape(size, size, channels)
