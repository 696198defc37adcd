"""Reading image files, and contact sheets."""

from __future__ import annotations

import os
import struct

import numpy as np
import pytest
from PIL import Image

from mmldlm.data.images import UnreadableImage, contact_sheet, read_image


def _save(path, image, **options):
    image.save(path, **options)
    return path


def test_conversions_with_one_meaning(tmp_path):
    red = Image.new("RGB", (40, 20), "red")
    read = {
        "wide.png": read_image(_save(tmp_path / "wide.png", red), 8, 3),
        "cmyk": read_image(_save(tmp_path / "c.tif", red.convert("CMYK")), 8, 3),
        "palette": read_image(_save(tmp_path / "p.gif", red.convert("P")), 8, 3),
    }
    for name, image in read.items():
        assert image.shape == (8, 8, 3) and image.dtype == np.uint8, name
        np.testing.assert_allclose(image.reshape(-1, 3), [[255, 0, 0]] * 64, atol=3, err_msg=name)
    assert read_image(tmp_path / "wide.png", 8, 1)[0, 0, 0] == 76  # luma of red
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    assert (read_image(_save(tmp_path / "a.png", clear), 8, 3) == 255).all(), (
        "alpha lies over white"
    )
    deep = Image.fromarray(np.full((8, 8), 65535 // 2, np.uint16))
    assert (read_image(_save(tmp_path / "d.png", deep), 8, 1) == 127).all(), (
        "16 bits are scaled, not clipped"
    )


def test_the_center_is_cut_out(tmp_path):
    image = Image.new("L", (24, 8), 0)
    image.paste(255, (8, 0, 16, 8))
    assert (read_image(_save(tmp_path / "x.png", image), 8, 1) == 255).all()


@pytest.mark.parametrize(
    "name, mode, width", [("x.bmp", "RGB", 720), ("x.bmp", "L", 160), ("x.tif", "RGB", 720)]
)
def test_8_bits_are_8_bits_whatever_numbers_a_file_has(tmp_path, name, mode, width):
    """Rows of 2160 bytes, or a place in the file, have a 16 in them, too."""
    options = {"compression": "tiff_lzw"} if name == "x.tif" else {}
    noise = np.random.default_rng(0).integers(0, 40, (32, width), dtype=np.uint8)
    image = Image.fromarray(noise).convert(mode)
    path = tmp_path / name
    image.save(path, **options)
    for white in (None, 4095):
        found = read_image(path, 32, len(mode), white=white)
        assert 0 < found.max() < 40


def test_a_bmp_of_16_bits_a_pixel_is_read(tmp_path):
    header = struct.pack("<2sIHHI", b"BM", 66 + 8 * 8 * 2, 0, 0, 66)
    header += struct.pack("<IiiHHIIiiII", 40, 8, 8, 1, 16, 3, 8 * 8 * 2, 0, 0, 0, 0)
    header += struct.pack("<III", 0xF800, 0x07E0, 0x001F)  # RGB565
    (tmp_path / "x.bmp").write_bytes(header + struct.pack("<64H", *[0x0841] * 64))
    for white in (None, 4095):
        assert 0 < read_image(tmp_path / "x.bmp", 8, 3, white=white).max() < 20


def test_orientation_is_applied(tmp_path):
    image, exif = Image.new("L", (8, 8), 0), Image.Exif()
    image.paste(255, (0, 0, 8, 4))
    exif[0x0112] = 3  # upside down
    found = read_image(_save(tmp_path / "x.png", image, exif=exif), 8, 1)
    assert found[:3].max() == 0 and found[5:].min() == 255


@pytest.mark.parametrize(
    "kind", ["empty", "text", "truncated", "frames", "float", "missing", "fifo"]
)
def test_what_is_not_one_picture_has_a_reason(tmp_path, kind):
    path = tmp_path / "x.png"
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    noise.save(path)
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("no image at all")
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[:3000])
    elif kind == "frames":
        noise.save(path, format="GIF", save_all=True, append_images=[noise.rotate(90)])
    elif kind == "float":
        Image.new("F", (8, 8), 0.5).save(path, format="TIFF")
    else:
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path)
    with pytest.raises(UnreadableImage) as error:
        read_image(path, 8, 3)
    words = {
        "empty": "empty",
        "text": "not an image",
        "truncated": "truncated",
        "frames": "frames",
        "float": "mode F",
    }
    assert words.get(kind, "") in str(error.value) and str(error.value)


@pytest.mark.parametrize("channels", [1, 3])
def test_every_image_is_on_the_sheet(tmp_path, channels):
    images = np.full((5, 16, 16, channels), 255, np.uint8)
    images[:, 4:8, 4:8] = np.arange(5).reshape(5, 1, 1, 1) * 20
    contact_sheet(
        images, ["a", "b c", "", "w" * 300, "many words " * 30], tmp_path / "s.png", columns=3
    )
    sheet = np.asarray(Image.open(tmp_path / "s.png"))
    assert sheet.shape[1] > 3 * 96 and sheet.shape[0] > 2 * 96
    for number in range(5):
        left, top = 8 + number % 3 * 104 + 30, 8 + number // 3 * 143 + 30
        assert (sheet[top : top + 10, left : left + 10] == number * 20).all()
