"""The likelihood of samplers on an enumerable model: a law for every sampler and number of
passes.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmldlm.diffusion import MaskedDiffusion
from mmldlm.errors import MmldlmError
from mmldlm.sampling.settings import BY_CERTAINTY
from mmldlm.sampling.strategies import STRATEGIES
from studies.information.sampler_likelihood import sampler_likelihood

WITH_STEPS = [
    (name, steps)
    for name in BY_CERTAINTY
    if "num_steps" in STRATEGIES[name].option_names()
    for steps in (1, 2, 3)
]
ADAPTIVE = [
    (name, None) for name in BY_CERTAINTY if "num_steps" not in STRATEGIES[name].option_names()
]


def likelihood(toy, model, sampler, steps=None, texts=None, latents=None, **options):
    return sampler_likelihood(
        model,
        toy.texts if texts is None else texts,
        latents,
        diffusion=MaskedDiffusion(toy.MASK),
        sampler=sampler,
        options={} if steps is None else {"num_steps": steps},
        **options,
    )


@pytest.mark.parametrize(("sampler", "steps"), WITH_STEPS + ADAPTIVE)
@pytest.mark.parametrize("sharpness", [1.0, 0.5])
def test_the_probabilities_of_all_texts_add_up_to_one(toy, sampler, steps, sharpness):
    found = likelihood(toy, toy.Model(sharpness=sharpness), sampler, steps)
    assert np.exp(-found.nats).sum() == pytest.approx(1, abs=1e-5)
    assert (found.passes >= 1).all() and (found.passes <= min(steps or 3, 3)).all()


@pytest.mark.parametrize("sampler", [name for name, steps in WITH_STEPS if steps == 3])
def test_one_token_a_pass_of_an_exact_model_has_the_exact_law(toy, sampler):
    found = likelihood(toy, toy.Model(), sampler, 3)
    assert found.nats == pytest.approx(-np.log(toy.law), abs=1e-4)
    assert (found.passes == 3).all()
    fewer = likelihood(toy, toy.Model(), sampler, 1)
    # The divergence of the product of marginals.
    assert toy.law @ (fewer.nats + np.log(toy.law)) > 0.1


@pytest.mark.parametrize(("sampler", "steps"), WITH_STEPS + ADAPTIVE)
def test_without_context_every_order_gives_the_product_of_the_marginals(toy, sampler, steps):
    model = toy.Model(context_free=True)
    marginals = model.log_probabilities(torch.full((1, toy.LENGTH), toy.MASK))[0]
    expected = [-float(marginals[range(3), text].sum()) for text in toy.texts]
    assert likelihood(toy, model, sampler, steps).nats == pytest.approx(expected, rel=1e-5)


def test_a_random_order_bounds_the_likelihood_on_average(toy):
    """Over orders, -log p given the order is at least -log p, and the exact model's p is the law
    if all draw alone.
    """
    model, texts = toy.Model(), toy.texts * 10
    few, many = (
        likelihood(toy, model, "ancestral", steps, texts).nats.reshape(10, 27)
        for steps in (2, 10_000)
    )
    assert many[0] == pytest.approx(-np.log(toy.law), abs=1e-4)
    assert (
        toy.law @ few.mean(0)
        > toy.law @ -np.log(np.exp(-few).mean(0))
        > toy.law @ -np.log(toy.law)
    )


@pytest.mark.parametrize("sampler", BY_CERTAINTY)
def test_the_batch_changes_nothing(make, sampler):
    texts = [list(range(4, 4 + size)) for size in (1, 9, 4, 0, 7, 12)]
    latents = torch.randn(6, make.DIM, generator=torch.Generator().manual_seed(1))
    options = {"diffusion": MaskedDiffusion(make.MASK), "sampler": sampler}
    big, small = (
        sampler_likelihood(make.model(), texts, latents, batch_tokens=size, **options)
        for size in (10_000, 1)
    )
    assert big.nats == pytest.approx(small.nats, rel=1e-4) and (big.passes == small.passes).all()
    assert big.nats[3] == 0 and big.passes[3] == 0  # a text without words


def test_nan_logits_are_an_error(toy):
    with pytest.raises(MmldlmError, match="NaN"):
        likelihood(toy, toy.Model(sharpness=float("nan")), "confidence", 2)
