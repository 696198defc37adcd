"""The codec: pixels survive exactly, components keep what they say, and another's basis is
refused.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from mmldlm.data.images.codec import BASIS, ImageCodec, max_image_norm
from mmldlm.data.images.pca import fit_components
from mmldlm.data.store.latent_values import as_float32
from mmldlm.data.store.store import Store
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
    (tmp_path / "kept").mkdir()
    codec.save(tmp_path / "kept")
    again = ImageCodec.open(tmp_path / "kept")
    np.testing.assert_array_equal(again.encode(images), latents)
    assert again.identity == json.loads(json.dumps(codec.identity)) and codec.grid is None
    np.save(tmp_path / "kept" / BASIS, basis[::-1])
    with pytest.raises(UserError, match="SHA-256"):
        ImageCodec.open(tmp_path / "kept")


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
