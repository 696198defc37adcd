"""Images of codes from a checkpoint: complete, functions of seed and index, decoded without a
store.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from mmldlm.cli import main
from mmldlm.data.image_codec import ImageCodec
from mmldlm.data.store import Store
from mmldlm.inference.load import load_pretrained
from mmldlm.tasks.image_codes.config import CODE_SAMPLERS
from mmldlm.tasks.image_codes.sampling import (
    CodeState,
    sample_codes,
    sample_codes_and_texts,
)
from mmldlm.tasks.registry import load_config
from mmldlm.train import check_run, train
from tests.support.image_store import make_image_store

CAPTION, Q = "sans latin small letter a", 40


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    return {
        "codes": make_image_store(folder / "codes", codes=Q),
        "pixels": make_image_store(folder / "pixels"),
    }


@pytest.fixture(scope="module")
def runs(stores, tmp_path_factory):
    """Folder of a run on each store, and of the conversion of that on codes."""
    folder = tmp_path_factory.mktemp("runs")
    for name, root in stores.items():
        words = [
            f"task={'image_codes' if name == 'codes' else 'image_text'}",
            f"data.latent_data_root={root}",
            f"logging.save_dir={folder}",
            "engine.kind=single",
        ]
        words += [
            f"logging.run_name={name}",
            "training.num_train_steps=2",
            "logging.plot=false",
            "logging.eval_samples=0",
            "logging.eval_freq=2",
        ]
        train(check_run(load_config("tiny", None, words), 1))
    assert main(["convert", str(folder / "codes" / "latest"), str(folder / "model")]) == 0
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


def test_logs_name_codes(runs):
    log = [
        json.loads(line)
        for line in (runs / "codes" / "training_log.jsonl").read_text().splitlines()
    ]
    assert (
        log[-1]["code_loss"] > 1
        and log[-1]["latent_loss"] is None
        and log[-1]["images_per_second"] > 0
    )
    found = json.loads((runs / "codes" / "eval_log.jsonl").read_text().splitlines()[0])
    assert found["t2l_code_nelbo"] > 1 and not any("latent_mse" in key for key in found)


def test_pictures_are_the_same_before_and_after_a_conversion_without_a_store(runs, tmp_path):
    for name in ("codes", "model"):
        assert (
            sample("t2i", runs / name, tmp_path / name, "--text", CAPTION, "--num-samples", 2) == 0
        )
    first, second = (np.load(tmp_path / name / "latents.npy") for name in ("codes", "model"))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first[0], first[1]), "several images of one caption are drawn"
    assert (
        first.dtype == np.int64
        and first.shape == (2, 16, 1)
        and 0 <= first.min()
        and first.max() < Q
    )
    codec = ImageCodec.open(
        json.loads((runs / "model" / "config.json").read_text())["image"], runs / "model"
    )
    for record, expected in zip(records(tmp_path / "codes"), codec.decode(first), strict=True):
        np.testing.assert_array_equal(
            np.asarray(Image.open(tmp_path / "codes" / record["image"])), expected[..., 0]
        )
    assert json.loads((tmp_path / "codes" / "settings.json").read_text())["num_steps"] == 12


def test_captions_of_pictures_of_ids_and_of_files_agree(runs, stores, tmp_path):
    assert (
        sample(
            "i2t",
            runs / "codes",
            tmp_path / "store",
            "--data",
            stores["codes"],
            "--num-samples",
            2,
        )
        == 0
    )
    ids = Store(stores["codes"], "validation").get([0, 1]).latents
    np.save(tmp_path / "ids.npy", ids)
    for row, image in enumerate(ImageCodec.open(stores["codes"]).decode(ids)):
        Image.fromarray(image[..., 0]).save(tmp_path / f"{row}.png")
    assert (
        sample(
            "i2t",
            runs / "codes",
            tmp_path / "a",
            "--image",
            tmp_path / "0.png",
            tmp_path / "1.png",
        )
        == 0
    )
    assert (
        sample("i2t", runs / "codes", tmp_path / "b", "--latent-file", tmp_path / "ids.npy") == 0
    )
    texts = [[row["text"] for row in records(tmp_path / name)] for name in ("store", "a", "b")]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(
    "words",
    [
        ["--num-steps", 5],
        ["--method", "chain", "--num-steps", 5],
        ["--sampler", "scheduled", "--num-steps", 5],
        ["--sampler", "confidence", "--num-steps", 5],
    ],
)
def test_pairs(runs, tmp_path, words):
    assert sample("joint", runs / "codes", tmp_path / "pairs", "--num-samples", 3, *words) == 0
    ids = np.load(tmp_path / "pairs" / "latents.npy")
    assert ids.shape == (3, 16, 1) and 0 <= ids.min() and ids.max() < Q
    assert len(np.unique(ids, axis=0)) == 3
    assert (tmp_path / "pairs" / "images" / "000002.png").is_file()


@pytest.mark.parametrize(
    "run, kind, words, expected",
    [
        ("codes", "t2i", ["--text", CAPTION, "--method", "heun"], "--method"),
        ("codes", "t2i", ["--text", CAPTION, "--eta", "1"], "--eta"),
        ("codes", "t2i", ["--text", CAPTION, "--sampler", "threshold"], "--sampler"),
        (
            "codes",
            "t2i",
            ["--text", CAPTION, "--guidance-interval", "0.99", "0.999"],
            "holds a step",
        ),
        ("codes", "joint", ["--solver", "ddim"], "--solver"),
        (
            "codes",
            "joint",
            ["--condition-timestep", "0.2", "--method", "chain"],
            "--condition-timestep",
        ),
        ("codes", "i2t", ["--latent-file", "IDS"], "0 to 39"),
        ("codes", "t2i", ["--data", "PIXELS"], "latents codes"),
        ("pixels", "t2i", ["--data", "CODES"], "latents pixels"),
        ("pixels", "t2i", ["--text", CAPTION, "--sampler", "confidence"], "--sampler"),
        ("pixels", "t2i", ["--text", CAPTION, "--top-p", "0.5"], "--top-p"),
    ],
)
def test_what_the_latents_do_not_read_is_refused(
    runs, stores, tmp_path, capsys, run, kind, words, expected
):
    np.save(tmp_path / "ids.npy", np.full((1, 16, 1), Q))
    given = {"IDS": tmp_path / "ids.npy", "PIXELS": stores["pixels"], "CODES": stores["codes"]}
    assert (
        sample(kind, runs / run, tmp_path / "out", *[given.get(word, word) for word in words]) == 2
    )
    assert expected in capsys.readouterr().err


def test_evaluations_of_the_other_latents_are_refused(runs, stores, capsys):
    for run, store in (("codes", "pixels"), ("pixels", "codes")):
        assert (
            main(["evaluate", "--checkpoint", str(runs / run), "--data", str(stores[store])]) == 2
        )
        assert "latents" in capsys.readouterr().err


@pytest.fixture(scope="module")
def model(runs):
    """Of random weights: adaLN-Zero would hide what it reads."""
    loaded = load_pretrained(runs / "model").model
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return loaded


TEXTS = [[5, 6, 7], [8], [5, 6, 7], [9, 10]]


@pytest.mark.parametrize("sampler", CODE_SAMPLERS)
@pytest.mark.parametrize("steps", [1, 3, 40])
def test_every_sampler_fills_every_code_whatever_the_batches(model, sampler, steps):
    options = {"steps": steps, "sampler": sampler, "temperature": 1.0, "seed": 3}
    whole = sample_codes(model, TEXTS, **options)
    assert whole.shape == (4, 16, 1) and 0 <= int(whole.min()) and int(whole.max()) < Q
    assert torch.equal(whole, sample_codes(model, TEXTS, batch_tokens=1, **options))
    assert not torch.equal(whole[0], whole[2]), "the draws belong to the index"
    assert not torch.equal(whole, sample_codes(model, TEXTS, **{**options, "seed": 4}))


def test_guidance_and_its_interval(model):
    options = {"steps": 4, "temperature": 1.0}
    plain, guided = (
        sample_codes(model, TEXTS, guidance=scale, **options) for scale in (1.0, 60.0)
    )
    assert not torch.equal(plain, guided)
    assert torch.equal(
        guided, sample_codes(model, TEXTS, guidance=60.0, guidance_interval=(0.0, 1.0), **options)
    )
    late = sample_codes(model, TEXTS, guidance=60.0, guidance_interval=(0.0, 0.5), **options)
    assert not torch.equal(late, guided) and not torch.equal(late, plain)
    null = sample_codes(model, None, num_samples=2, steps=4, temperature=0.0)
    assert torch.equal(null[0], null[1]), "without a caption and without draws all images are one"


def test_pairs_share_one_clock_and_do_not_depend_on_batches(model, runs):
    diffusion = load_pretrained(runs / "model").text_diffusion
    options = {"text_diffusion": diffusion, "steps": 4, "seed": 1}
    texts, ids = sample_codes_and_texts(model, 5, **options)
    again, others = sample_codes_and_texts(model, 5, batch_size=1, **options)
    assert texts.tokens == again.tokens and torch.equal(ids, others)
    assert len(torch.unique(ids, dim=0)) == 5


def test_the_state_names_shares_as_training_does():
    state = CodeState(2, 4, 10, torch.device("cpu"))
    assert state.masked_share().tolist() == [1, 1]
    state.fill(torch.tensor([0, 5, 6]), torch.tensor([3, 4, 5]))
    state.write_eos(torch.ones(2, 1, dtype=torch.bool))
    assert state.masked_share().tolist() == [0.75, 0.5] and state.ids[..., 0].tolist()[1] == [
        4,
        5,
        10,
        10,
    ]
    assert state.targets(torch.tensor([1, 7])).positions.tolist() == [1, 6]
