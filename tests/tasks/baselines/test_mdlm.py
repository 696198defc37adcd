"""MDLM's samples and scores: latents encoded once, the null latent, and what an untrained model
does with a latent.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmldlm.evaluation.directions import likelihood_estimates
from mmldlm.evaluation.gain import untrained_control
from mmldlm.evaluation.nelbo import measure
from mmldlm.inference.sample import sample
from mmldlm.models.plain import PlainTransformer
from mmldlm.tasks.baselines.config import MdlmModelConfig
from mmldlm.tasks.baselines.mdlm import MdlmTask
from mmldlm.tasks.text_task import Pretrained
from mmldlm.tasks.translation.config import TextDiffusionConfig

DIM, VOCAB = 6, 30
CONDITIONINGS = ("none", "prefix", "adaln", "cross_attention")


def pretrained_of(conditioning: str) -> Pretrained:
    """A model whose gates are open."""
    torch.manual_seed(0)
    config = MdlmModelConfig(
        hidden_size=16,
        n_blocks=2,
        n_heads=2,
        cond_dim=16,
        max_seq_len=16,
        latent_dim=DIM,
        vocab_size=VOCAB,
        mask_token_id=3,
        pad_token_id=0,
        eos_token_id=2,
        conditioning=conditioning,
        reads_time=conditioning != "none",
    )
    model = PlainTransformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    weights = (
        {"unconditional": 1.0} if conditioning == "none" else {"l2t": 0.9, "unconditional": 0.1}
    )
    return Pretrained(model, None, TextDiffusionConfig(), None, weights, 0.1, task=MdlmTask())


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
def test_a_latent_is_encoded_once_and_the_texts_are_the_same(conditioning, monkeypatch):
    """With guidance, which also reads the null latent; whatever the sampler and the batch."""
    pretrained = pretrained_of(conditioning)
    latents = None if conditioning == "none" else torch.randn(5, DIM)
    options = {
        "num_steps": 6,
        "seed": 1,
        "guidance": 1.0 if latents is None else 2.0,
        "num_samples": 5,
    }
    encode, calls = PlainTransformer.encode_latents, []

    def write(sampler, batch_tokens=None):
        calls.clear()
        texts = MdlmTask().write_texts(
            pretrained, latents, sampler=sampler, batch_tokens=batch_tokens, **options
        )
        assert all(3 not in text and 0 not in text and 2 not in text for text in texts.tokens)
        return texts.tokens

    def watched(self, given=None, batch=None, caches=False):
        calls.append(given is not None)
        return encode(self, given, batch, caches)

    monkeypatch.setattr(PlainTransformer, "encode_latents", watched)
    found = {sampler: write(sampler) for sampler in ("confidence", "ancestral")}
    if latents is not None:
        assert sum(calls) == 2  # for the length, and for all steps
    assert write("ancestral", batch_tokens=1) == found["ancestral"]

    def uncached(self, given=None, batch=None, caches=False):
        return encode(self, given, batch, caches=False)

    monkeypatch.setattr(PlainTransformer, "encode_latents", uncached)
    assert {sampler: write(sampler) for sampler in found} == found


@pytest.mark.parametrize("conditioning", CONDITIONINGS[1:])
def test_a_fresh_model_ignores_its_latent_exactly_and_open_gates_read_it(conditioning):
    pretrained = pretrained_of(conditioning)
    rng = np.random.default_rng(0)
    texts = [rng.integers(4, VOCAB, rng.integers(3, 12)).tolist() for _ in range(12)]
    latents, partner = torch.randn(12, DIM), np.roll(np.arange(12), 1)
    for gates in (False, True):
        fresh = untrained_control(pretrained.model, 0, random_gates=gates)
        arm = Pretrained(fresh, None, pretrained.text_config, None, task=MdlmTask())

        def score(*arguments, arm=arm):
            return MdlmTask().score_texts(arm, *arguments)

        found = likelihood_estimates(measure(fresh, texts, latents, partner, score=score, draws=2))
        assert (found["latent_sensitivity"].value > 1e-6) == gates
        assert gates or found["gain_null"].value == found["gain_shuffled"].value == 0
        # The length head has no gate.
        assert found["length_nll_right"].value != found["length_nll_null"].value


def test_an_unconditional_model_is_scored_without_a_latent():
    pretrained = pretrained_of("none")
    texts = [[5, 6, 7], [8, 9]]

    def score(*arguments):
        return MdlmTask().score_texts(pretrained, *arguments)

    found = likelihood_estimates(
        measure(pretrained.model, texts, None, np.array([1, 0]), score=score, draws=3)
    )
    assert (
        set(found) == {"nelbo_null", "token_accuracy_null", "length_nll_null"}
        and found["nelbo_null"].value > 0
    )
    assert not pretrained.reads_latents


def test_texts_of_one_length_without_a_latent_differ():
    """Also where the sampler is greedy by default."""
    pretrained = pretrained_of("none")
    pretrained.tokenizer = SimpleNamespace(
        batch_decode=lambda rows, **_: [str(list(row)) for row in rows]
    )
    given = {"sampler": "confidence", "num_samples": 60, "num_steps": 4}
    found = sample(pretrained, "unconditional", given).records
    texts, lengths = ({record[key] for record in found} for key in ("text", "num_tokens"))
    assert len(texts) > len(lengths)
