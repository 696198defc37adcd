"""Floors: the nearest training sentence against a search by hand, and texts of word
frequencies.
"""

from __future__ import annotations

import numpy as np
import pytest

from mmldlm.data.store import Store
from mmldlm.evaluation import texts as floors
from mmldlm.evaluation.texts import nearest_training_sentences, unigram_texts


@pytest.mark.parametrize("count", [1, 2])
def test_the_nearest_training_sentence_is_that_of_a_search_by_hand(
    make, tmp_path, monkeypatch, count
):
    train = Store(make.store(tmp_path, 4, num_train=50, latents_per_text=count), "train")
    latents = (
        np.random.default_rng(5)
        .standard_normal((13, *train.get([0]).latents.shape[1:]))
        .astype(np.float32)
    )
    latents[3] = 2.5 * train.get([41]).latents[0]
    keys, queries = (
        rows if count == 1 else rows.mean(1) for rows in (train.get(range(50)).latents, latents)
    )
    cosines = (
        queries @ keys.T / np.linalg.norm(queries, axis=1)[:, None] / np.linalg.norm(keys, axis=1)
    )
    for block in (1 << 22, 13 * 7):
        monkeypatch.setattr(floors, "_BLOCK", block)
        found = nearest_training_sentences(train, latents)
        assert found.num_compared == 50
        assert (found.rows == cosines.argmax(1)).all()
        np.testing.assert_allclose(found.cosines, cosines.max(1), rtol=1e-5)
    assert found.rows[3] == 41 and found.cosines[3] == pytest.approx(1, abs=1e-6)


def test_of_a_large_split_only_some_rows_are_compared(make, tmp_path, monkeypatch):
    train = Store(make.store(tmp_path, 4, num_train=500), "train")
    monkeypatch.setattr(floors, "MAX_COMPARED", 64)
    found = nearest_training_sentences(train, train.get([2, 490]).latents)
    assert 64 <= found.num_compared < 500


def test_unigram_texts_have_the_tokens_and_lengths_of_training(make, tmp_path):
    train = Store(make.store(tmp_path, 4, num_train=300), "train")
    tokens = np.concatenate(train.get(range(300)).tokens)
    drawn, frequent = unigram_texts(train, 400, seed=1)
    assert (drawn, frequent) == unigram_texts(train, 400, seed=1) and drawn != unigram_texts(
        train, 400, seed=2
    )[0]
    lengths = set(np.asarray(train.lengths).tolist())
    assert len(drawn) == 400 and {len(text) for text in drawn} <= lengths
    own, other = (
        np.bincount(ids, minlength=make.VOCAB) / len(ids)
        for ids in (tokens, np.concatenate(drawn))
    )
    assert np.abs(own - other).max() < 0.02 and not other[own == 0].any()
    assert len(frequent) == len(set(frequent)) == np.median(train.lengths)
    assert min(own[frequent]) >= max(np.delete(own, frequent))
