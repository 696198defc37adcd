"""GIDD: schedule, NELBO, gradients, posterior, and its limits."""

import math

import pytest
import torch

from mmldlm.diffusion.gidd import GiddProcess, self_correct
from mmldlm.tasks.baselines.divergence import training_weights
from tests.support.toy_text import (
    WORDS,
    all_states,
    chi_square_deviation,
    exact_denoiser,
    expected_nelbo,
    index_of,
    quadrature,
    sample_toy,
    toy_law,
)  # fmt: skip

V, MASK = 9, 4
SHARES = [0.0, 0.1, 0.5]
T = torch.tensor([1e-4, 1e-3, 0.03, 0.3, 0.5, 0.77, 0.99, 1 - 1e-4], dtype=torch.float64)


def transition(process, t, s=None):
    """q(z_t | x) [V, V], or q(z_t | z_s)."""
    shares = process.marginals(t)
    alpha, noise = shares.alpha, noise_vector(process, shares)
    if s is not None:
        before = process.marginals(s)
        alpha = alpha / before.alpha
        noise = noise - alpha * noise_vector(process, before)
    size = process.vocab_size
    return alpha * torch.eye(size, dtype=torch.float64) + noise.expand(size, size)


def noise_vector(process, shares):
    noise = torch.full(
        (process.vocab_size,),
        float(shares.uniform / process.num_noise_tokens),
        dtype=torch.float64,
    )
    noise[process.mask_token_id] = shares.mask
    return noise


def exact(terms):
    """The divergence's shares in fp64, so that tests see its formulas and not the rounding."""
    return terms._replace(alpha=terms.alpha.double(), log_rho=terms.log_rho.double())


