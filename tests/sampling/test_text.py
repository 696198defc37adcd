"""Samplers of text: exactness, counts, determinism and what must never come out."""

from __future__ import annotations

import math

import pytest
import torch

from mmldlm.diffusion import MaskedDiffusion
from mmldlm.diffusion.masked import SCHEDULES
from mmldlm.errors import MmldlmError
from mmldlm.models.base import ModelOutput, TextInputs
from mmldlm.models.mmdit_config import ModelConfig
from mmldlm.models.token_scores import TokenQuery, TokenScores
from mmldlm.sampling.decoding import (
    DecodingState,
    choose_lengths,
    draw_tokens,
)
from mmldlm.sampling.settings import DrawSettings
from mmldlm.sampling.strategies import STRATEGIES
from mmldlm.sampling.text import sample_text
from tests.support.forward import encode

TEXTS = [[3, 4, 5], [7], [6, 6, 3, 4, 7, 5, 3], [5, 4], []]


def numbered(count: int, dim: int = 4) -> torch.Tensor:
    latents = torch.zeros(count, dim)
    latents[:, 0] = torch.arange(count)
    return latents


@pytest.mark.parametrize("sampler", ["confidence", "ancestral"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 3, 40])
def test_perfect_denoiser_gives_back_the_text(toys, sampler, schedule, steps):
    model = toys.Perfect(TEXTS)
    diffusion = MaskedDiffusion(toys.MASK, schedule)
    found = sample_text(
        model, numbered(5), diffusion=diffusion, steps=steps, sampler=sampler, batch_tokens=10
    )
    assert found.tokens == TEXTS
    assert found.lengths.tolist() == [len(text) + 1 for text in TEXTS]


def strategy_of(toys, lengths, steps, sampler, schedule="loglinear", seed=0, **options):
    lengths = torch.tensor(lengths)
    uniform = torch.rand(
        len(lengths), 2, int(lengths.max()), generator=torch.Generator().manual_seed(seed)
    ).double()
    ids = {"mask_token_id": toys.MASK, "eos_token_id": toys.EOS, "pad_token_id": toys.PAD}
    state = DecodingState(lengths, int(lengths.max()), **ids)
    options |= {"diffusion": MaskedDiffusion(toys.MASK, schedule), "uniform": uniform}
    return STRATEGIES[sampler](state, draw=DrawSettings(), options={"num_steps": steps}, **options)


def run_strategy(strategy, steps, vocab=8):
    counts, state = [], strategy.state
    for k in range(steps):
        before = state.undecided.sum(1)
        positions = strategy.positions()
        logits = torch.randn(len(positions), vocab, generator=torch.Generator().manual_seed(k))
        strategy.fill(positions, logits)
        counts.append(before - state.undecided.sum(1))
    return torch.stack(counts, 1)


def test_ancestral_unmasks_binomial_counts_and_leaves_nothing(toys):
    length, steps, rows = 33, 8, 600
    counts = run_strategy(
        strategy_of(toys, [length] * rows, steps, "ancestral", shared_schedule=True), steps
    ).double()
    assert (counts.sum(1) == length - 1).all()
    left = torch.full((rows,), length - 1.0).double()
    for k in range(steps):
        t, s = 1 - k / steps, 1 - (k + 1) / steps
        probability = (t - s) / t
        expected, variance = left * probability, left * probability * (1 - probability)
        # Standardised sum over rows: a 5-sigma bound, and the spread of a Binomial, not of a fixed
        # count.
        z = (counts[:, k] - expected).sum() / math.sqrt(max(float(variance.sum()), 1e-9))
        assert abs(float(z)) < 5, (k, z)
        if k < steps - 1:
            spread = float(((counts[:, k] - expected) ** 2).sum() / variance.sum())
            assert 0.7 < spread < 1.3, (k, spread)
        left -= counts[:, k]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shared_schedule", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 7, 16, 64])
def test_confidence_ends_without_masks_within_its_steps(toys, schedule, shared_schedule, steps):
    lengths = [1, 2, 3, 9, 17, 30]
    strategy = strategy_of(
        toys, lengths, steps, "confidence", schedule, shared_schedule=shared_schedule
    )
    counts, state = run_strategy(strategy, steps), strategy.state
    assert counts.sum(1).tolist() == [length - 1 for length in lengths]
    assert not bool(state.undecided.any()) and not bool((state.tokens == toys.MASK).any())
    if schedule == "loglinear" and not shared_schedule:
        # Even: no step commits two tokens more than another.
        for length, row in zip(lengths, counts.tolist()):
            used = row[: min(steps, length - 1)]
            assert not used or max(used) - min(used) <= 1


def test_confidence_commits_the_most_confident_first(toys):
    class Sure(toys.Toy):
        def logits(self, tokens, latents, t, real):
            out = torch.zeros(*tokens.shape, 8)
            out[:, :, 3] = torch.arange(tokens.shape[1]).float()  # surer to the right
            return out

    model, diffusion = Sure(), MaskedDiffusion(toys.MASK)
    strategy = strategy_of(toys, [5], 4, "confidence")
    state = strategy.state
    for k in range(4):
        positions = strategy.positions()
        text = TextInputs(state.tokens, attention_mask=state.real)
        logits = model(text, None, TokenQuery(positions)).text.logits
        strategy.fill(positions, logits)
        assert state.undecided[0].tolist() == [place < 3 - k for place in range(4)] + [False]
    assert diffusion.mask_token_id == toys.MASK


