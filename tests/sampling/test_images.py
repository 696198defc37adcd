"""`mmldlm sample` and `mmldlm evaluate` on a small model of images, from its run and after a conversion."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from mmldlm.cli import main
from mmldlm.config.load import load_config
from mmldlm.data.images.codec import ImageCodec
from mmldlm.train import check_run, train
from tests.support.image_store import make_image_store

CAPTION = "sans latin small letter a"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_image_store(tmp_path_factory.mktemp("images") / "store")


@pytest.fixture(scope="module")
def model(images, tmp_path_factory):
    """Folder of a run of two steps, and of its conversion."""
    folder = tmp_path_factory.mktemp("runs")
    words = ["task=image_text", f"data.latent_data_root={images}", f"logging.save_dir={folder}", "engine.kind=single"]
    words += ["logging.run_name=run", "training.num_train_steps=2", "logging.eval_freq=100", "logging.plot=false"]
    train(check_run(load_config("tiny", None, words), 1))
    assert main(["convert", str(folder / "run" / "latest"), str(folder / "model")]) == 0
    return folder


def sample(kind, checkpoint, out, *words):
    return main(["sample", kind, "--checkpoint", str(checkpoint), "--output-dir", str(out), *map(str, words)])


def records(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_images_of_captions_are_the_same_before_and_after_a_conversion(model, images, tmp_path):
    log = [json.loads(line) for line in (model / "run" / "training_log.jsonl").read_text().splitlines()]
    assert log[-1]["images_per_second"] > 0
    for name in ("run", "model"):
        assert (
            sample("t2i", model / name, tmp_path / name, "--text", CAPTION, "--num-samples", 2, "--num-steps", 3) == 0
        )
    first, second = (np.load(tmp_path / name / "latents.npy") for name in ("run", "model"))
    np.testing.assert_array_equal(first, second)
    codec = ImageCodec.open(json.loads((model / "model" / "config.json").read_text())["image"])
    for record, expected in zip(records(tmp_path / "run"), codec.decode(first), strict=True):
        np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "run" / record["image"])), expected[..., 0])
    assert Image.open(tmp_path / "run" / "sheet.png").size[0] > 96
    assert not np.array_equal(first[0], first[1])
    assert sample("t2l", model / "run", tmp_path / "words", "--text", CAPTION, "--num-steps", 3) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "words" / "latents.npy")[0], first[0])


def test_captions_of_files_are_those_of_the_store(model, images, tmp_path):
    assert sample("i2t", model / "run", tmp_path / "store", "--data", images, "--num-samples", 2) == 0
    codec = ImageCodec.open(images)
    from mmldlm.data.store.store import Store

    for row, image in enumerate(codec.decode(Store(images, "validation").get([0, 1]).latents)):
        Image.fromarray(image[..., 0]).save(tmp_path / f"{row}.png")
    files = [tmp_path / "0.png", tmp_path / "1.png"]
    assert sample("i2t", model / "run", tmp_path / "files", "--image", *files) == 0
    of_store, of_files = records(tmp_path / "store"), records(tmp_path / "files")
    assert [row["text"] for row in of_store] == [row["text"] for row in of_files]
    assert of_store[0]["reference"] and of_files[1]["image"] == str(files[1])
    assert sample("joint", model / "run", tmp_path / "pairs", "--num-samples", 2, "--num-steps", 3) == 0
    assert (tmp_path / "pairs" / "images" / "000001.png").is_file()


@pytest.mark.parametrize(
    "kind, words, expected",
    [
        ("l2t", ["--text", CAPTION], "--text"),
        ("i2t", ["--image", "missing.png"], "missing.png"),
        ("i2t", [], "exactly one of --image"),
        ("t2i", ["--text", CAPTION, "--remask", "cap"], "--remask"),
    ],
)
def test_what_a_model_of_images_cannot_do_is_refused(model, tmp_path, capsys, kind, words, expected):
    assert sample(kind, model / "run", tmp_path / "out", *words) == 2
    assert expected in capsys.readouterr().err


def test_text_checkpoints_and_stores_are_refused(model, images, store, tmp_path, capsys):
    assert sample("t2i", model / "run", tmp_path / "a", "--data", store) == 2
    assert "a store of texts" in capsys.readouterr().err
    assert main(["evaluate", "--checkpoint", str(model / "run"), "--data", str(store)]) == 2
    words = [f"data.latent_data_root={store}", f"logging.save_dir={tmp_path}", "engine.kind=single"]
    words += ["logging.run_name=text", "training.num_train_steps=1", "logging.eval_freq=100", "logging.plot=false"]
    train(check_run(load_config("tiny", None, words), 1))
    for kind, more in (("t2i", ["--text", CAPTION]), ("i2t", ["--image", "x.png"]), ("joint", [])):
        assert sample(kind, tmp_path / "text", tmp_path / "b", *more) == 2
        assert f"sample {kind}" in capsys.readouterr().err
    assert main(["evaluate", "--checkpoint", str(tmp_path / "text"), "--data", str(images)]) == 2


def test_an_evaluation_measures_both_directions(model, images, tmp_path):
    words = ["--num-samples", "6", "--control-samples", "3", "--latent-steps", "2", "--num-draws", "1"]
    report, page = tmp_path / "r.json", tmp_path / "r.html"
    assert main(["evaluate", "--checkpoint", str(model / "run"), "--data", str(images), *words, "--json", str(report),
                 "--html", str(page)]) == 0  # fmt: skip
    found = json.loads(report.read_text())
    assert {claim["id"] for claim in found["claims"]} >= {
        "i2t_gain_null_nats",
        "t2i_recall_at_5",
        "seam_ratio_over_real",
    }
    details = found["details"]
    assert details["untrained"]["gain_null"]["value"] == pytest.approx(0, abs=1e-6)
    assert set(details["nearest_training_image"]) <= set(details["model"])
    assert {"recall_at_5", "copy_ratio"} <= set(details["guidance_2"])
    assert page.read_text().count("data:image/png;base64,") >= 18
