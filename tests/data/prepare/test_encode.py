"""Encoding texts with several latents."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mmldlm.cli import main
from mmldlm.config.load import load_config
from mmldlm.data.image_codec import ImageCodec
from mmldlm.data.prepare import encode as encode_stage
from mmldlm.data.prepare import read as read_stage
from mmldlm.data.prepare.images.pipeline import prepare_images
from mmldlm.data.prepare.options import ImageOptions
from mmldlm.data.store import Store
from mmldlm.data.verify import verify
from mmldlm.errors import UserError
from mmldlm.train import check_run, train
from tests.support.tiny_vae import save_tiny_vae


class Marked:
    """Encodes a text as its length; fails on texts with "bad" in them."""

    latent_dim, batch_tokens, name = 2, 1024, "marked"

    def encode(self, texts, progress=None, is_cut=None):
        if progress is not None:
            progress(len(texts))
        bad = np.array([np.nan if "bad" in text else 1.0 for text in texts], np.float32)
        return np.array([[len(text), 1] for text in texts], np.float32) * bad[:, None]


def test_a_text_has_latents_where_every_piece_has_one():
    counted = []
    texts = ["aa bbbb", "so bad", "c ddd"]
    found = encode_stage.encode(Marked(), texts, 1, counted.append, latents_per_text=2)
    assert found.is_ok.tolist() == [True, False, True] and sum(counted) == 3
    assert found.latents[..., 0].tolist() == [[2, 4], [1, 3]]
    assert found.reasons == {1: "piece 2 of 2: NaN or infinite values"}


pytest.importorskip("diffusers", reason="needs mmldlm[vae]")


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    return save_tiny_vae(tmp_path_factory.mktemp("vae") / "tiny")


def options(root, vae, **more):
    return ImageOptions(
        str(root), latents=f"vae:{vae}", image_size=16, faces=2, max_samples=120, **more
    )


@pytest.fixture(scope="module")
def store(vae, tmp_path_factory):
    return prepare_images(options(tmp_path_factory.mktemp("stores") / "s", vae))


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
    monkeypatch.setattr(read_stage, "IMAGES_PER_SHARD", 40)
    calls, read_shard = [], read_stage.read_images

    def killed(*args):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(args)
        read_shard(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(read_stage, "read_images", killed)
        prepare_images(options(tmp_path / "s", vae))
    other = save_tiny_vae(tmp_path / "tiny", seed=5)  # of the same name, with other weights
    with pytest.raises(UserError, match="autoencoder tiny of sha256"):
        prepare_images(options(tmp_path / "s", other))
    resumed = prepare_images(options(tmp_path / "s", vae))
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
        prepare_images(ImageOptions(**(vars(options(tmp_path / "s", vae)) | more)))
    assert not (tmp_path / "s").exists()


def test_options_of_an_autoencoder_need_one(tmp_path):
    with pytest.raises(UserError, match="--dtype with --latents vae"):
        prepare_images(ImageOptions(str(tmp_path / "s"), dtype="fp32"))


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
