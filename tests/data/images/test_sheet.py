"""The contact sheet shows every image once, unsmoothed."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from mmldlm.data.images.sheet import contact_sheet


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
