"""The letters: named right, drawn in every face, and different where their names are."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from mmldlm.data.corpora.drawn_images import (
    CHARACTERS,
    FACES,
    FONT,
    open_emoji,
    open_glyphs,
)
from mmldlm.data.corpora.drawn_images import (
    draw_glyph as draw,
)
from mmldlm.errors import UserError

needs_emoji = pytest.mark.skipif(
    not FONT.is_file() or find_spec("emoji") is None,
    reason="needs fonts-noto-color-emoji and mmldlm[emoji]",
)


def test_every_character_has_ink_in_every_face():
    corpus = open_glyphs(16, 1)
    assert len(corpus.samples) == 1750 == len(FACES) * len(CHARACTERS)
    assert len({sample.caption for sample in corpus.samples}) == 1750
    for sample in corpus.samples[::31]:
        image = corpus.read(sample)
        assert image.shape == (16, 16, 1) and image.min() < 100 and image.max() == 255, (
            sample.caption
        )
    captions = {sample.image: sample.caption for sample in corpus.samples}
    assert captions["serif bold \u03b4"] == "serif bold greek small letter delta"


def test_equal_shapes_have_equal_pixels_and_other_letters_do_not():
    latin, greek, other = (draw("sans", letter, 16, 3) for letter in ("A", "\u0391", "B"))
    np.testing.assert_array_equal(latin, greek)
    assert (latin != other).any() and latin.shape == (16, 16, 3)


def test_bounds_are_named():
    for bad in ({"faces": 11}, {"faces": 0}, {"size": 4}):
        with pytest.raises(UserError):
            open_glyphs(**{"size": 16, "channels": 1, **bad})


@needs_emoji
def test_emoji_have_color_and_names_and_only_skin_tones_are_held_out():
    corpus = open_emoji(32, 3)
    named = {sample.caption: sample for sample in corpus.samples}
    assert len(named) == len(corpus.samples) > 3500
    assert corpus.counts["read"] == len(corpus.samples) + corpus.counts["drop_not_in_font"]
    heart, flag, fist = (
        corpus.read(named[name]) for name in ("red heart", "France", "raised fist dark skin tone")
    )
    assert heart.shape == (32, 32, 3) and (heart[0, 0] == 255).all()
    red, green, blue = heart[14, 16].astype(int)
    assert red > green + 100 and red > blue + 100
    assert flag[16, 6, 2] > flag[16, 6, 0] and flag[16, 26, 0] > flag[16, 26, 2], (
        "blue left, red right"
    )
    assert fist[16, 16].astype(int).sum() < 400 and open_emoji(16, 1).read(named["dog"]).shape == (
        16,
        16,
        1,
    )
    # A sequence of five characters is one picture, not a row of people.
    couple = corpus.read(named["kiss woman man medium skin tone light skin tone"])
    assert couple.min() < 100 and (couple[:, 0] == 255).all()
    assert not corpus.may_hold_out(named["dog"]) and corpus.may_hold_out(
        named["raised fist dark skin tone"]
    )


def test_a_missing_or_wrong_font_is_named_with_its_set_up(tmp_path):
    with pytest.raises(UserError, match="apt-get install fonts-noto-color-emoji"):
        open_emoji(32, 3, tmp_path / "absent.ttf")
    (tmp_path / "text.ttf").write_text("not a font")
    with pytest.raises(UserError, match=r"(?s)text\.ttf.*--font"):
        open_emoji(32, 3, tmp_path / "text.ttf")
    with pytest.raises(UserError, match="at least 8"):
        open_emoji(4, 3)