def random_logits(rows, vocab_size=V, mask=MASK, seed=0, scale=2.0):
    logits = scale * torch.randn(
        rows, vocab_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    logits[:, mask] = float("-inf")
    return logits


def pairs(process, t):
    """Every (x, z) with x not [MASK] at every t: tokens, noised, times, q(z | x), each [rows]."""
    x = torch.tensor([v for v in range(process.vocab_size) if v != process.mask_token_id])
    grid = torch.cartesian_prod(x, torch.arange(process.vocab_size), torch.arange(len(t)))
    q = torch.stack([transition(process, one) for one in t])
    return grid[:, 0], grid[:, 1], t[grid[:, 2]], q[grid[:, 2], grid[:, 0], grid[:, 1]]


def divergence_in_fp64(process, tokens, noised, t, logits):
    """d by its definition, over whole distributions."""
    found = []
    for x, z, time, row in zip(tokens, noised, t, logits, strict=True):
        shares = process.marginals(time)
        noise = noise_vector(process, shares)
        p = shares.alpha * row.softmax(0) + noise
        q = noise.clone()
        q[x] += shares.alpha
        seen = q > 0
        kl = (q[seen] * (q[seen] / p[seen]).log()).sum()
        ratio = q[z] / p[z]
        found.append(kl + ratio - ratio.log() - 1)
    return torch.stack(found)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("share", SHARES)
def test_schedule_weights_and_their_mean(share, gamma):
    process = GiddProcess(V, MASK, share, gamma)
    assert math.isclose(float(process.marginals(torch.tensor(0.5)).uniform), share, abs_tol=1e-12)
    for t in T:
        q, h = transition(process, t), 1e-6 * float(min(t, 1 - t))
        torch.testing.assert_close(q.sum(1), torch.ones(V, dtype=torch.float64))
        alpha = [process.marginals(t + step).alpha for step in (h, 0.0, -h)]
        decay = -(alpha[0] - alpha[2]) / (2 * h) / alpha[1]
        before, after = (noise_vector(process, process.marginals(t + step)) for step in (-h, h))
        inflow = (after - before) / (2 * h) + decay * noise_vector(process, process.marginals(t))
        for x in (0, 7):
            weights = process.elbo_weights(torch.tensor(x), torch.arange(V), t)
            seen = q[x] > 0
            torch.testing.assert_close(weights[seen], (inflow / q[x])[seen], rtol=1e-5, atol=1e-9)
            torch.testing.assert_close((q[x] * weights)[seen].sum(), decay, rtol=1e-6, atol=0)


@pytest.mark.parametrize("share", SHARES)
def test_divergence_and_gradient_are_those_of_the_definition(share):
    process = GiddProcess(V, MASK, share)
    tokens, noised, t, q = (values[::3] for values in pairs(process, T))
    tokens, noised, t = (values[q > 0] for values in (tokens, noised, t))
    logits = random_logits(len(tokens)).requires_grad_()
    expected = divergence_in_fp64(process, tokens, noised, t, logits)
    found, grad = exact(process.divergence(tokens, noised, t)).score(
        logits.detach(), slice(None), True
    )
    scored = process.elbo_weights(tokens, noised, t) > 0
    torch.testing.assert_close(found[scored], expected[scored].detach(), rtol=1e-5, atol=1e-7)
    (slope,) = torch.autograd.grad(expected[scored].sum(), logits)
    torch.testing.assert_close(grad[scored], slope[scored], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("share", SHARES)
def test_a_context_free_denoiser_costs_its_cross_entropy_and_a_perfect_one_nothing(share):
    process = GiddProcess(V, MASK, share)
    t, weight = quadrature()
    tokens, noised, times, q = pairs(process, t)
    logits = random_logits(1).expand(len(tokens), -1)
    perfect = torch.full_like(logits, -1e4).scatter(1, tokens[:, None], 0.0)
    for given in (logits, perfect):
        d, _ = exact(process.divergence(tokens, noised, times)).score(given, slice(None), False)
        cost = torch.where(q > 0, q * process.elbo_weights(tokens, noised, times) * d, 0.0)
        cost = cost * weight.repeat(len(tokens) // len(t))
        for x in range(V):
            if x != MASK:
                truth = -given[0].log_softmax(0)[x] if given is logits else torch.zeros(())
                # The ends left out.
                assert abs(float(cost[tokens == x].sum()) - float(truth)) < 2e-4


def test_without_uniform_noise_it_is_masked_diffusion():
    process = GiddProcess(V, MASK, 0.0)
    tokens, noised, t, q = pairs(process, T)
    masked = noised == MASK
    assert torch.equal(q > 0, masked | (noised == tokens))
    assert not process.elbo_weights(tokens, noised, t)[(noised == tokens)].any()
    logits = random_logits(int(masked.sum()))
    d, grad = process.divergence(tokens[masked], noised[masked], t[masked]).score(
        logits.float(), slice(None), True
    )
    nll = -logits.log_softmax(-1).gather(1, tokens[masked, None])[:, 0]
    weights = process.elbo_weights(tokens[masked], noised[masked], t[masked])
    torch.testing.assert_close(weights * d, nll / t[masked], rtol=2e-6, atol=1e-6)
    expected = logits.softmax(-1).scatter_add(
        1, tokens[masked, None], torch.full((len(logits), 1), -1.0).double()
    )
    torch.testing.assert_close(
        weights[:, None] * grad, expected / t[masked, None], rtol=1e-4, atol=1e-4 * 1e4
    )
    dynamic = training_weights(weights, t[masked], "dynamic", 2.0)
    torch.testing.assert_close(dynamic * d, 2 * (1 - t[masked]) * nll, rtol=2e-6, atol=1e-6)


def test_training_weights():
    process = GiddProcess(V, MASK, 0.2)
    t = T[2:6]
    weights = process.elbo_weights(
        torch.tensor(0)[None, None], torch.tensor([MASK, 1, 0])[None], t[:, None]
    )
    assert torch.equal(training_weights(weights, t[:, None], "elbo", 1.0), weights)
    clipped = training_weights(weights, t[:, None], "clip", 1.0)
    assert torch.equal(clipped, weights.clamp_max(1.0))
    dynamic = training_weights(weights, t[:, None], "dynamic", 2.0)
    rho = 0.5 / 8 * (t / (1 - t)).sqrt()  # B = 2 * 0.2 / 0.8
    expected = torch.stack([torch.full_like(t, 2.0), torch.ones_like(t), rho / (1 + rho)], 1)
    torch.testing.assert_close(dynamic, expected)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_finite_at_the_ends(share, dtype):
    process = GiddProcess(V, MASK, share)
    ends = torch.tensor([1e-4, 1 - 1e-4], dtype=torch.float64)
    tokens, noised, t, q = pairs(process, ends)
    tokens, noised, t = (values[q > 0] for values in (tokens, noised, t))
    weights = process.elbo_weights(tokens, noised, t).float()
    for scale in (0.0, 2.0, 60.0):  # 60: probabilities far below the smallest fp32
        logits = (
            random_logits(len(tokens), scale=scale or 1.0)
            .mul(bool(scale) or 0.0)
            .nan_to_num(float("-inf"))
        )
        d, grad = process.divergence(tokens, noised, t).score(
            logits.to(dtype).float(), slice(None), True
        )
        assert torch.isfinite(weights * d).all() and torch.isfinite(weights[:, None] * grad).all()
        assert (weights * d > -1e-2).all()


@pytest.mark.parametrize("share", SHARES)
def test_corrupt_draws_the_marginals(share):
    process = GiddProcess(V, MASK, share)
    x, size = 6, 200_000
    tokens, t = torch.full((1, size), x), torch.tensor([0.6])
    uniform = torch.rand(1, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    real = torch.ones(1, size, dtype=torch.bool)
    real[0, :100] = False
    noised, scored = process.corrupt(tokens, t, uniform, real)
    assert (noised[0, :100] == x).all() and not scored[0, :100].any()
    law = transition(process, t[0])[x]
    counts = torch.bincount(noised[0, 100:], minlength=V).double()
    assert not counts[law == 0].any()
    assert abs(chi_square_deviation(counts[law > 0], law[law > 0])) < 4
    weights = process.elbo_weights(tokens, noised, t[:, None])
    assert torch.equal(scored[0, 100:], weights[0, 100:] > 0)


@pytest.mark.parametrize("share", SHARES)
def test_posterior_sums_to_one_and_composes(share):
    """In closed form; then `reverse` is compared with it."""
    process = GiddProcess(V, MASK, share)
    x_hat = random_logits(1)[0].softmax(0)

    def posterior(t, s):
        forward = transition(process, t, s)  # [z_s, z_t]
        assert forward.min() > -1e-15
        before, after = x_hat @ transition(process, s), x_hat @ transition(process, t)
        # [z_t, z_s].
        return torch.where(after > 0, forward * before[:, None] / after, 0.0).T, after

    t, middle, s = (torch.tensor(value, dtype=torch.float64) for value in (0.8, 0.5, 0.1))
    whole, law = posterior(t, s)
    torch.testing.assert_close(whole.sum(1), (law > 0).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        posterior(t, middle)[0] @ posterior(middle, s)[0], whole, rtol=1e-10, atol=1e-12
    )
    torch.testing.assert_close(law @ whole, x_hat @ transition(process, s))
    size, generator = 40_000, torch.Generator().manual_seed(2)
    for z in (MASK, 2):
        tokens = torch.full((1, size), z)
        uniform = torch.rand(2, 1, size, dtype=torch.float64, generator=generator)
        drawn = process.reverse(tokens, x_hat.log().expand(1, size, V), t[None], s[None], uniform)
        counts, row = torch.bincount(drawn[0], minlength=V).double(), whole[z]
        seen = row > 1e-12
        assert not counts[~seen].any() and abs(chi_square_deviation(counts[seen], row[seen])) < 4


@pytest.mark.parametrize("share, steps", [(0.0, 50), (0.5, 300)])
def test_an_exact_denoiser_reaches_the_entropy_and_its_samples_follow_the_law(share, steps):
    process, (texts, law), states = (
        GiddProcess(WORDS + 1, WORDS, share),
        toy_law(),
        all_states(WORDS + 1),
    )

    def words_to_states(t):
        return transition(process, t)[:WORDS]

    def score(x, z, t, logits):
        d, _ = exact(process.divergence(x, z, t.expand(len(x)))).score(logits, slice(None), False)
        return process.elbo_weights(x, z, t) * d

    best, flatter = expected_nelbo(score, words_to_states, texts, law, states, WORDS + 1)
    entropy = float(-(law * law.log()).sum())
    assert abs(best - entropy) < 1e-4 and flatter > entropy + 0.05

    def denoiser(q):
        return exact_denoiser(q, texts, law, states, WORDS + 1)

    tokens = sample_toy(
        process.reverse, words_to_states, WORDS, WORDS + 1, denoiser, steps, size=4000
    )
    assert tokens.max() < WORDS
    counts = torch.bincount(index_of(tokens, WORDS), minlength=len(law)).double()
    assert abs(chi_square_deviation(counts, law)) < 4


def test_self_correction_leaves_a_text_of_argmaxes_alone_and_corrects_the_worst_token():
    logits = random_logits(12, scale=1.0).view(2, 6, V)
    best = logits.argmax(-1)
    logits.scatter_(-1, best[..., None], 12.0)
    uniform = torch.rand(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    real = torch.ones(2, 6, dtype=torch.bool)
    tokens, changed, agreement = self_correct(best, logits, uniform, real)
    assert torch.equal(tokens, best) and not changed.any() and (agreement == 1).all()
    wrong = best.clone()
    wrong[0, 2] = (best[0, 2] + 1) % V
    tokens, changed, agreement = self_correct(wrong, logits, uniform, real)
    assert (
        torch.equal(tokens, best) and changed.tolist() == [True, False] and agreement[0] == 5 / 6
    )
    real[0, 2] = False
    assert torch.equal(self_correct(wrong, logits, uniform, real)[0], wrong)
