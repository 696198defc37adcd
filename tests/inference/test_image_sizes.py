"""A run on images of two sizes, its resume, and samples and evaluations of each size."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from PIL import Image

import mmldlm
from mmldlm.cli import main
from mmldlm.tasks.registry import find_task, load_config
from mmldlm.train import check_run, train
from tests.support.helpers import read_log
from tests.support.image_store import make_image_store


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Stores 16 and 24, and a run of four steps on both, saved after two."""
    folder = tmp_path_factory.mktemp("sizes")
    for size in (16, 24):
        make_image_store(folder / str(size), faces=2, size=size)
    trained(folder, "run", "training.train_batch_size=8")
    return folder


def trained(folder, name, *more):
    train(check_run(config_of(folder, f"logging.run_name={name}", *more), 1))
    return [record for record in read_log(folder, name) if "loss" in record]


def config_of(folder, *more):
    words = [
        "task=image_text",
        "data.mixture=" + json.dumps({str(folder / size): 1.0 for size in ("16", "24")}),
        f"logging.save_dir={folder}",
        "engine.kind=single",
        "logging.plot=false",
        "logging.eval_samples=0",
        "training.num_train_steps=4",
        "logging.save_freq=2",
        "logging.eval_freq=4",
        "model.latent_rope=true",
        "training.seed=12",
    ]
    return load_config("tiny", None, [*words, *more])


def sample(kind, folder, out, *words):
    return main(
        [
            "sample",
            kind,
            "--checkpoint",
            str(folder / "run"),
            "--output-dir",
            str(out),
            *map(str, words),
        ]
    )


def test_a_resumed_run_and_other_micro_batches_have_the_same_losses(folder):
    data = find_task("image_text").open_data(config_of(folder))
    plan = data.training_plan(8)
    sizes = [data.train.get(plan.batch(step).ids).latents.shape[1] for step in range(4)]
    assert set(sizes[:2]) == set(sizes[2:]) == {16, 36}, (
        "both sizes before and after the checkpoint"
    )
    expected = [record["loss"] for record in read_log(folder, "run") if "loss" in record]
    shutil.copytree(folder / "run", folder / "resumed")
    source = next(
        path
        for path in (folder / "resumed").rglob("*")
        if path.is_dir() and path.name.endswith("2")
    )
    found = trained(folder, "again", "training.train_batch_size=8", f"training.resume={source}")
    assert [record["step"] for record in found] == [3, 4] and [
        record["loss"] for record in found
    ] == expected[2:]
    parts = trained(folder, "parts", "training.train_batch_size=2", "training.grad_accum_steps=4")
    assert [record["loss"] for record in parts] == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("size,count", [(16, 16), (24, 36)])
def test_every_kind_of_samples_in_each_size(folder, tmp_path, size, count):
    few = ["--num-steps", 2, "--image-size", size]
    assert (
        sample("t2i", folder, tmp_path / "t2i", "--text", "sans latin small letter a", *few) == 0
    )
    assert np.load(tmp_path / "t2i" / "latents.npy").shape == (1, count, 16)
    assert Image.open(tmp_path / "t2i" / "images" / "000000.png").size == (size, size)
    picture = tmp_path / "t2i" / "images" / "000000.png"
    assert sample("i2t", folder, tmp_path / "i2t", "--image", picture, *few) == 0
    assert (
        sample(
            "i2t",
            folder,
            tmp_path / "file",
            "--latent-file",
            tmp_path / "t2i" / "latents.npy",
            *few,
        )
        == 0
    )
    assert sample("joint", folder, tmp_path / "joint", "--num-samples", 2, *few) == 0
    assert np.load(tmp_path / "joint" / "latents.npy").shape == (2, count, 16)


def test_the_size_is_that_of_the_store_else_the_largest(folder, tmp_path, capsys):
    for kind in ("t2i", "i2t"):
        words = ["--data", folder / "16", "--num-samples", 2, "--num-steps", 2]
        assert sample(kind, folder, tmp_path / kind, *words) == 0
    assert np.load(tmp_path / "t2i" / "latents.npy").shape == (2, 16, 16)
    assert sample("t2i", folder, tmp_path / "largest", "--text", "sans", "--num-steps", 2) == 0
    assert np.load(tmp_path / "largest" / "latents.npy").shape == (1, 36, 16)
    model = mmldlm.load(folder / "run")
    for size in ({"image_size": 16}, {}):  # not that of the call before
        side = size.get("image_size", 24)
        assert model.draw("sans", num_steps=2, **size).shape[:2] == (side, side)
    capsys.readouterr()
    assert sample("t2i", folder, tmp_path / "none", "--text", "sans", "--image-size", 32) == 2
    assert "16, 24" in capsys.readouterr().err
    assert (
        sample("t2i", folder, tmp_path / "none", "--data", folder / "16", "--image-size", 24) == 2
    )


def test_an_evaluation_is_of_the_size_of_its_store(folder, tmp_path):
    words = [
        "--num-samples",
        "6",
        "--control-samples",
        "4",
        "--num-steps",
        "2",
        "--latent-steps",
        "2",
    ]
    words += ["--json", str(tmp_path / "out.json")]
    assert (
        main(
            ["evaluate", "--checkpoint", str(folder / "run"), "--data", str(folder / "16"), *words]
        )
        == 0
    )
    conditions = json.loads((tmp_path / "out.json").read_text())["conditions"]
    assert conditions["image"].startswith("16 x 16 x 1") and conditions["num_images"] == 6
