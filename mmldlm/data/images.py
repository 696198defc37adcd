"""Images as arrays: read files, cut into patches, and draw contact sheets.

What cannot be read is an error with a reason, never a gray image.
"""

from __future__ import annotations

import io
import os
import re
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps, UnidentifiedImageError

from mmldlm.errors import UserError
from mmldlm.utils.atomic_files import atomic_file
from mmldlm.utils.figures import import_matplotlib
from mmldlm.utils.formatting import describe_os_error, first_line
from mmldlm.utils.input_files import open_regular

# Formats that Pillow decodes itself: others would start programs, such as Ghostscript.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# The largest value of 16 bits.
_DEEP_WHITE = 65535
# TIFF tags: SMaxSampleValue, MaxSampleValue, BitsPerSample.
_DECLARED = (341, 281, 258)
_DIRECT = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
# Pixels: least width of a cell, its margin, a line of text, height and width of its letters.
_CELL, _GAP, _LINE, _FONT, _LETTER = (96, 8, 13, 11, 7)
_MAX_LINES = 3


class UnreadableImage(ValueError):
    """The file holds no image of which one picture is defined; the message is the reason."""


def read_image(
    path: Path,
    size: int,
    channels: int,
    part: tuple[int, int] | None = None,
    white: int | None = None,
    peaks: list[int] | None = None,
) -> np.ndarray:
    """Read an image: its short side resized to `size`, its center cut out.

    Rotated as its EXIF entry says; transparency over white; CMYK and YCbCr converted; 16 bits of
    gray to 8. Cameras and microscopes write 10 to 14 bits into files of 16: the range is then what
    the file's tags declare, or `white`.

    Args:
        channels: Number of channels, 3 (RGB) or 1 (gray, ITU-R 601-2 luma).
        part: Offset and number of bytes of the image in a larger file; None: all of it.
        white: Largest value of gray images of 16 bits (default: as they declare, else 65,535).
        peaks: Receiver of the largest value of an image of 16 bits that declares no range, for a
            caller who judges many images together; None: an image that uses less than a quarter of
            the range is refused.

    Returns:
        uint8 [size, size, channels].

    Raises:
        UnreadableImage: missing, empty, truncated, damaged, animated, too large, or of an
            undefined range of values.
    """
    try:
        with open_regular(path) as whole, warnings.catch_warnings():
            # Pillow warns about metadata; damage is an error.
            warnings.simplefilter("ignore")
            file = whole if part is None else _cut_out(whole, *part)
            if not file.read(1):
                raise UnreadableImage("empty file")
            file.seek(0)
            with Image.open(file, formats=_FORMATS) as image:
                return _convert(image, size, channels, _Depth(white, peaks))
    except UnreadableImage:
        raise
    except UnidentifiedImageError:
        raise UnreadableImage("not an image") from None
    except Image.DecompressionBombError:
        raise UnreadableImage("more than 178 million pixels") from None
    except OSError as error:
        reason = describe_os_error(error)
        raise UnreadableImage("truncated" if "truncated" in reason else reason) from None
    except Exception as error:
        # Decoders raise many types on damaged files.
        raise UnreadableImage(f"damaged: {first_line(error)}") from None


def fit_picture(picture: Image.Image | np.ndarray, size: int, channels: int) -> np.ndarray:
    """Convert a picture as `read_image` does.

    Args:
        picture: Opened with PIL, or uint8 [H, W] or [H, W, C] with 1 (gray), 3 or 4 channels.

    Returns:
        uint8 [size, size, channels].

    Raises:
        UserError: neither, or values of an undefined range.
    """
    expected = "a picture: a file, one opened with PIL, or an array uint8 [H, W] or [H, W, C]"
    try:
        if isinstance(picture, np.ndarray):
            if picture.dtype != np.uint8:
                raise TypeError(f"an array of {picture.dtype}")
            squeezed = picture[..., 0] if picture.shape[2:] == (1,) else picture
            picture = Image.fromarray(squeezed)
        if not isinstance(picture, Image.Image):
            raise TypeError(f"an object of type {type(picture).__name__}")
        return _convert(picture, size, channels, _Depth(None, None))
    except (TypeError, ValueError) as error:
        raise UserError(expected, first_line(error), "give it in one of these forms") from error


def _cut_out(file: BinaryIO, offset: int, count: int) -> BinaryIO:
    file.seek(offset)
    content = file.read(count)
    if len(content) < count:
        raise UnreadableImage("truncated")
    return io.BytesIO(content)


@dataclass(frozen=True)
class _Depth:
    """How values of 16 bits are scaled; see `read_image`."""

    white: int | None
    peaks: list[int] | None

    def scale_gray(self, image: Image.Image, declared: int | None) -> Image.Image:
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > _DEEP_WHITE:
            raise UnreadableImage(f"values of mode {image.mode} outside 0 to {_DEEP_WHITE}")
        white, peak = self.white or declared or _DEEP_WHITE, int(values.max())
        if peak > white:
            raise UnreadableImage(f"a value of {peak}, above white ({white})")
        if self.white is None and declared is None:
            self._judge(peak)
        return Image.fromarray(np.rint(values * 255 / white).astype(np.uint8))

    def check_color(self, image: Image.Image, declared: int | None) -> None:
        """Check an image of 16 bits a color, of which Pillow reads the upper 8."""
        white = self.white or declared or _DEEP_WHITE
        if white != _DEEP_WHITE:
            raise UnreadableImage(
                f"16 bits a color with values to {white}: convert it to 8 bits a color"
            )
        if self.white is None and declared is None:
            extrema: Any = image.convert("RGB").getextrema()
            self._judge(max(high for _, high in extrema) * 256 + 255)

    def _judge(self, peak: int) -> None:
        if self.peaks is not None:
            self.peaks.append(peak)
        elif is_dark(peak):
            raise UnreadableImage(
                f"16 bits of which values above {peak} are not used: convert it to 8 bits"
            )


