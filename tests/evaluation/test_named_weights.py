"""FID, KID and CLIP score: their formulas against known answers, and weights that the user names,
or names wrongly.
"""

from __future__ import annotations

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from torch import nn

from mmldlm.errors import UserError
from mmldlm.evaluation.named_weights import (
    ClipScorer,
    FeatureNetwork,
    clip_score,
    distance_estimates,
    fid,
    kid,
)
from tests.support.named_weights import save_clip, save_features

CPU = torch.device("cpu")


@pytest.fixture
def torchmetrics():
    return pytest.importorskip("torchmetrics", reason="the extra eval is not installed")


def normal(count, width, seed, scale=1.0, shift=0.0):
    return np.random.default_rng(seed).standard_normal((count, width)) * scale + shift


def with_moments(mean, covariance, count, seed):
    """Draw features whose mean and covariance are exactly these."""
    drawn = normal(count, len(mean), seed)
    drawn -= drawn.mean(0)
    drawn = drawn @ np.linalg.inv(np.linalg.cholesky(np.cov(drawn.T))).T
    return drawn @ np.linalg.cholesky(covariance).T + mean


def test_fid_is_the_distance_of_two_gaussians(torchmetrics):
    mean, diagonal = (
        np.array([1.0, -2.0, 0.5]),
        (np.array([4.0, 1.0, 9.0]), np.array([1.0, 2.25, 0.25])),
    )
    first, second = (
        with_moments(at, np.diag(values), 50, 1) for at, values in zip((mean, mean + 2), diagonal)
    )
    # Covariances that commute.
    expected = 3 * 4 + ((np.sqrt(diagonal[0]) - np.sqrt(diagonal[1])) ** 2).sum()
    np.testing.assert_allclose(fid(first, second), expected, rtol=1e-9)
    turn = np.linalg.qr(normal(3, 3, 5))[0]  # a rotation changes no distance
    np.testing.assert_allclose(fid(first @ turn, second @ turn), expected, rtol=1e-9)


def test_fid_of_covariances_that_do_not_commute(torchmetrics):
    first, second = np.array([[2.0, 1.2], [1.2, 1.0]]), np.array([[1.0, -0.3], [-0.3, 3.0]])
    # of 2 x 2 matrices, (tr sqrt(M))^2 = tr M + 2 sqrt(det M)
    product = first @ second
    cross = np.sqrt(np.trace(product) + 2 * np.sqrt(np.linalg.det(product)))
    expected = np.trace(first) + np.trace(second) - 2 * cross
    found = fid(with_moments(np.zeros(2), first, 40, 1), with_moments(np.zeros(2), second, 60, 2))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("count, width", [(60, 8), (30, 64)])
def test_identical_sets_are_at_no_distance(torchmetrics, count, width):
    features = normal(count, width, 0)
    assert abs(fid(features, features)) < 1e-9 * width
    np.testing.assert_allclose(fid(features, features + 1), width, rtol=1e-9)


def test_kid_is_unbiased_and_sees_a_shift(torchmetrics):
    found = [kid(normal(20, 4, 2 * seed), normal(20, 4, 2 * seed + 1)) for seed in range(200)]
    assert abs(np.mean(found)) < 3 * np.std(found) / np.sqrt(200)
    assert kid(normal(200, 4, 0), normal(200, 4, 1, shift=1.0)) > 0.5


def test_kid_against_its_sum(torchmetrics):
    made, real = normal(5, 3, 0), normal(5, 3, 1)

    def kernel(x, y):
        return (x @ y / 3 + 1) ** 3

    pairs = [(i, j) for i in range(5) for j in range(5)]
    within = [kernel(x[i], x[j]) for x in (made, real) for i, j in pairs if i != j]
    across = [kernel(made[i], real[j]) for i, j in pairs]
    expected = 2 * np.mean(within) - 2 * np.mean(across)
    np.testing.assert_allclose(kid(made, real), expected, rtol=1e-12)


def test_standard_errors_are_those_of_other_draws(torchmetrics):
    found = [
        distance_estimates(normal(200, 3, 2 * s, 1.5), normal(200, 3, 2 * s + 1), s)
        for s in range(30)
    ]
    for name in ("fid", "kid"):
        spread = np.std([estimates[name].value for estimates in found], ddof=1)
        assert 0.6 < np.mean([estimates[name].se for estimates in found]) / spread < 1.6, name
    with pytest.raises(UserError, match="at least 20"):
        distance_estimates(normal(19, 3, 0), normal(19, 3, 1), 0)


