"""The letters: named right, drawn in every face, and different where their names are."""

from __future__ import annotations

import numpy as np
import pytest

from mmldlm.data.images.corpora.glyphs import CHARACTERS, FACES, draw, open_glyphs
from mmldlm.errors import UserError


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
