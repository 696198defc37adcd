"""Frequencies of the training split, and the biases that start from them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mmldlm.data.lengths import Lengths
from mmldlm.tasks.initialization import (
    log_length_frequencies,
    log_token_frequencies,
    token_counts,
)
from tests.tasks.test_candidates import VOCAB, config_of
from tests.tasks.translation.test_noiser import EOS, SIZE, FakeStore


@pytest.fixture
def data():
    store = FakeStore()
    lengths = Lengths([store.lengths])
    return SimpleNamespace(config=config_of(None), train=store, train_lengths=lengths)


def test_every_token_counts_and_so_does_eos(data):
    counts = token_counts(data)
    assert (
        counts.sum() == data.train_lengths.sum() and counts[EOS] == SIZE and len(counts) == VOCAB
    )


def test_large_splits_are_sampled(data, monkeypatch):
    monkeypatch.setattr("mmldlm.tasks.initialization.COUNTED_TEXTS", 10)
    assert token_counts(data)[EOS] == 10


def test_they_are_log_probabilities(data):
    for found in (log_token_frequencies(data), log_length_frequencies(data)):
        assert (
            found.dtype == np.float32
            and np.isfinite(found).all()
            and np.exp(found).sum() == pytest.approx(1, rel=1e-5)
        )
