"""Texts by the exact posterior: what no text may hold, draws by index, and laws of known
denoisers.
"""

from __future__ import annotations

import pytest
import torch

from mmldlm.diffusion.gidd import GiddProcess
from mmldlm.diffusion.hdlm import HierarchicalProcess
from mmldlm.errors import MmldlmError, UserError
from mmldlm.models.plain import PlainTransformer
from mmldlm.sampling.posterior import sample_by_posterior
from mmldlm.tasks.registry import build_config

VOCAB, MASK, PAD, EOS, DIM = 12, 3, 0, 2, 6
CLUSTERS = torch.tensor([-1, 0, -1, -1, *[k % 2 for k in range(VOCAB - 4)]])
PROCESSES = {
    "masks": GiddProcess(VOCAB, MASK, 0.0),
    "gidd": GiddProcess(VOCAB, MASK, 0.3),
    "hdlm": HierarchicalProcess(CLUSTERS, MASK),
}


def model_of(conditioning="prefix"):
    config = build_config(
        {
            "task": "gidd",
            "model": {
                "hidden_size": 16,
                "n_blocks": 1,
                "n_heads": 2,
                "cond_dim": 16,
                "max_seq_len": 9,
                "latent_dim": DIM,
                "vocab_size": VOCAB,
                "mask_token_id": MASK,
                "pad_token_id": PAD,
                "eos_token_id": EOS,
                "conditioning": conditioning,
            },
        }
    ).model
    config = config.model_construct(**{**config.model_dump(), "extra_input_tokens": 2})
    torch.manual_seed(0)
    model = PlainTransformer(config)
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("steps", [1, 7])
def test_texts_hold_words_alone_and_do_not_depend_on_their_batch(name, steps):
    model, latents = model_of(), torch.randn(7, DIM, generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([1, 2, 9, 5, 5, 3, 4])
    options = {"num_steps": steps, "lengths": lengths, "seed": 4}
    whole = sample_by_posterior(model, latents, PROCESSES[name], **options)
    assert [len(text) for text in whole.tokens] == [length - 1 for length in lengths.tolist()]
    assert all(
        token < VOCAB and token not in (MASK, PAD, EOS) for text in whole.tokens for token in text
    )
    assert whole.num_rows <= 7 * steps
    apart = sample_by_posterior(model, latents, PROCESSES[name], batch_tokens=9, **options)
    assert apart.tokens == whole.tokens
    assert (
        sample_by_posterior(model, latents, PROCESSES[name], **{**options, "seed": 5}).tokens
        != whole.tokens
    )


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_p": 0.5}])
def test_a_cluster_becomes_a_word_of_its_own_however_the_draws_are_shaped(options):
    """Of a model whose best word is mostly in another cluster."""
    model, latents = model_of(), torch.randn(7, DIM, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    lengths = torch.full((7,), 9)
    for process in PROCESSES.values():
        found = sample_by_posterior(
            model, latents, process, num_steps=9, lengths=lengths, **options
        )
        assert all(0 <= token < VOCAB for text in found.tokens for token in text)


def test_options_of_the_draws():
    model, latents = model_of(), torch.randn(3, DIM)
    options = {"num_steps": 6, "lengths": torch.tensor([9, 9, 9])}
    for guidance, cost in ((1.0, 18), (2.0, 36)):
        found = sample_by_posterior(
            model, latents, PROCESSES["gidd"], guidance=guidance, **options
        )
        assert found.num_rows == cost
    greedy = {**options, "temperature": 0.0, "num_steps": 1}
    first, second = (
        sample_by_posterior(model, latents, PROCESSES["gidd"], seed=s, **greedy).tokens
        for s in (1, 2)
    )
    nucleus = sample_by_posterior(
        model, latents, PROCESSES["gidd"], top_p=1e-6, num_steps=1, lengths=options["lengths"]
    )
    assert first == second == nucleus.tokens
    with pytest.raises(UserError, match="--top-p"):
        sample_by_posterior(model, latents, PROCESSES["gidd"], top_p=0.5, **greedy)
    steps = []
    sample_by_posterior(
        model, latents, PROCESSES["gidd"], progress=lambda *done: steps.append(done), **options
    )
    assert steps[-1] == (6, 6) and len(steps) == 6


def test_without_latents_and_with_self_correction():
    model = model_of("none")
    plain = sample_by_posterior(model, None, PROCESSES["gidd"], num_samples=4, num_steps=5)
    corrected = sample_by_posterior(
        model, None, PROCESSES["gidd"], num_samples=4, num_steps=5, corrects=True
    )
    assert [len(text) for text in plain.tokens] == [len(text) for text in corrected.tokens]
    assert corrected.num_rows > plain.num_rows
    # The weights are what they were, in fp64, which torch does not mix with fp32.
    sample_by_posterior(
        model.double(), None, PROCESSES["gidd"], num_samples=4, num_steps=5, corrects=True
    )
    assert all(token not in (MASK, PAD, EOS) for text in corrected.tokens for token in text)


def test_a_sharp_model_corrects_what_it_disagrees_with(monkeypatch):
    """A model that always wants word 5: the corrected text is all 5, and the rounds end by
    themselves.
    """
    model = model_of("none")
    with torch.no_grad():
        model.text_head.bias[5] = 40.0
    monkeypatch.setattr(
        GiddProcess, "reverse", lambda self, tokens, *_: torch.where(tokens == MASK, 7, tokens)
    )
    found = sample_by_posterior(
        model,
        None,
        PROCESSES["gidd"],
        num_samples=2,
        num_steps=1,
        lengths=torch.tensor([4, 6]),
        corrects=True,
    )
    assert found.tokens == [[5] * 3, [5] * 5] and found.num_rows == 2 + 2 * 6


def test_nan_logits_are_an_error():
    model = model_of("none")
    with torch.no_grad():
        model.text_head.bias[5] = float("nan")
    with pytest.raises(MmldlmError, match="NaN"):
        sample_by_posterior(model, None, PROCESSES["gidd"], num_samples=1, num_steps=2)
