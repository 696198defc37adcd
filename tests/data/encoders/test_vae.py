"""Autoencoders: found by folder, refused by name, with the latents of diffusers; and stores of
them.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from mmldlm.cli import main
from mmldlm.data.encoders.model_files import find_vae
from mmldlm.data.image_codec import ImageCodec, VaeCodec
from mmldlm.data.prepare import read
from mmldlm.data.prepare.options import ImageOptions
from mmldlm.data.prepare.pipeline import prepare
from mmldlm.data.store import Store
from mmldlm.data.verify import verify
from mmldlm.errors import UserError
from mmldlm.tasks.registry import load_config
from mmldlm.train import check_run, train

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


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    return save_tiny_vae(tmp_path_factory.mktemp("vae") / "tiny")


def options(root, vae, **more):
    return ImageOptions(
        str(root), latents=f"vae:{vae}", image_size=16, faces=2, max_samples=120, **more
    )


@pytest.fixture(scope="module")
def store(vae, tmp_path_factory):
    return prepare(options(tmp_path_factory.mktemp("stores") / "s", vae))


def test_the_store_has_raw_latents_and_the_identity_of_their_autoencoder(store, vae):
    train_split, manifest = Store(store), json.loads((store / "manifest.json").read_text())
    assert verify(store) == [] and manifest["encoder"]["normalize"] is False
    assert (manifest["latent_dim"], manifest["latents_per_text"], manifest["image"]["grid"]) == (
        8,
        16,
        [4, 4],
    )
    assert np.load(store / "train" / "latents.npy").dtype == np.float16
    assert manifest["encoder"]["weights_sha256"] == manifest["image"]["vae"]["weights_sha256"]
    codec = ImageCodec.open(store)
    images = codec.decode(train_split.get(range(4)).latents)
    np.testing.assert_allclose(codec.encode(images).shape, (4, 16, 8))


def test_a_killed_preparation_ends_in_the_same_bytes(store, vae, tmp_path, monkeypatch):
    monkeypatch.setattr(read, "IMAGES_PER_SHARD", 40)
    calls, read_images = [], read.read_images

    def killed(*args):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(args)
        read_images(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(read, "read_images", killed)
        prepare(options(tmp_path / "s", vae))
    other = save_tiny_vae(tmp_path / "tiny", seed=5)  # of the same name, with other weights
    with pytest.raises(UserError, match="autoencoder tiny.*was .* sha256"):
        prepare(options(tmp_path / "s", other))
    resumed = prepare(options(tmp_path / "s", vae))
    for name in (
        "train/latents.npy",
        "validation/latents.npy",
        "train/groups.npy",
        "train/tokens.npy",
    ):
        assert (resumed / name).read_bytes() == (store / name).read_bytes()


@pytest.mark.parametrize(
    "more, expected",
    [
        ({"patch_size": 8}, "--patch-size 4"),
        ({"channels": 1}, "--channels 3"),
        ({"image_size": 18}, "multiple of --patch-size"),
        ({"dtype": "fp16"}, "--dtype fp32 or bf16"),
        ({"dtype": "bf16"}, "force_upcast"),
    ],
)
def test_what_contradicts_the_autoencoder_is_refused(vae, tmp_path, more, expected):
    with pytest.raises(UserError, match=expected):
        prepare(ImageOptions(**(vars(options(tmp_path / "s", vae)) | more)))
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "changes",
    [{"in_channels": 3.0, "out_channels": 3.0}, {"out_channels": 3.0}, {"latent_channels": True}],
)
def test_channels_that_are_no_integer_are_refused(folder, tmp_path, changes):
    """diffusers fails on them, which was reported as damaged weights."""
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    config |= changes
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match="1 or 3 channels"):
        find_vae(str(copy))


def test_options_of_an_autoencoder_need_one(tmp_path):
    with pytest.raises(UserError, match="--dtype with --latents vae"):
        prepare(ImageOptions(str(tmp_path / "s"), dtype="fp32"))


def test_a_model_of_these_latents_trains_samples_and_is_evaluated(store, vae, tmp_path, capsys):
    words = [
        "task=image_text",
        f"data.latent_data_root={store}",
        f"logging.save_dir={tmp_path}",
        "engine.kind=single",
    ]
    words += [
        "logging.run_name=run",
        "training.num_train_steps=2",
        "logging.eval_freq=100",
        "logging.plot=false",
    ]
    for word, expected in (
        ("data.shift_pixels=1", "shift_pixels"),
        ("latent_diffusion.clamp_x0=1", "clamp_x0=null"),
    ):
        with pytest.raises(UserError, match=expected):
            check_run(load_config("tiny", None, [*words, word]), 1)
    train(check_run(load_config("tiny", None, words), 1))
    run = ["--checkpoint", str(tmp_path / "run")]
    t2i = [
        "sample",
        "t2i",
        *run,
        "--text",
        "sans digit one",
        "--num-steps",
        "2",
        "--output-dir",
        str(tmp_path / "o"),
    ]
    assert main(t2i) == 0 and (tmp_path / "o" / "images" / "000000.png").is_file()
    other = save_tiny_vae(tmp_path / "other", seed=1)
    for words in (["--vae", str(other)], ["--vae", str(tmp_path / "absent")]):
        assert main([*t2i, "--overwrite", *words]) == 2
    moved = vae.rename(vae.with_name("moved"))
    try:
        assert main([*t2i, "--overwrite"]) == 2 and "--vae FOLDER" in capsys.readouterr().err
        assert main([*t2i, "--overwrite", "--vae", str(moved)]) == 0
        sheet = ["verify-data", str(store), "--sheet", str(tmp_path / "s.png")]
        assert main(sheet) == 2 and main([*sheet, "--vae", str(moved)]) == 0
        report = tmp_path / "e.json"
        few = [
            "--num-samples",
            "4",
            "--control-samples",
            "2",
            "--num-steps",
            "1",
            "--latent-steps",
            "1",
        ]
        evaluate = ["evaluate", *run, "--data", str(store), *few, "--json", str(report)]
        assert main(evaluate) == 2 and main([*evaluate, "--vae", str(moved)]) == 0
        assert "vae:tiny" in report.read_text()
    finally:
        moved.rename(vae)
