"""Read an image file into pixels. What cannot be read is an error with a reason, never a gray image."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from mmldlm.utils.formatting import describe_os_error, first_line
from mmldlm.utils.input_files import open_regular

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
# Formats that Pillow decodes itself: others would start programs, such as Ghostscript.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_DIRECT = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")


class UnreadableImage(ValueError):
    """The file holds no image of which one picture is defined; the message is the reason."""


def read_image(path: Path, size: int, channels: int, part: tuple[int, int] | None = None) -> np.ndarray:
    """Read an image: its short side resized to `size`, its center cut out.

    Rotated as its EXIF entry says; transparency over white; CMYK and YCbCr converted; 16 bits of gray to 8.

    Args:
        channels: 3 (RGB) or 1 (gray, ITU-R 601-2 luma).
        part: offset and number of bytes of the image in a larger file; None: all of it.

    Returns:
        uint8 [size, size, channels].

    Raises:
        UnreadableImage: missing, empty, truncated, damaged, animated, too large, or of an undefined range of values.
    """
    try:
        with open_regular(path) as whole, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # remarks on metadata; damage is an error
            file = whole if part is None else _cut_out(whole, *part)
            if not file.read(1):
                raise UnreadableImage("empty file")
            file.seek(0)
            with Image.open(file, formats=_FORMATS) as image:
                return _convert(image, size, channels)
    except UnreadableImage:
        raise
    except UnidentifiedImageError:
        raise UnreadableImage("not an image") from None
    except Image.DecompressionBombError:
        raise UnreadableImage("more than 178 million pixels") from None
    except OSError as error:
        known = describe_os_error(error)
        raise UnreadableImage("truncated" if "truncated" in known else known) from None
    except Exception as error:  # decoders raise many types on damaged files
        raise UnreadableImage(f"damaged: {first_line(error)}") from None


def _cut_out(file: BinaryIO, offset: int, count: int) -> BinaryIO:
    file.seek(offset)
    content = file.read(count)
    if len(content) < count:
        raise UnreadableImage("truncated")
    return io.BytesIO(content)


def _convert(image: Image.Image, size: int, channels: int) -> np.ndarray:
    num_frames = getattr(image, "n_frames", 1)
    if num_frames > 1 and image.format != "MPO":  # a stereo photograph: its first picture is the photograph
        raise UnreadableImage("several frames")
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        image = _from_16_bits(image)
    if image.mode not in _DIRECT:
        raise UnreadableImage(f"values of mode {image.mode}")
    if image.has_transparency_data:
        over = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(over, image.convert("RGBA"))
    image = image.convert("L" if channels == 1 else "RGB")
    fitted = ImageOps.fit(image, (size, size), Image.Resampling.LANCZOS)
    return np.array(fitted, np.uint8).reshape(size, size, channels)


def _from_16_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise UnreadableImage(f"values of mode {image.mode} outside 0 to 65535")
    return Image.fromarray(np.rint(values / 257).astype(np.uint8))
