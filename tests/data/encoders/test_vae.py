"""Autoencoders: found by folder, refused by name, and latents that are those of diffusers."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from mmldlm.data.encoders.model_files import find_vae
from mmldlm.data.image_codec import ImageCodec, VaeCodec
from mmldlm.errors import UserError

pytest.importorskip("diffusers", reason="needs mmldlm[vae]")
from mmldlm.data.encoders.vae import usable_dtype
from tests.support.tiny_vae import save_tiny_vae


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_vae(tmp_path_factory.mktemp("vae") / "tiny")


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)


def test_latents_are_the_posterior_mean_of_diffusers_in_patches(folder, images):
    import torch
    from diffusers import AutoencoderKL

    codec = VaeCodec.of_files(find_vae(str(folder)), 16, "fp32", str(folder)).ready(
        device="cpu", batch_size=2
    )
    latents = codec.encode(images)
    assert latents.shape == (5, 16, 8) and codec.grid == [4, 4] and codec.patch == 4
    model = AutoencoderKL.from_pretrained(folder)
    values = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.inference_mode():
        mean = model.encode(values).latent_dist.mean
        decoded = model.decode(mean).sample.permute(0, 2, 3, 1).numpy()
    # Latent 5 is in row 1, column 1: its four vectors are those at rows and columns 2 and 3.
    expected = mean[:, :, 2:4, 2:4].permute(0, 2, 3, 1).reshape(5, 8).numpy()
    np.testing.assert_allclose(latents[:, 5], expected, atol=1e-5)
    np.testing.assert_allclose(codec.to_values(latents), decoded, atol=1e-4)
    assert codec.decode(latents).dtype == np.uint8


def test_the_identity_finds_it_again_and_refuses_another(folder, images, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    identity = json.loads(
        json.dumps(VaeCodec.of_files(find_vae(str(copy)), 16, "fp32", str(copy)).identity)
    )
    codec = ImageCodec.open(identity)
    assert codec.identity == identity and codec.files() == {} and codec.module is None
    latents = codec.encode(images)
    shutil.rmtree(copy)
    with pytest.raises(UserError, match="--vae FOLDER"):
        codec.ready()
    np.testing.assert_array_equal(codec.ready(str(folder)).encode(images), latents)
    other = save_tiny_vae(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="sha256"):
        codec.ready(str(other))
    with pytest.raises(UserError, match="latents pixels"):
        ImageCodec(16, 4, 3, "pixels", 16, 48).ready(str(folder))


def test_half_precision_is_part_of_the_identity(images, tmp_path):
    files = find_vae(str(save_tiny_vae(tmp_path / "bf16", force_upcast=False)))
    codec = VaeCodec.of_files(files, 16, usable_dtype(files, "bf16", "cpu"), str(files.folder))
    whole = VaeCodec.of_files(files, 16, usable_dtype(files, None, "cpu"), str(files.folder))
    assert codec.identity["vae"]["dtype"] == "bf16" and "dtype" not in whole.identity["vae"]
    rough, exact = ImageCodec.open(codec.identity).encode(images), whole.encode(images)
    assert (
        rough.dtype == np.float32 and 0 < np.abs(rough - exact).max() < 0.1 * np.abs(exact).max()
    )
    assert np.abs(codec.to_values(rough) - whole.to_values(rough)).max() < 0.1


def test_a_pipeline_s_autoencoder_is_found(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "pipeline" / "vae")
    files = find_vae(str(tmp_path / "pipeline"))
    assert files.name == "pipeline" and files.folder.name == "vae" and files.weights_sha256()


def test_what_is_no_autoencoder_is_named(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "diffusion_pytorch_model.safetensors").write_bytes(b"damaged")
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "config.json").write_text('{"_class_name": "UNet2DModel"}')
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "diffusion_pytorch_model.safetensors").unlink()
    for path, reason in (
        (tmp_path / "empty", "no config.json"),
        (other, "UNet2DModel"),
        (bare, "no weights"),
    ):
        with pytest.raises(UserError, match=reason):
            find_vae(str(path))
    with pytest.raises(UserError, match="the weights of the autoencoder"):
        VaeCodec.of_files(find_vae(str(broken)), 16, "fp32").ready(str(broken))
    with pytest.raises(UserError, match="no folder"):
        find_vae("nowhere")


def test_a_name_that_cannot_be_downloaded_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"(?s)'owner/absent'.*hub failed"):
        find_vae("owner/absent", str(tmp_path))
