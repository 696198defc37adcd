"""`mmldlm sample` and `mmldlm evaluate` on a small model of images, from its run and after a
conversion.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import mmldlm
from mmldlm.cli import main
from mmldlm.data.corpora.drawn_images import CHARACTERS
from mmldlm.data.image_codec import ImageCodec
from mmldlm.data.prepare.options import ImageOptions
from mmldlm.data.prepare.pipeline import prepare
from mmldlm.data.store import Store
from mmldlm.errors import UserError
from mmldlm.inference.images import make_images
from mmldlm.inference.inputs import encode_texts
from mmldlm.inference.load import load_pretrained
from mmldlm.sampling.decoding import most_probable_lengths
from mmldlm.sampling.records import SamplingInterrupted
from mmldlm.tasks.registry import load_config
from mmldlm.train import check_run, train
from tests.support.image_store import make_image_store
from tests.support.named_weights import save_clip, save_features

CAPTION = "sans latin small letter a"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_image_store(tmp_path_factory.mktemp("images") / "store")


@pytest.fixture(scope="module")
def model(images, tmp_path_factory):
    """Folder of a run of two steps, and of its conversion."""
    folder = tmp_path_factory.mktemp("runs")
    words = [
        "task=image_text",
        f"data.latent_data_root={images}",
        f"logging.save_dir={folder}",
        "engine.kind=single",
    ]
    words += [
        "logging.run_name=run",
        "training.num_train_steps=2",
        "logging.eval_freq=100",
        "logging.plot=false",
        "logging.eval_samples=0",
    ]
    train(check_run(load_config("tiny", None, words), 1))
    assert main(["convert", str(folder / "run" / "latest"), str(folder / "model")]) == 0
    return folder


@pytest.fixture(scope="module")
def components(tmp_path_factory):
    """A converted model of principal components whose store and run are gone."""
    folder = tmp_path_factory.mktemp("components")
    root = prepare(ImageOptions(str(folder / "store"), latents="pca:32", faces=2, max_samples=100))
    pictures = ImageCodec.open(root).decode(Store(root, "validation").get([0, 1]).latents)
    for row, picture in enumerate(pictures):
        Image.fromarray(picture[..., 0]).save(folder / f"{row}.png")
    words = [
        "task=image_text",
        f"data.latent_data_root={root}",
        f"logging.save_dir={folder}",
        "engine.kind=single",
    ]
    words += [
        "logging.run_name=run",
        "training.num_train_steps=2",
        "logging.eval_freq=100",
        "logging.plot=false",
        "logging.eval_samples=0",
    ]
    train(check_run(load_config("tiny", None, [*words, "data.shift_pixels=1"]), 1))
    assert main(["convert", str(folder / "run" / "latest"), str(folder / "model")]) == 0
    for name in ("store", "run"):
        shutil.rmtree(folder / name)
    return folder


def sample(kind, checkpoint, out, *words):
    return main(
        [
            "sample",
            kind,
            "--checkpoint",
            str(checkpoint),
            "--output-dir",
            str(out),
            *map(str, words),
        ]
    )


def records(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_images_of_captions_are_the_same_before_and_after_a_conversion(model, images, tmp_path):
    log = [
        json.loads(line)
        for line in (model / "run" / "training_log.jsonl").read_text().splitlines()
    ]
    assert log[-1]["images_per_second"] > 0
    for name in ("run", "model"):
        assert (
            sample(
                "t2i",
                model / name,
                tmp_path / name,
                "--text",
                CAPTION,
                "--num-samples",
                2,
                "--num-steps",
                3,
            )
            == 0
        )
    first, second = (np.load(tmp_path / name / "latents.npy") for name in ("run", "model"))
    np.testing.assert_array_equal(first, second)
    codec = ImageCodec.open(json.loads((model / "model" / "config.json").read_text())["image"])
    for record, expected in zip(records(tmp_path / "run"), codec.decode(first), strict=True):
        np.testing.assert_array_equal(
            np.asarray(Image.open(tmp_path / "run" / record["image"])), expected[..., 0]
        )
    assert Image.open(tmp_path / "run" / "sheet.png").size[0] > 96
    assert (
        sample(
            "t2i",
            model / "run",
            tmp_path / "data",
            "--data",
            images,
            "--num-samples",
            2,
            "--num-steps",
            3,
        )
        == 0
    )
    beside = np.asarray(Image.open(tmp_path / "data" / "sheet.png"))
    last = Store(images, "validation")
    # Spread over the split.
    assert records(tmp_path / "data")[1]["text"] == last.text(len(last) - 1)
    real = codec.decode(last.get([0]).latents)[0, :, :, 0]
    np.testing.assert_array_equal(beside[8:104:6, 104:200:6, 0], real)
    assert not np.array_equal(first[0], first[1])
    assert (
        sample(
            "t2l", model / "run", tmp_path / "words", "--text", CAPTION, CAPTION, "--num-steps", 3
        )
        == 0
    )
    # Two samples as above: on some CPUs another kernel multiplies one, and the last bit differs.
    np.testing.assert_array_equal(np.load(tmp_path / "words" / "latents.npy")[0], first[0])


def test_a_loaded_model_captions_and_draws_as_the_command_does(model, images, tmp_path):
    loaded = mmldlm.load(model / "model")
    picture = ImageCodec.open(images).decode(Store(images, "validation").get([0]).latents)[0]
    Image.fromarray(picture[..., 0]).save(tmp_path / "0.png")
    assert sample("i2t", model / "model", tmp_path / "text", "--image", tmp_path / "0.png") == 0
    forms = [str(tmp_path / "0.png"), Image.open(tmp_path / "0.png"), picture, picture[..., 0]]
    for form in forms:
        assert loaded.caption([form]) == [records(tmp_path / "text")[0]["text"]]
    for one in (*forms[:2], picture[None]):
        assert loaded.caption(one) == loaded.caption([picture])
    for wrong, found in ((picture, "an array"), ([], r"\[\]")):
        with pytest.raises(UserError, match=f"found: +{found}"):
            loaded.caption(wrong)
    words = ("--text", CAPTION, "--num-steps", 3, "--seed", 2)
    assert sample("t2i", model / "model", tmp_path / "image", *words) == 0
    drawn = loaded.draw(CAPTION, num_steps=3, seed=2)
    np.testing.assert_array_equal(
        drawn[..., 0], np.asarray(Image.open(tmp_path / "image" / "images" / "000000.png"))
    )
    several = loaded.draw(CAPTION, num_steps=3, num_samples=2)
    assert several.shape == (2, *drawn.shape) and not np.array_equal(*several)
    for wrong in (picture.astype(np.float32), np.zeros((2, 2, 7), np.uint8), 3):
        with pytest.raises(UserError, match="a picture"):
            loaded.caption([wrong])
    with pytest.raises(UserError, match="draw"):
        loaded.encode(CAPTION)


def test_captions_of_files_are_those_of_the_store(model, images, tmp_path):
    assert (
        sample("i2t", model / "run", tmp_path / "store", "--data", images, "--num-samples", 2) == 0
    )
    codec = ImageCodec.open(images)
    for row, image in enumerate(codec.decode(Store(images, "validation").get([0, 1]).latents)):
        Image.fromarray(image[..., 0]).save(tmp_path / f"{row}.png")
    files = [tmp_path / "0.png", tmp_path / "1.png"]
    assert sample("i2t", model / "run", tmp_path / "files", "--image", *files) == 0
    of_store, of_files = records(tmp_path / "store"), records(tmp_path / "files")
    assert [row["text"] for row in of_store] == [row["text"] for row in of_files]
    assert of_store[0]["reference"] and of_files[1]["image"] == str(files[1])
    assert (
        sample("joint", model / "run", tmp_path / "pairs", "--num-samples", 2, "--num-steps", 3)
        == 0
    )
    assert (tmp_path / "pairs" / "images" / "000001.png").is_file()


def test_a_caption_is_written_in_three_lengths(model, images, tmp_path):
    words = ["--data", images, "--num-samples", 3, "--num-steps", 4]
    assert sample("i2t", model / "run", tmp_path / "out", *words) == 0
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert settings["num_lengths"] == 3 and 4 < settings["forward_passes_per_sample"] <= 12
    likely = most_probable_lengths(load_pretrained(model / "run").model, latents_of(images, 3), 3)
    for record, lengths in zip(records(tmp_path / "out"), likely[0].tolist(), strict=True):
        assert record["num_tokens"] + 1 in lengths


def latents_of(images, count):
    return torch.from_numpy(Store(images, "validation").get(range(count)).latents)


def test_a_caption_that_is_watched_is_written_once(model, images, tmp_path):
    for kind in ("i2t", "l2t"):
        page, words = (
            tmp_path / f"{kind}.html",
            ["--data", images, "--num-samples", 2, "--num-steps", 3],
        )
        assert sample(kind, model / "run", tmp_path / kind, *words, "--trace", page) == 0
        settings = json.loads((tmp_path / kind / "settings.json").read_text())
        assert (
            settings["forward_passes_per_sample"] == 3
            and "num_lengths" not in settings
            and page.is_file()
        )


def test_the_basis_of_components_travels_with_the_model(components, tmp_path, capsys):
    model = components / "model"
    assert sample("t2i", model, tmp_path / "a", "--text", CAPTION, "--num-steps", 3) == 0
    codec = ImageCodec.open(json.loads((model / "config.json").read_text())["image"], model)
    (image,) = codec.decode(np.load(tmp_path / "a" / "latents.npy"))
    np.testing.assert_array_equal(
        np.asarray(Image.open(tmp_path / "a" / "images" / "000000.png")), image[..., 0]
    )
    assert (
        sample("i2t", model, tmp_path / "b", "--image", components / "0.png", components / "1.png")
        == 0
    )
    assert len(records(tmp_path / "b")) == 2
    damaged = shutil.copytree(model, tmp_path / "damaged")
    np.save(damaged / "pca_basis.npy", codec.basis[::-1])
    assert sample("t2i", damaged, tmp_path / "c", "--text", CAPTION) == 2
    assert "copy pca_basis.npy again" in capsys.readouterr().err


def test_images_are_never_put_on_a_sphere(model):
    """Statistics as those of unit vectors, by chance: the manifest's encoder.normalize decides,
    not a guess.
    """
    pretrained = load_pretrained(model / "run")
    pretrained.model.latent_mean.zero_()
    pretrained.model.latent_std.fill_(pretrained.model.config.latent_dim**-0.5)
    assert not pretrained.renormalize
    assert replace(pretrained, encoder={"name": "another"}).renormalize, (
        "without the key it would be guessed"
    )


def test_a_black_patch_is_a_latent(model, tmp_path):
    latents = np.zeros((1, 16, 16), np.float32)
    np.save(tmp_path / "x.npy", latents)
    assert (
        sample(
            "i2t",
            model / "run",
            tmp_path / "a",
            "--latent-file",
            tmp_path / "x.npy",
            "--num-steps",
            2,
        )
        == 0
    )


@pytest.mark.parametrize(
    "words, expected",
    [
        (
            ["hypotheses", "--checkpoint", "RUN", "--data", "IMAGES", "--output-dir", "OUT"],
            "a store of texts",
        ),
        (
            ["hypotheses", "--checkpoint", "RUN", "--data", "TEXTS", "--output-dir", "OUT"],
            "masked diffusion on texts",
        ),
        (
            ["evaluate", "--checkpoint", "RUN", "--suite", "stsb", "--sts-file", "STS"],
            "for a model of images",
        ),
        (["evaluate", "--checkpoint", "RUN", "--data", "IMAGES", "--search", "local"], "--search"),
        (
            ["evaluate", "--checkpoint", "RUN", "--data", "IMAGES", "--sampler", "threshold"],
            "--sampler",
        ),
        (["verify-data", "TEXTS", "--sheet", "OUT.png"], "--sheet with a store of images"),
        (
            ["prepare", "glyphs", "--output-dir", "OUT", "--latent-model", "minilm"],
            "expected --encoder with a corpus of texts",
        ),
        (["sanity", "--config-name", "tiny", "data.latent_data_root=IMAGES"], "a store of texts"),
        (
            ["sanity", "--config-name", "tiny", "task=image_text", "data.latent_data_root=TEXTS"],
            "a store of images",
        ),
    ],
)
def test_commands_of_texts_refuse_images_by_name(
    model, images, store, tmp_path, tmp_path_factory, capsys, words, expected
):
    sts = tmp_path_factory.mktemp("sts") / "dev.csv"
    sts.write_text("".join(f"a\ta\t1\t{n}\t{n}\ta {n}\tb {n}\n" for n in range(4)))
    places = {"RUN": model / "run", "IMAGES": images, "TEXTS": store, "OUT": tmp_path / "out"}
    places["STS"] = sts
    for name, path in places.items():
        words = [word.replace(name, str(path)) for word in words]
    assert main(words) == 2
    assert expected in capsys.readouterr().err and not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="a model of images"):
        encode_texts(["a"], load_pretrained(model / "run"))


@pytest.mark.parametrize(
    "kind, words, expected",
    [
        ("l2t", ["--text", CAPTION], "--text"),
        ("i2t", ["--image", "missing.png"], "missing.png"),
        ("i2t", [], "exactly one of --image"),
        ("t2i", ["--text", CAPTION, "--distinct"], "--distinct"),
    ],
)
def test_what_a_model_of_images_cannot_do_is_refused(
    model, tmp_path, capsys, kind, words, expected
):
    assert sample(kind, model / "run", tmp_path / "out", *words) == 2
    assert expected in capsys.readouterr().err


def test_text_checkpoints_and_stores_are_refused(model, images, store, tmp_path, capsys):
    assert sample("t2i", model / "run", tmp_path / "a", "--data", store) == 2
    assert "a store of texts" in capsys.readouterr().err
    assert main(["evaluate", "--checkpoint", str(model / "run"), "--data", str(store)]) == 2
    words = [
        f"data.latent_data_root={store}",
        f"logging.save_dir={tmp_path}",
        "engine.kind=single",
    ]
    words += [
        "logging.run_name=text",
        "training.num_train_steps=1",
        "logging.eval_freq=100",
        "logging.plot=false",
        "logging.eval_samples=0",
    ]
    train(check_run(load_config("tiny", None, words), 1))
    for kind, more in (("t2i", ["--text", CAPTION]), ("i2t", ["--image", "x.png"]), ("joint", [])):
        assert sample(kind, tmp_path / "text", tmp_path / "b", *more) == 2
        assert f"sample {kind}" in capsys.readouterr().err
    evaluate = ["evaluate", "--checkpoint", str(tmp_path / "text"), "--data"]
    assert main([*evaluate, str(images)]) == 2
    capsys.readouterr()
    assert main([*evaluate, str(store), "--clip", "x", "--inception-weights", "y"]) == 2
    assert "--clip, --inception-weights" in capsys.readouterr().err


def test_an_evaluation_measures_both_directions(model, tmp_path, capsys):
    pytest.importorskip("torchmetrics", reason="the extra eval is not installed")
    # The same letters, 20 unseen.
    images = make_image_store(tmp_path / "store", characters=CHARACTERS[:62:3] * 3)
    words = [
        "--num-samples",
        "20",
        "--control-samples",
        "3",
        "--latent-steps",
        "2",
        "--num-draws",
        "1",
    ]
    words += ["--clip", str(save_clip(tmp_path / "clip"))]
    words += ["--inception-weights", save_features(tmp_path / "features.pt")]
    report, page = tmp_path / "r.json", tmp_path / "r.html"
    assert (
        main(
            [
                "evaluate",
                "--checkpoint",
                str(model / "run"),
                "--data",
                str(images),
                *words,
                "--json",
                str(report),
                "--html",
                str(page),
            ]
        )
        == 0
    )
    found = json.loads(report.read_text())
    assert {claim["id"] for claim in found["claims"]} >= {
        "i2t_gain_null_nats",
        "t2i_recall_at_5",
        "seam_ratio_over_real",
    }
    assert found["conditions"]["caption_lengths"] == 3
    details = found["details"]
    assert details["untrained"]["gain_null"]["value"] == pytest.approx(0, abs=1e-6)
    assert set(details["nearest_training_image"]) <= set(details["model"])
    by_weights = {"clip_score", "clip_score_real", "clip_score_real_shuffled", "fid", "kid"}
    for arm in ("guidance_1", "guidance_2"):
        assert {"recall_at_5", "copy_ratio"} | by_weights <= set(details[arm])
        assert all(
            details[arm][name]["n"] == 20 and details[arm][name]["se"] > 0 for name in by_weights
        )
    assert details["guidance_1"]["fid"] != details["guidance_2"]["fid"]
    assert details["guidance_1"]["clip_score_real"] == details["guidance_2"]["clip_score_real"]
    assert not by_weights & set(details["untrained"])
    assert "FID of n = 20 images, below 5000" in capsys.readouterr().out.replace("\n", " ")
    assert page.read_text().count("data:image/png;base64,") >= 18


def test_an_interrupt_turns_no_unfinished_latent_into_an_image(model, monkeypatch):
    """Pixels of a thousand images take minutes of an autoencoder."""
    pretrained, decoded = load_pretrained(model / "model"), []
    captions = [[5, 6, 7][: 1 + row % 3] for row in range(9)]

    def make(**options):
        return make_images(pretrained, captions, steps=2, batch_tokens=100, **options)

    reports = []
    latents, images = make(progress=lambda *report: reports.append(report))
    decode = ImageCodec.decode
    monkeypatch.setattr(
        ImageCodec, "decode", lambda codec, rows: decoded.append(len(rows)) or decode(codec, rows)
    )
    left = len(reports) - 1

    def stop(*report):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt

    with pytest.raises(SamplingInterrupted) as caught:
        make(progress=stop)
    rows = caught.value.rows
    assert 0 < len(rows) < len(captions) and decoded == [len(rows)]
    for whole, part in zip((latents, images), caught.value.result, strict=True):
        np.testing.assert_array_equal(part[rows], whole[rows])
