"""Shifts: functions of (seed, epoch, sample, slot), with the border's color, and never a flip."""

from __future__ import annotations

import numpy as np

from mmldlm.data.images.augment import draw_shifts, shift_images, shift_latents
from mmldlm.data.images.codec import ImageCodec


def test_draws_do_not_depend_on_the_micro_batch():
    ids, slots = np.arange(50) * 7, np.arange(50)
    whole = draw_shifts(1, 2, ids, slots, 2)
    parts = [
        draw_shifts(1, 2, ids[part], slots[part], 2) for part in (slice(0, 13), slice(13, 50))
    ]
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    assert set(np.unique(whole)) == {-2, -1, 0, 1, 2}
    for other in (
        draw_shifts(2, 2, ids, slots, 2),
        draw_shifts(1, 3, ids, slots, 2),
        draw_shifts(1, 2, ids, slots + 1, 2),
    ):
        assert (other != whole).any()
    assert draw_shifts(1, 2, ids[:0], slots[:0], 2).shape == (0, 2)


def test_what_comes_in_has_the_color_of_the_border():
    image = np.arange(16, dtype=np.uint8).reshape(1, 4, 4, 1)
    shifted = shift_images(image, np.array([[1, -2]]))[0, :, :, 0]
    np.testing.assert_array_equal(
        shifted, [[2, 3, 3, 3], [2, 3, 3, 3], [6, 7, 7, 7], [10, 11, 11, 11]]
    )
    np.testing.assert_array_equal(shift_images(image, np.zeros((1, 2), int)), image)


def test_latents_of_pixels_shift_as_their_images():
    images = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    codec = ImageCodec(8, 4, 3, "pixels", 4, 48)
    shifts = draw_shifts(0, 0, np.arange(6), np.arange(6), 3)
    latents = shift_latents(codec, codec.encode(images), shifts)
    np.testing.assert_array_equal(codec.decode(latents), shift_images(images, shifts))
