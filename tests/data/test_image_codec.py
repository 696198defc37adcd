"""The codec: pixels survive exactly, components keep what they say, and another's basis is
refused.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from mmldlm.data.image_codec import (
    BASIS,
    ImageCodec,
    draw_shifts,
    max_image_norm,
    shift_images,
    shift_latents,
)
from mmldlm.data.prepare.fit_codec import fit_components
from mmldlm.data.store import Store, as_float32
from mmldlm.errors import UserError

SHAPE = {"size": 8, "patch": 4, "channels": 3}


@pytest.fixture
def images() -> np.ndarray:
    """40 smooth images of 8 x 8 RGB."""
    coarse = np.random.default_rng(0).integers(0, 256, (40, 2, 2, 3))
    return np.repeat(np.repeat(coarse, 4, axis=1), 4, axis=2).astype(np.uint8)


def test_pixels_survive_exactly_and_lie_where_they_were(images):
    codec = ImageCodec(**SHAPE, latents="pixels", num_latents=4, latent_dim=48)
    latents = codec.encode(images)
    assert latents.shape == (40, 4, 48) and latents.dtype == np.float32
    np.testing.assert_allclose(latents[0, 1], images[0, :4, 4:].reshape(-1) / 127.5 - 1, atol=1e-6)
    np.testing.assert_array_equal(codec.decode(latents), images)
    assert (codec.decode(latents * 9) <= 255).all() and codec.grid == [2, 2]


def test_every_uint8_has_a_value_other_than_zero():
    values = as_float32(np.arange(256, dtype=np.uint8))
    assert (
        values.min() == -1
        and values.max() == 1
        and (values != 0).all()
        and (np.diff(values) > 0).all()
    )


def test_components_of_all_the_variance_reproduce_images(images, tmp_path):
    basis, kept = fit_components([images / np.float32(127.5) - 1], 12)
    assert kept == pytest.approx(1) and np.allclose(basis[1:] @ basis[1:].T, np.eye(12), atol=1e-5)
    np.save(tmp_path / BASIS, basis)
    codec = ImageCodec(
        **SHAPE,
        latents="pca",
        num_latents=4,
        latent_dim=3,
        basis=basis,
        basis_file=tmp_path / BASIS,
    )
    latents = codec.encode(images)
    np.testing.assert_array_equal(codec.decode(latents), images)
    assert np.diff(latents.reshape(40, -1).var(0)).max() < 1e-3, "largest variance first"
    again = ImageCodec.open(codec.identity, tmp_path)
    np.testing.assert_array_equal(again.encode(images), latents)
    assert again.identity == json.loads(json.dumps(codec.identity)) and codec.grid is None
    identity = codec.identity
    np.save(tmp_path / BASIS, basis[::-1])
    with pytest.raises(UserError, match="SHA-256"):
        ImageCodec.open(identity, tmp_path)


def test_wrong_shapes_are_refused_by_name(images):
    codec = ImageCodec(**SHAPE, latents="pixels", num_latents=4, latent_dim=48)
    with pytest.raises(UserError, match="4, 48"):
        codec.decode(np.zeros((2, 4, 47), np.float32))
    for bad in (images[:, :4], images.astype(np.float32)):
        with pytest.raises(UserError, match="uint8"):
            codec.encode(bad)


def test_a_store_opens_its_codec(glyph_store):
    store = Store(glyph_store)
    codec = ImageCodec.open(glyph_store)
    latents = store.get(range(len(store))).latents
    assert latents.dtype == np.float32 and np.abs(latents).max() <= 1
    assert np.linalg.norm(latents, axis=-1).max() <= max_image_norm(store.manifest)
    assert ImageCodec.open(codec.identity).identity == ImageCodec.open(store.manifest).identity
    np.testing.assert_array_equal(codec.encode(codec.decode(latents)), latents)
    np.testing.assert_array_equal(
        np.concatenate([block for _, block in store.latent_blocks(len(store))]), latents
    )


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
