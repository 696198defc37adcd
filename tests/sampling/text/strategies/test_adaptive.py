"""Adaptive samplers: limits and order of their parameters, and the certificates that they
rest on.
"""

from __future__ import annotations

import pytest
import torch

from mmldlm.diffusion import MaskedDiffusion
from mmldlm.sampling.text.draw import DrawSettings
from mmldlm.sampling.text.state import DecodingState
from mmldlm.sampling.text.strategies import strategy_class

B, S, V = 400, 9, 12


def chosen_by(sampler, logits, **options):
    """Positions [B, S] of the first pass over B texts of S tokens."""
    state = DecodingState(
        torch.full((B,), S + 1), S + 1, mask_token_id=0, pad_token_id=1, eos_token_id=2
    )
    strategy = strategy_class(sampler)(
        state,
        diffusion=MaskedDiffusion(0),
        uniform=torch.rand(B, 2, S + 1).double(),
        draw=DrawSettings(),
        options=options,
    )
    positions = strategy.positions()
    out = torch.zeros(B, S + 1, dtype=torch.bool)
    out.view(-1)[positions[strategy.choose(positions, logits.flatten(0, 1))]] = True
    return out[:, :S]


@pytest.fixture(scope="module")
def logits():
    """Texts from nearly certain to nearly uniform; special tokens excluded."""
    generator = torch.Generator().manual_seed(5)
    out = torch.randn(B, S, V, generator=generator) * torch.rand(B, 1, 1, generator=generator) * 12
    out[..., :3] = float("-inf")
    return out


@pytest.mark.parametrize(
    "sampler, option, values",  # from one token at a time to all at once
    [
        ("threshold", "threshold", [1.01, 0.9, 0.5, 0.2, 0.0]),
        ("factor", "factor", [0.0, 0.5, 1.0, 2.0, 99.0]),
        ("frechet", "delta", [1.0, 0.5, 0.25, -1.0, -99.0]),
        ("eb", "gamma", [0.0, 0.01, 0.3, 2.0, 1e9]),
    ],
)
def test_more_is_chosen_the_less_certainty_is_asked_for(logits, sampler, option, values):
    sets = [chosen_by(sampler, logits, **{option: value}) for value in values]
    assert bool((sets[0].sum(1) == 1).all()) and bool(sets[-1].all())
    for fewer, more in zip(sets, sets[1:]):
        assert bool((fewer <= more).all()) and int(fewer.sum()) < int(more.sum())


@pytest.mark.parametrize("factor", [0.3, 0.75, 1.0, 1.8])
def test_frechet_chooses_no_fewer_than_factor_and_as_many_where_all_are_equally_sure(
    logits, factor
):
    by_factor = chosen_by("factor", logits, factor=factor)
    by_bound = chosen_by("frechet", logits, delta=1 - factor)
    assert bool((by_factor <= by_bound).all()) and int(by_factor.sum()) < int(by_bound.sum())
    flat = logits[:, :1].expand(-1, S, -1)
    assert torch.equal(
        chosen_by("factor", flat, factor=factor), chosen_by("frechet", flat, delta=1 - factor)
    )


def test_greedy_tokens_of_factor_below_one_are_those_of_the_joint():
    """Random joints of two tokens with sharp marginals: where both are chosen, the product's mode
    is the joint's.
    """
    generator = torch.Generator().manual_seed(2)
    joint = torch.rand(B, 3, 3, generator=generator).double() ** 8
    joint += 3 * torch.nn.functional.one_hot(torch.randint(9, (B,), generator=generator), 9).view(
        B, 3, 3
    )
    joint /= joint.sum((1, 2), keepdim=True)
    logits = torch.full((B, S, V), float("-inf"))
    logits[:, :, 3:6] = 0.0  # the other positions are far from sure
    logits[:, 0, 3:6], logits[:, 1, 3:6] = joint.sum(2).log().float(), joint.sum(1).log().float()
    for sampler, options in (("factor", {"factor": 1.0}), ("frechet", {"delta": 0.0})):
        both = chosen_by(sampler, logits, **options)[:, :2].all(1)
        assert 40 < int(both.sum()) < B
        modes = joint.flatten(1).argmax(1)
        greedy = 3 * joint.sum(2).argmax(1) + joint.sum(1).argmax(1)
        assert torch.equal(greedy[both], modes[both])


def test_the_entropy_bound_is_above_the_dependence_that_it_ignores():
    """H_1 + H_2 - max(H_1, H_2) >= I(1; 2): a set of two within gamma depends on each other by
    gamma at most.
    """
    generator = torch.Generator().manual_seed(3)
    joint = torch.rand(B, 3, 3, generator=generator).double() ** 9
    joint /= joint.sum((1, 2), keepdim=True)
    first, second = joint.sum(2), joint.sum(1)
    mutual = (joint * (joint / (first[:, :, None] * second[:, None, :])).log()).sum((1, 2))
    logits = torch.full((B, S, V), float("-inf"))
    logits[:, :, 3:] = 0.0
    logits[:, 0, 3:], logits[:, 1, 3:] = float("-inf"), float("-inf")
    logits[:, 0, 3:6], logits[:, 1, 3:6] = first.log().float(), second.log().float()
    for gamma in (0.05, 0.2, 0.5):
        both = chosen_by("eb", logits, gamma=gamma)[:, :2].all(1)
        assert 10 < int(both.sum()) < B
        assert float(mutual[both].max()) <= gamma + 1e-6