@pytest.mark.parametrize("sampler", ["confidence", "ancestral"])
@pytest.mark.parametrize("given", [True, False])
def test_same_seed_same_text_whatever_the_batch(toys, sampler, given):
    model, diffusion = toys.Noisy(max_seq_len=12), MaskedDiffusion(toys.MASK)
    latents = torch.randn(20, 4, generator=torch.Generator().manual_seed(1)) if given else None
    options = {
        "diffusion": diffusion,
        "steps": 5,
        "sampler": sampler,
        "temperature": 1.0,
        "num_samples": 20,
    }
    big = sample_text(model, latents, batch_tokens=10_000, seed=4, **options)
    small = sample_text(model, latents, batch_tokens=1, seed=4, **options)
    other = sample_text(model, latents, batch_tokens=10_000, seed=5, **options)
    assert big.tokens == small.tokens
    assert big.tokens != other.tokens


@pytest.mark.parametrize("sampler", ["confidence", "ancestral"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_special_tokens_never_come_out(toys, sampler, temperature):
    class Wrong(toys.Toy):
        def logits(self, tokens, latents, t, real):
            out = torch.zeros(*tokens.shape, 8)
            out[..., :3] = 100.0
            return out

    found = sample_text(
        Wrong(),
        None,
        num_samples=30,
        diffusion=MaskedDiffusion(toys.MASK),
        steps=4,
        sampler=sampler,
        temperature=temperature,
    )
    assert {token for text in found.tokens for token in text} <= set(range(3, 8))
    assert [len(text) + 1 for text in found.tokens] == found.lengths.tolist()
    assert len(set(found.lengths.tolist())) > 3  # drawn from p(length), not one length for all


@pytest.mark.parametrize("sampler", ["confidence", "ancestral"])
def test_nan_logits_are_an_error(toys, sampler):
    class Broken(toys.Toy):
        def logits(self, tokens, latents, t, real):
            return torch.full((*tokens.shape, 8), float("nan"))

    with pytest.raises(MmldlmError, match="NaN"):
        sample_text(
            Broken(),
            None,
            num_samples=2,
            diffusion=MaskedDiffusion(toys.MASK),
            sampler=sampler,
            lengths=torch.tensor([4, 5]),
        )


def test_guidance_extrapolates_from_the_null(toys):
    class Two(toys.Toy):
        def logits(self, tokens, latents, t, real):
            out = torch.full((*tokens.shape, 8), -9.0)
            # given: 3 before 4; null: 3 even more so. Only extrapolation makes 4 the best.
            out[..., 3], out[..., 4] = (1.0, 0.9) if latents is not None else (3.0, 0.0)
            return out

    options = {"diffusion": MaskedDiffusion(toys.MASK), "steps": 2, "lengths": torch.tensor([3])}
    assert sample_text(Two(), torch.zeros(1, 4), **options).tokens == [[3, 3]]
    assert sample_text(Two(), torch.zeros(1, 4), guidance=2.0, **options).tokens == [[4, 4]]


def test_passes_are_spent_only_on_texts_that_change(toys):
    model = toys.Perfect(TEXTS)
    found = sample_text(model, numbered(5), diffusion=MaskedDiffusion(toys.MASK), steps=100)
    assert found.num_rows == sum(len(text) for text in TEXTS)


def test_draws_follow_probabilities_and_never_take_what_has_none():
    logits = torch.tensor([float("-inf"), 0.0, math.log(3.0), float("-inf")]).expand(4000, 4)
    uniform = (torch.arange(4000).double() + 0.5) / 4000
    drawn = draw_tokens(logits, uniform, 1.0)
    assert torch.bincount(drawn, minlength=4).tolist() == [0, 1000, 3000, 0]
    ends = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert draw_tokens(logits[:2], ends, 1.0).tolist() == [1, 2]
    assert draw_tokens(logits[:2], ends, 1.0, top_p=0.7).tolist() == [2, 2]
    assert draw_tokens(logits[:2], ends, 0.0).tolist() == [2, 2]


def test_lengths_are_the_median_or_drawn():
    probability = torch.tensor([[0.1, 0.3, 0.2, 0.4], [0.0, 0.0, 1.0, 0.0]])
    assert choose_lengths(probability.log()).tolist() == [3, 3]
    uniform = torch.tensor([0.05, 1 - 2.0**-53], dtype=torch.float64)
    assert choose_lengths(probability.log(), uniform).tolist() == [1, 3]


def test_presence_penalty_takes_what_is_there_already_off_the_table():
    """Two tokens of nearly the same probability everywhere: greedy decoding repeats one, the
    penalty alternates.
    """

    class Flat(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.config = ModelConfig(
                max_seq_len=8,
                latent_dim=2,
                vocab_size=8,
                mask_token_id=3,
                pad_token_id=0,
                eos_token_id=2,
            )

        def scale_latents(self, latents):
            return latents

        def encode_latents(self, latents, **_):
            return encode(latents)

        def forward(self, text, latents, query):
            logits = torch.tensor([0.0, 0, 0, 0, 5.0, 4.5, 4.0, 0])
            return ModelOutput(TokenScores(logits.repeat(len(query.positions), 1)))

    options = dict(diffusion=MaskedDiffusion(3), steps=8, lengths=torch.tensor([4]))
    latents = torch.zeros(1, 2)
    assert sample_text(Flat(), latents, **options).tokens == [[4, 4, 4]]
    assert sorted(sample_text(Flat(), latents, presence_penalty=10.0, **options).tokens[0]) == [
        4,
        5,
        6,
    ]