def is_dark(peak: int | np.ndarray) -> bool | np.ndarray:
    """Whether the largest value of an image of 16 bits suggests a range of fewer bits."""
    return peak <= _DEEP_WHITE // 4


def _declared_white(image: Image.Image) -> int | None:
    """Return the largest value that a TIFF declares, of 9 to 15 bits; None where it declares none,
    or all of 16.
    """
    tags = getattr(image, "tag_v2", {})
    for tag in _DECLARED:
        entry = tags.get(tag)
        value = max(entry) if isinstance(entry, tuple) and entry else entry
        if isinstance(value, int | float) and value == int(value):
            white = 2 ** int(value) - 1 if tag == _DECLARED[-1] and value < 16 else int(value)
            if 2**9 <= white + 1 < 2**16 and (white & (white + 1)) == 0:
                return white
    return None


def _is_deep(image: Image.Image) -> bool:
    """Whether a color image that is not decoded yet has 16 bits a color, by the form in which its
    file has them.
    """
    arguments = [tile[3] for tile in getattr(image, "tile", ()) if tile[0] != "ppm"]
    # The raw mode, as in "RGB;16B"; alone, or before numbers such as the length of a row. "BGR;16"
    # has 16 bits a pixel.
    raw_modes = [each if isinstance(each, str) else (each or [""])[0] for each in arguments]
    return image.mode in _DIRECT and any(re.search(r";16[BLN]$", str(mode)) for mode in raw_modes)


def _convert(image: Image.Image, size: int, channels: int, depth: _Depth) -> np.ndarray:
    num_frames = getattr(image, "n_frames", 1)
    # A stereo photograph: its first picture is the photograph.
    if num_frames > 1 and image.format != "MPO":
        raise UnreadableImage("several frames")
    declared, is_deep = _declared_white(image), _is_deep(image)
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        image = depth.scale_gray(image, declared)
    elif is_deep:
        depth.check_color(image, declared)
    if image.mode not in _DIRECT:
        raise UnreadableImage(f"values of mode {image.mode}")
    if image.has_transparency_data:
        over = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(over, image.convert("RGBA"))
    image = image.convert("L" if channels == 1 else "RGB")
    fitted = ImageOps.fit(image, (size, size), Image.Resampling.LANCZOS)
    return np.array(fitted, np.uint8).reshape(size, size, channels)


def to_patches(images: np.ndarray, patch: int) -> np.ndarray:
    """Cut images [B, S, S, C] into patches [B, (S / patch)^2, patch * patch * C], row by row; any
    dtype.
    """
    count, size, _, channels = images.shape
    side = size // patch
    grid = images.reshape(count, side, patch, side, patch, channels).transpose(0, 1, 3, 2, 4, 5)
    return np.ascontiguousarray(grid).reshape(count, side * side, patch * patch * channels)


def from_patches(patches: np.ndarray, patch: int, channels: int) -> np.ndarray:
    """Join patches [B, N, patch * patch * C], N a square, into images [B, S, S, C]; any dtype."""
    count, side = len(patches), round(patches.shape[1] ** 0.5)
    grid = patches.reshape(count, side, side, patch, patch, channels).transpose(0, 1, 3, 2, 4, 5)
    return np.ascontiguousarray(grid).reshape(count, side * patch, side * patch, channels)


def contact_sheet(
    images: np.ndarray,
    captions: Sequence[str],
    path: str | os.PathLike,
    columns: int | None = None,
) -> None:
    """Write one PNG with every image over its caption, small images enlarged without smoothing.

    Args:
        images: Images, uint8 [N, H, W, C] with C of 1 or 3.
        captions: N texts, of which three lines are shown.
        path: PNG file, written atomically.
        columns: Images per row (default: about a square sheet).
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
    for cell, (image, caption) in enumerate(zip(images, captions)):
        left, top = _GAP + cell % columns * width, _GAP + cell // columns * height
        picture = Image.fromarray(np.squeeze(image, -1) if image.shape[-1] == 1 else image)
        sheet.paste(picture.resize(side[::-1], Image.Resampling.NEAREST), (left, top))
        lines = textwrap.wrap(
            caption, side[1] // _LETTER, max_lines=_MAX_LINES, placeholder="\u2026"
        )
        for line, text in enumerate(lines):
            draw.text((left, top + side[0] + 1 + line * _LINE), text, fill=(20, 20, 20), font=font)
    with atomic_file(Path(path)) as file:
        sheet.save(file, format="PNG")


def _font() -> ImageFont.FreeTypeFont:
    path = Path(import_matplotlib().get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    return ImageFont.truetype(str(path), _FONT)  # Pillow 10.1 takes no Path
