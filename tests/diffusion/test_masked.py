"""Masked diffusion: NELBO weights, marginals and counted masks."""

import math

import pytest
import torch

from mmldlm.diffusion.masked import SCHEDULES, MaskedDiffusion
from mmldlm.diffusion.timesteps import low_discrepancy, stretch

VOCABULARY, MASK, LENGTH = 50, 7, 64


def batch(size=4096, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY - 1, (size, LENGTH), generator=generator)
    tokens[tokens >= MASK] += 1  # data never holds [MASK]
    places = torch.randperm(size, generator=generator).numpy()
    t = stretch(torch.from_numpy(low_discrepancy(places, 0.37, size)), 1e-4)
    uniform = torch.rand(size, LENGTH, dtype=torch.float64, generator=generator)
    return tokens, t, uniform, torch.ones(size, LENGTH, dtype=torch.bool)


def nelbo_per_token(diffusion, nll_of, seed=0):
    """Estimate for a denoiser given by its NLL at (tokens, t)."""
    tokens, t, uniform, real = batch(seed=seed)
    noised, masked = diffusion.corrupt(tokens, t, uniform, real)
    assert torch.equal(noised[~masked], tokens[~masked]) and (noised[masked] == MASK).all()
    nll = nll_of(tokens, t) * masked
    return (diffusion.loss_weights(t)[:, None] * nll).sum(1) / LENGTH, t


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_uniform_denoiser_costs_log_v_minus_1_for_every_schedule(schedule):
    diffusion = MaskedDiffusion(MASK, schedule)
    truth = math.log(VOCABULARY - 1)
    cost, t = nelbo_per_token(
        diffusion, lambda tokens, t: torch.full(tokens.shape, truth).double()
    )
    assert abs(cost.mean() - truth) < 5 * cost.std() / math.sqrt(len(cost))
    if schedule == "loglinear":
        # w(t) * P(masked at t) is constant, so every stratum of t has the same mean.
        for low in (0.0, 0.25, 0.5, 0.75):
            part = cost[(t >= low) & (t < low + 0.25)]
            assert abs(part.mean() - truth) < 5 * part.std() / math.sqrt(len(part))


def test_perfect_denoiser_costs_nothing():
    cost, _ = nelbo_per_token(
        MaskedDiffusion(MASK), lambda tokens, t: torch.zeros(tokens.shape).double()
    )
    assert torch.equal(cost, torch.zeros_like(cost))


def test_context_free_denoiser_costs_its_cross_entropy_for_every_schedule():
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3)).double()
    logits[MASK] = float("-inf")
    log_p = logits.log_softmax(0)
    tokens = batch()[0]
    truth = -log_p[tokens].mean()
    for schedule in SCHEDULES:
        cost, _ = nelbo_per_token(
            MaskedDiffusion(MASK, schedule), lambda tokens, t: -log_p[tokens]
        )
        assert abs(cost.mean() - truth) < 6 * cost.std() / math.sqrt(len(cost))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weight_is_the_derivative_of_the_schedule(schedule):
    diffusion = MaskedDiffusion(MASK, schedule)
    t = torch.linspace(0.01, 0.99, 50).double()
    h = 1e-6
    slope = (diffusion.alpha(t + h) - diffusion.alpha(t - h)) / (2 * h)
    torch.testing.assert_close(
        diffusion.loss_weights(t), -slope / (1 - diffusion.alpha(t)), rtol=1e-6, atol=1e-8
    )


def test_loglinear_weight_is_exactly_one_over_t_for_any_eps():
    t = torch.linspace(0.001, 1, 97).double()
    for eps in (1e-3, 1e-4, 0.1):
        diffusion = MaskedDiffusion(MASK, "loglinear", eps)
        sigma = -torch.log(diffusion.alpha(t))
        d_sigma = (1 - eps) / diffusion.alpha(t)
        torch.testing.assert_close(
            diffusion.loss_weights(t), d_sigma / torch.expm1(sigma), rtol=1e-12, atol=0
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_marginals_are_consistent(schedule):
    """Masked at s = masked at t and still masked at s; q(z_s) follows from q(z_t) and the
    posterior.
    """
    diffusion = MaskedDiffusion(MASK, schedule)
    t, s = torch.tensor(0.7), torch.tensor(0.3)
    masked_t = 1 - diffusion.alpha(t)
    torch.testing.assert_close(masked_t * diffusion.stay_masked(t, s), 1 - diffusion.alpha(s))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_timestep_of_inverts_the_schedule(schedule):
    diffusion = MaskedDiffusion(MASK, schedule, eps=0.0)
    share = torch.linspace(0.01, 1, 40).double()
    torch.testing.assert_close(1 - diffusion.alpha(diffusion.timestep_of(share)), share)


def test_counted_masks_estimate_the_same_nelbo_with_less_variance():
    """For a denoiser whose NLL is the masked share."""
    tokens, t, uniform, real = batch(size=8192)
    _, masked, share = MaskedDiffusion.corrupt_count(tokens, t, uniform, real, MASK)
    assert torch.equal(masked.sum(1).double() / LENGTH, share) and share.min() >= 1 / LENGTH
    assert torch.equal(torch.bincount((share * LENGTH).long()) > 0, torch.arange(LENGTH + 1) > 0)
    counted = (masked * share[:, None] / share[:, None]).sum(1) / LENGTH
    independent, _ = nelbo_per_token(
        MaskedDiffusion(MASK, eps=0.0), lambda tokens, t: t[:, None].expand(tokens.shape)
    )
    # E over uniform k of (L / k) * k * (k / L) / L = E[k / L] = (L + 1) / 2L; independently E[t] =
    # 1 / 2
    assert abs(counted.mean() - (LENGTH + 1) / (2 * LENGTH)) < 5 * counted.std() / math.sqrt(
        len(counted)
    )
    assert abs(independent.mean() - 0.5) < 5 * independent.std() / math.sqrt(len(independent))
    truth = math.log(VOCABULARY - 1)
    flat = (masked / share[:, None]).sum(1) * truth / LENGTH
    # Zero variance where every token costs the same.
    torch.testing.assert_close(flat, torch.full_like(flat, truth))
    spread, _ = nelbo_per_token(
        MaskedDiffusion(MASK), lambda tokens, t: torch.full(tokens.shape, truth).double()
    )
    assert spread.std() > 0.2


def test_counted_masks_never_touch_padding():
    tokens, t, uniform, real = batch(size=64)
    real[:, 5:] = False
    noised, masked, share = MaskedDiffusion.corrupt_count(tokens, t, uniform, real, MASK)
    assert not masked[:, 5:].any() and torch.equal(noised[:, 5:], tokens[:, 5:])
    assert torch.equal(share * 5, masked.sum(1).double())


def test_unmask_counts_are_binomial():
    diffusion = MaskedDiffusion(MASK)
    generator = torch.Generator().manual_seed(0)
    steps, size = 8, 4000
    masked = torch.ones(size, LENGTH, dtype=torch.bool)
    times = torch.linspace(1, 0, steps + 1)
    for t, s in zip(times[:-1], times[1:], strict=True):
        stay = torch.rand(size, LENGTH, generator=generator) < diffusion.stay_masked(t, s)
        left = masked & stay
        freed = (masked & ~stay).sum(1).double()
        assert abs(freed.mean() - LENGTH / steps) < 5 * freed.std() / math.sqrt(size) + 2e-2
        masked = left
    assert not masked.any()
