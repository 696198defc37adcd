"""Clusters of HDLM: what they are made of, and what a resume finds of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mmldlm.errors import UserError
from mmldlm.tasks.baselines.hdlm import HdlmTask, cooccurrence_vectors
from mmldlm.tasks.registry import load_config

TINY = ["model.hidden_size=32", "model.n_blocks=2", "model.n_heads=2", "model.max_seq_len=64"]


@pytest.fixture
def store(minilm_store):
    return minilm_store


def data_of(store, *words):
    return HdlmTask().open_data(
        load_config("hdlm", None, [*TINY, f"data.latent_data_root={store}", *words])
    )


def test_words_of_the_same_neighbors_have_the_same_vectors():
    """4 and 5 always stand between 1 and 2; 6 between 2 and 3; 7 never."""
    texts = [np.array(text, dtype=np.uint16) for text in ([1, 4, 2], [1, 5, 2], [2, 6, 3]) * 5]
    vectors = cooccurrence_vectors(texts, 8)
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
    assert unit[4] @ unit[5] == pytest.approx(1, abs=1e-6) and unit[4] @ unit[6] < 0.9
    assert not vectors[7].any() and not vectors[0].any()


def test_the_scored_fraction_of_the_largest_gamma_is_a_number():
    def share(gamma):
        config = load_config("hdlm", None, [*TINY, f"text_diffusion.gamma={gamma}"])
        return HdlmTask().scored_fraction(config)

    assert share(1.0) == pytest.approx(0.5)
    # Gautschi: the ratio is about 1 / sqrt(pi gamma).
    assert [1 - share(gamma) for gamma in (1e3, 1e6)] == pytest.approx(
        [(math.pi * gamma) ** -0.5 for gamma in (1e3, 1e6)], rel=1e-3
    )


def test_the_data_decides_the_clusters_and_the_same_seed_finds_the_same(store):
    data, other = (
        data_of(store, "text_diffusion.num_clusters=6"),
        data_of(store, "text_diffusion.num_clusters=7"),
    )
    model, clusters = data.config.model, data.clusters
    assert model.extra_input_tokens == 6 and len(clusters) == model.vocab_size
    sizes = np.bincount(clusters[clusters >= 0], minlength=6)
    mean = sizes.mean()
    assert len(sizes) == 6 and sizes.min() >= 0.1 * mean and sizes.max() <= 5 * mean
    assert all(
        clusters[token] == -1
        for token in (model.mask_token_id, model.pad_token_id, model.eos_token_id)
    )
    again = data_of(store, "text_diffusion.num_clusters=6")
    assert np.array_equal(clusters, again.clusters) and data.fingerprint() == again.fingerprint()
    assert data.fingerprint() != other.fingerprint()
    assert data_of(store).config.text_diffusion.num_clusters == 128  # below the root of 30,522


@pytest.mark.parametrize(
    "word, message",
    [
        ("model.extra_input_tokens=5", "extra_input_tokens"),
        ("model.tie_embeddings=true", "tie_embeddings"),
        ("loss.text_weighting=dynamic", "text_weighting"),
    ],
)
def test_what_contradicts_the_clusters_is_an_error(store, word, message):
    with pytest.raises(UserError, match=message) as error:
        data_of(store, "text_diffusion.num_clusters=6", word)
    assert error.value.exit_code == 2


def test_more_clusters_than_words_is_an_error(store):
    with pytest.raises(UserError, match="num_clusters"):
        _ = data_of(store, "text_diffusion.num_clusters=40000").clusters
