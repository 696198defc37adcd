"""Texts written from embeddings and embedded again, with the real encoder."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mmldlm.data.encoders.encoder import Encoder
from mmldlm.errors import UserError
from mmldlm.evaluation.gain import evaluate, reencoded_estimates
from mmldlm.evaluation.sentences import Sentences
from mmldlm.evaluation.settings import GainSettings
from mmldlm.tasks.text_task import Pretrained
from mmldlm.tasks.translation.config import LatentDiffusionConfig, TextDiffusionConfig
from tests.data.conftest import need_minilm

__all__ = ["need_minilm"]


class OneTokenEach:
    """Decodes one id per text."""

    def __init__(self, texts):
        self.texts = texts

    def batch_decode(self, rows, skip_special_tokens):
        return [" ".join(self.texts[token] for token in row) for row in rows]


@pytest.fixture(scope="module")
def measured(need_minilm, sentences):
    """(ids -> estimates) for four sentences whose embeddings are the real encoder's."""
    texts, encoder = sentences[:4], Encoder("minilm", device="cpu")
    latents, order = encoder.encode(texts), np.array([1, 2, 3, 0])
    config = SimpleNamespace(num_latents=1, latent_dim=384)
    model = SimpleNamespace(config=config, parameters=lambda: iter(()))
    settings = TextDiffusionConfig(), LatentDiffusionConfig()
    pretrained = Pretrained(model, OneTokenEach(texts), *settings, encoder=encoder.identity())
    unseen = Sentences([[row] for row in range(4)], latents, texts, order)
    return lambda written: reencoded_estimates(pretrained, written, unseen, lambda line: None)


def test_the_sentence_itself_scores_one_and_the_partner_of_the_shuffled_control_is_told_apart(
    measured,
):
    right, swapped = measured([[0], [1], [2], [3]]), measured([[1], [2], [3], [0]])
    assert right["reencoded_cosine"].value == pytest.approx(1, abs=1e-5)
    assert swapped["reencoded_cosine_shuffled"].value == pytest.approx(1, abs=1e-5)
    assert swapped["reencoded_cosine"].value == pytest.approx(
        right["reencoded_cosine_shuffled"].value, abs=1e-5
    )
    assert right["reencoded_cosine_shuffled"].value < 0.9


def test_an_empty_text_scores_zero(measured):
    assert measured([[0], [1], [], []])["reencoded_cosine"].value == pytest.approx(0.5, abs=1e-5)
    assert measured([[], [], [], []])["reencoded_cosine"].value == 0


def test_without_the_encoder_the_evaluation_says_why_it_has_no_such_figure(pretrained, store):
    settings = GainSettings(num_samples=6, num_steps=2, num_draws=1, control_samples=2)
    report = evaluate(pretrained, store, settings, lambda line: None)
    assert "reencoded_cosine" not in report.arms["model"] and "f1_right" in report.arms["model"]
    assert any("not embedded again: no such key" in note for note in report.conditions["notes"])
    assert report.conditions["latent_steps"] == 1


def test_an_encoder_with_other_weights_is_not_used(measured, monkeypatch):
    monkeypatch.setattr(Encoder, "weights_sha256", lambda self: "0" * 64)
    with pytest.raises(UserError, match="weights"):
        measured([[0], [1], [2], [3]])
