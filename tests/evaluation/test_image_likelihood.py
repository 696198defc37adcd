"""Bits per code: log2 Q of a uniform head, paired between captions, a bound that more draws only
sharpen.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from mmldlm.cli import main
from mmldlm.evaluation.image_likelihood import (
    ARMS,
    bit_estimates,
    code_bits,
    frequency_estimates,
    x0_errors,
    x0_estimates,
)
from mmldlm.evaluation.sentences import choose_sentences
from mmldlm.tasks.registry import find_task, load_config
from mmldlm.tasks.translation.config import LatentDiffusionConfig
from mmldlm.train import check_run, train
from tests.support.image_store import make_image_store

Q = 40


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    return make_image_store(tmp_path_factory.mktemp("codes") / "store", codes=Q)


@pytest.fixture(scope="module")
def opened(codes):
    task = find_task("image_codes")
    data = task.open_data(
        load_config("tiny", None, ["task=image_codes", f"data.latent_data_root={codes}"])
    )
    torch.manual_seed(0)
    model = task.build_model(data).eval()
    return data, model, choose_sentences(data.validation, model, None, 0)


def randomized(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def test_a_uniform_head_pays_log2_of_the_codes_for_every_caption(opened):
    data, model, sentences = opened
    with torch.no_grad():
        saved = model.latent_head.weight.clone()
        model.latent_head.weight.zero_()
    found = code_bits(model, sentences, draws=3, seed=0)
    for arm in ARMS:
        np.testing.assert_allclose(found[arm], math.log2(Q), rtol=1e-5)
    assert bit_estimates(found)["code_bits_gain_null"].value == pytest.approx(0, abs=1e-12)
    with torch.no_grad():
        model.latent_head.weight.copy_(saved)


def test_all_counts_of_masks_together_are_the_exact_bound(opened):
    """With as many draws as codes each count occurs once; the mean over permutations is what fewer
    draws estimate.
    """
    data, model, sentences = opened
    randomized(model)
    sentences = sentences.part(range(4), 0)
    exact = np.mean(
        [code_bits(model, sentences, draws=16, seed=seed)["right"] for seed in range(2)], axis=0
    )
    few = np.array(
        [code_bits(model, sentences, draws=2, seed=seed)["right"] for seed in range(16)]
    )
    assert (np.abs(few.mean(0) - exact) < 4 * few.std(0) / 4 + 0.05).all()
    found = code_bits(model, sentences, draws=2, seed=0)
    assert not np.allclose(found["right"], found["null"]) and not np.allclose(
        found["right"], found["shuffled"]
    )


def test_frequencies_pay_the_cross_entropy_of_training_codes(opened):
    data, _, sentences = opened
    found = frequency_estimates(data.train.latent_blocks(10_000), sentences, Q)["code_bits_right"]
    counts = np.bincount(data.train.get(range(len(data.train))).latents.ravel(), minlength=Q) + 0.1
    own = np.bincount(sentences.latents.ravel(), minlength=Q) / sentences.latents.size
    assert (
        found.value == pytest.approx(-(own * np.log2(counts / counts.sum())).sum())
        and 0 < found.value < 7
    )


@pytest.mark.parametrize("prediction, first", [("x0", "t100"), ("epsilon", "t90")])
def test_x0_errors_are_measured_where_x0_is_estimated(pretrained, store, prediction, first):
    config = LatentDiffusionConfig(prediction=prediction)
    sentences = choose_sentences(store, pretrained.model, 4, 0)
    errors = x0_errors(replace(pretrained, latent_config=config), sentences, draws=1, seed=0)
    names = [name for name in x0_estimates(errors) if name.endswith("_right")]
    assert names[-1] == f"x0_error_{first}_right" and len(names) == 2 + (first == "t100")
    assert all(np.isfinite(values).all() and values.max() < 1e3 for values in errors.values())


def test_the_report_of_a_model_of_codes(codes, tmp_path):
    words = [
        "task=image_codes",
        f"data.latent_data_root={codes}",
        f"logging.save_dir={tmp_path}",
        "engine.kind=single",
    ]
    words += [
        "logging.run_name=run",
        "training.num_train_steps=1",
        "logging.eval_freq=100",
        "logging.plot=false",
    ]
    train(check_run(load_config("tiny", None, words), 1))
    options = [
        "--num-samples",
        "6",
        "--control-samples",
        "3",
        "--latent-steps",
        "2",
        "--num-draws",
        "1",
    ]
    report, page = tmp_path / "r.json", tmp_path / "r.html"
    assert (
        main(
            [
                "evaluate",
                "--checkpoint",
                str(tmp_path / "run"),
                "--data",
                str(codes),
                *options,
                "--json",
                str(report),
                "--html",
                str(page),
            ]
        )
        == 0
    )
    found = json.loads(report.read_text())
    details = found["details"]
    assert {"code_bits_right", "code_bits_gain_null", "gain_null"} <= set(details["model"])
    assert not any(key.startswith("x0_error") for key in details["model"])
    assert details["untrained"]["code_bits_gain_shuffled"]["value"] == pytest.approx(0, abs=1e-6)
    assert 0 < details["code_frequencies"]["code_bits_right"]["value"] < math.log2(Q) + 1
    assert {"recall_at_5", "seam_ratio", "copy_ratio"} <= set(details["guidance_2"])
    assert (
        "codebook_psnr" in found["conditions"]
        and "codebook renders" in found["conditions"]["notes"][0]
    )
    assert "bits per code" in page.read_text()
