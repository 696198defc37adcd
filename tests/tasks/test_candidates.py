"""Candidates of the text head: the same for every cut of a batch, and as exact as promised."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmldlm.data.batch_plan import BatchPlan
from mmldlm.data.loader import MicroBatches
from mmldlm.models import MultimodalMMDiT
from mmldlm.tasks.candidates import CandidateSampler, candidate_sizes
from mmldlm.tasks.registry import build_config
from mmldlm.tasks.translation.noiser import Noiser
from mmldlm.tasks.translation.objective import TranslationObjective
from tests.tasks.translation.test_noiser import DIM, EOS, MASK, PAD, FakeStore

VOCAB = 60


def config_of(candidates: int | None):
    model = {
        "hidden_size": 16,
        "n_heads": 2,
        "n_blocks": 1,
        "cond_dim": 8,
        "latent_dim": DIM,
        "max_seq_len": 32,
    }
    ids = {"vocab_size": VOCAB, "mask_token_id": MASK, "pad_token_id": PAD, "eos_token_id": EOS}
    return build_config({"model": model | ids, "loss": {"text_candidates": candidates}})


def sampler(config) -> CandidateSampler:
    store = FakeStore()
    return CandidateSampler(
        SimpleNamespace(config=config, train=store, train_lengths=store.lengths)
    )


def losses(config, world: int, monkeypatch=None) -> float:
    """Loss of one global batch, cut into micro-batches of as many ranks."""
    store, zeros = FakeStore(), np.zeros(DIM, np.float32)
    candidates = None if config.loss.text_candidates is None else sampler(config)
    noiser = Noiser(config, zeros, zeros + 1, candidates=candidates)
    torch.manual_seed(0)
    model, objective = MultimodalMMDiT(config.model), TranslationObjective(config)
    parts = [
        MicroBatches(store, BatchPlan(store.lengths, 12, 0), noiser, rank, world, 1)[0]
        for rank in range(world)
    ]
    return sum(float(objective(model, part)[0].detach()) for part in parts)


def test_the_loss_does_not_depend_on_how_the_batch_is_cut(monkeypatch):
    monkeypatch.setattr("mmldlm.tasks.candidates.NUM_SAMPLED_CANDIDATES", 7)
    config = config_of(10)
    assert losses(config, 3) == pytest.approx(losses(config, 1), rel=1e-5)
    assert losses(config, 1) != pytest.approx(losses(config_of(None), 1), rel=1e-5)


@pytest.mark.parametrize("count", [10, 59, 1000])
def test_as_many_candidates_as_tokens_are_exact(count):
    assert losses(config_of(count), 1) == pytest.approx(losses(config_of(None), 1), rel=1e-5)


def test_frequent_tokens_come_first_and_mask_never():
    config = config_of(10)
    found, counts = (
        sampler(config),
        np.bincount(np.concatenate(FakeStore().ids), minlength=VOCAB),
    )
    assert EOS in found.frequent and MASK not in found.frequent and MASK not in found.others
    assert counts[found.frequent[found.frequent != EOS]].min() >= counts[found.others].max()
    assert candidate_sizes(config) == (10, 49, 49)


def test_every_target_has_a_column():
    found = sampler(config_of(10))
    targets = torch.from_numpy(np.concatenate(FakeStore().ids))
    tensors = found.tensors(targets, np.random.default_rng(0))
    assert torch.equal(tensors["text_candidates"][tensors["text_columns"]], targets)