def test_clip_score_ignores_negative_cosines():
    images, captions = (
        np.array([[1.0, 0.0], [0.6, 0.8], [1.0, 0.0]]),
        np.array([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]]),
    )
    found = clip_score(images, captions)
    np.testing.assert_allclose([found.value, found.n], [100 * 1.6 / 3, 3])


def test_clip_embeds_as_transformers_does(tmp_path):
    from transformers import CLIPModel, CLIPProcessor

    save_clip(tmp_path)
    captions = [
        "serif letter a",
        "b",
        "a caption that is longer than the longest text of this model",
    ]
    images = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 1), dtype=np.uint8)
    pictures, texts = ClipScorer(str(tmp_path), CPU).embed(images, captions)
    np.testing.assert_allclose(
        [np.linalg.norm(pictures, axis=1), np.linalg.norm(texts, axis=1)], 1, rtol=1e-5
    )
    model, processor = CLIPModel.from_pretrained(tmp_path), CLIPProcessor.from_pretrained(tmp_path)
    for row in range(2):  # one at a time: without padding
        inputs = processor(
            images=[np.repeat(images[row], 3, -1)], text=[captions[row]], return_tensors="pt"
        )
        with torch.no_grad():
            output = model(**inputs)
        cosine = float((output.image_embeds * output.text_embeds).sum())
        np.testing.assert_allclose(pictures[row] @ texts[row], cosine, atol=1e-5)


def test_a_clip_model_with_nan_weights_is_refused(tmp_path):
    from transformers import CLIPModel

    save_clip(tmp_path)
    model = CLIPModel.from_pretrained(tmp_path)
    model.visual_projection.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="not finite"):
        ClipScorer(str(tmp_path), CPU).embed(np.zeros((2, 16, 16, 1), np.uint8), ["a", "b"])


def test_folders_that_are_no_clip_model(tmp_path):
    good = save_clip(tmp_path / "good")
    with pytest.raises(UserError, match="no such folder"):
        ClipScorer(str(tmp_path / "absent"), CPU)
    other = shutil.copytree(good, tmp_path / "wider")
    values = json.loads((other / "config.json").read_text()) | {"projection_dim": 12}
    (other / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="--clip FOLDER"):
        ClipScorer(str(other), CPU)
    for missing in ("model.safetensors", "processor_config.json"):
        other = shutil.copytree(good, tmp_path / missing)
        (other / missing).unlink()
        with pytest.raises(UserError, match="--clip FOLDER"):
            ClipScorer(str(other), CPU)
    from safetensors.torch import load_file, save_file

    other = shutil.copytree(good, tmp_path / "lacking")
    weights = load_file(other / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="lacks 1 weights, visual_projection.weight"):
        ClipScorer(str(other), CPU)


def test_features_of_one_channel_and_of_a_network_with_two_outputs(torchmetrics, tmp_path):
    network = FeatureNetwork(save_features(tmp_path / "net.pt"), CPU)
    images = np.random.default_rng(0).integers(0, 256, (70, 4, 4, 1), dtype=np.uint8)
    expected = np.repeat(images.reshape(70, -1).mean(1, keepdims=True), 3, axis=1)
    np.testing.assert_allclose(network.features(images), expected, rtol=1e-6)
    color = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)
    np.testing.assert_allclose(network.features(color), color.mean((1, 2)), rtol=1e-6)


class _Wrong(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float()


class _NotFinite(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float().mean((2, 3)) / 0.0


class _Fails(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float() @ torch.zeros(999, 1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    "module, found",
    [(_Wrong(), "to .2, 3, 4, 4"), (_NotFinite(), "not finite"), (_Fails(), "fails on uint8")],
)
def test_networks_of_other_outputs(torchmetrics, module, found, tmp_path):
    torch.jit.script(module).save(str(tmp_path / "net.pt"))
    network = FeatureNetwork(str(tmp_path / "net.pt"), CPU)
    with pytest.raises(UserError, match=found):
        network.features(np.zeros((2, 4, 4, 3), np.uint8))


def test_files_that_are_no_network(torchmetrics, tmp_path):
    (tmp_path / "text.pt").write_text("text")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "state.pt")
    for name in ("absent.pt", "text.pt", "state.pt"):
        with pytest.raises(UserError, match="--inception-weights FILE"):
            FeatureNetwork(str(tmp_path / name), CPU)


def test_without_torchmetrics_the_extra_is_named(tmp_path, monkeypatch):
    path = save_features(tmp_path / "net.pt")
    for name in ("torchmetrics.image.fid", "torchmetrics.image.kid"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"mmldlm\[eval\]"):
        FeatureNetwork(path, CPU)
