"""Emoji: drawn and named right, only compositions are held out, and what is missing is named with
its set-up.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from mmldlm.data.images.corpora.emoji import FONT, open_emoji
from mmldlm.errors import UserError

needs_emoji = pytest.mark.skipif(
    not FONT.is_file() or find_spec("emoji") is None,
    reason="needs fonts-noto-color-emoji and mmldlm[emoji]",
)


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
