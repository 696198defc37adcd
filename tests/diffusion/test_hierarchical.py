"""HDLM: levels, NELBO, gradients, exact posterior, and its limits."""

import pytest
import torch

from mmldlm.diffusion.hdlm import HierarchicalProcess
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

MASK, EOS = 3, 0
# EOS alone, [MASK], and two clusters of two and three words.
CLUSTERS = torch.tensor([-1, 0, 1, -1, 0, 1, 1])
V = len(CLUSTERS)
GAMMAS = [1.0, 1.5, 2.0, 3.0]
T = torch.tensor([1e-4, 1e-2, 0.3, 0.5, 0.9, 1 - 1e-4], dtype=torch.float64)


def transition(process, t, s=None):
    """q(z_t | x) or q(z_t | z_s) over all states [V + n, V + n], from the levels alone: at t by
    hazards from s.
    """
    size = process.vocab_size + process.num_clusters
    ratio = (1 - t) if s is None else (1 - t) / (1 - s)
    word, cluster, mask = process.levels(1 - ratio)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for x in range(process.vocab_size):
        if x != process.mask_token_id:
            matrix[x, x] += word
            matrix[x, process._state[x]] += cluster
            matrix[x, process.mask_token_id] += mask
    for c in range(process.vocab_size, size):
        matrix[c, c], matrix[c, process.mask_token_id] = ratio, 1 - ratio
    for alone in torch.nonzero(process._state < process.vocab_size)[
        :, 0
    ]:  # its state stands for a cluster as well
        if alone != process.mask_token_id and s is not None:
            matrix[alone] = 0.0
    matrix[process.mask_token_id, process.mask_token_id] = 1.0
    return matrix


def random_logits(rows, seed=0, size=V, mask=MASK):
    logits = 2 * torch.randn(
        rows, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    logits[:, mask] = float("-inf")
    return logits


def nelbo(process, logits, t, weight):
    """Expected cost [V] of every token for a denoiser that answers logits [1, V] to everything."""
    states = torch.arange(process.vocab_size + process.num_clusters)
    costs = torch.zeros(process.vocab_size, dtype=torch.float64)
    for time, dt in zip(t, weight, strict=True):
        q = transition(process, time)
        for x in range(process.vocab_size):
            if x == process.mask_token_id:
                continue
            scored = (q[x] > 0) & (states != x)
            z = states[scored]
            d, _ = process.divergence(torch.full_like(z, x), z).score(
                logits.expand(len(z), -1), slice(None), False
            )
            costs[x] += (
                q[x, scored] * process.elbo_weights(torch.tensor(x), z, time) * d
            ).sum() * dt
    return costs


@pytest.mark.parametrize("gamma", GAMMAS)
def test_levels_derivatives_and_weights(gamma):
    process = HierarchicalProcess(CLUSTERS, MASK, gamma)
    levels = process.levels(T)
    torch.testing.assert_close(sum(levels), torch.ones_like(T))
    h = 1e-6 * torch.minimum(T, 1 - T)
    up, down = process.levels(T + h), process.levels(T - h)
    torch.testing.assert_close(
        process.word_outflow(T), (down.word - up.word) / (2 * h), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(
        process.mask_inflow(T), (up.mask - down.mask) / (2 * h), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(process.mask_inflow(T), levels.cluster / (1 - T))
    x = torch.tensor(1)
    weights = process.elbo_weights(x, torch.tensor([[MASK], [V], [1]]), T)
    expected = (
        process.mask_inflow(T) / levels.mask,
        process.word_outflow(T) / levels.cluster,
        torch.zeros_like(T),
    )
    torch.testing.assert_close(weights, torch.stack(expected))
    t, dt = quadrature()
    levels = process.levels(t)
    for token, level in ((MASK, levels.mask), (V, levels.cluster)):
        whole = (process.elbo_weights(x, torch.tensor(token), t) * level * dt).sum()
        assert abs(float(whole) - 1) < 1e-5
    ends = process.levels(torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(
        torch.stack(ends), torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]).double()
    )


@pytest.mark.parametrize("gamma", [1.0, 2.0])
def test_a_context_free_denoiser_costs_its_cross_entropy_and_a_perfect_one_nothing(gamma):
    process, logits = HierarchicalProcess(CLUSTERS, MASK, gamma), random_logits(1)
    words = torch.arange(V) != MASK
    costs = nelbo(process, logits, *quadrature(80))
    torch.testing.assert_close(
        costs[words], -logits[0].log_softmax(0)[words], rtol=1e-5, atol=1e-5
    )
    x = torch.tensor([1, 4, 5])
    perfect = torch.full((3, V), -1e4).double().scatter(1, x[:, None], 0.0)
    for z in (torch.full_like(x, MASK), process._state[x]):
        assert not process.divergence(x, z).score(perfect, slice(None), False)[0].any()


@pytest.mark.parametrize("clusters", [[0] * 6, list(range(6))])
def test_one_cluster_and_a_cluster_a_word_are_masked_diffusion(clusters):
    """One cluster: only the step from the cluster to the word is scored, with 1[z != word]
    (-alpha' / (1 - alpha)) in expectation. A cluster a word: only the step from [MASK], with m' /
    m = -a' / (1 - a) where a = 1 - m."""
    process = HierarchicalProcess(torch.tensor([*clusters, -1]), 6)
    x = torch.tensor([2, 4])
    logits = random_logits(2, size=7, mask=6)
    nll = -logits.log_softmax(-1).gather(1, x[:, None])[:, 0]
    at_mask = process.divergence(x, torch.full_like(x, 6)).score(logits, slice(None), False)[0]
    at_cluster = process.divergence(x, process._state[x]).score(logits, slice(None), False)[0]
    t = T[1:5]
    levels = process.levels(t)
    masked = process.elbo_weights(x[:1], torch.tensor([6]), t) * levels.mask
    clustered = process.elbo_weights(x[:1], torch.tensor([7]), t) * levels.cluster
    zeros = torch.zeros(2, dtype=torch.float64)
    if clusters[-1] == 0:
        torch.testing.assert_close(at_mask, zeros)
        torch.testing.assert_close(at_cluster, nll)
        # MDLM: P(z = [MASK]) alpha' / (1 - alpha).
        torch.testing.assert_close(clustered, process.word_outflow(t))
    else:
        torch.testing.assert_close(at_cluster, zeros)
        torch.testing.assert_close(at_mask, nll)
        torch.testing.assert_close(masked, process.mask_inflow(t))


def test_gradient_is_that_of_autograd_and_finite_in_low_precision():
    process = HierarchicalProcess(CLUSTERS, MASK)
    x = torch.tensor([1, 4, 5, 6, EOS, 2]).repeat(2)
    z = torch.cat([torch.full((6,), MASK), process._state[x[:6]]])
    logits = random_logits(12).requires_grad_()
    found, grad = process.divergence(x, z).score(logits.detach(), slice(None), True)
    p = logits.softmax(-1)
    inside = (p * (process._group == process._group[x][:, None])).sum(-1)
    whole = torch.where(z == MASK, torch.ones(()).double(), inside)
    part = torch.where(z == MASK, inside, p.gather(1, x[:, None])[:, 0])
    expected = whole.log() - part.log()
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(
        grad, torch.autograd.grad(expected.sum(), logits)[0], rtol=1e-7, atol=1e-12
    )
    half = process.divergence(x, z).score(logits.detach()[5:9], slice(5, 9), True)
    torch.testing.assert_close(half[1], grad[5:9])
    ends = torch.tensor([1e-4, 1 - 1e-4]).double()[:, None]
    far = (40 * logits.detach()).bfloat16().float()
    weights = process.elbo_weights(x, z, ends).float()
    low, slope = process.divergence(x, z).score(far, slice(None), True)
    assert torch.isfinite(weights * low).all() and torch.isfinite(weights[..., None] * slope).all()


@pytest.mark.parametrize("gamma", [1.0, 1.5])
def test_corrupt_draws_the_levels(gamma):
    process = HierarchicalProcess(CLUSTERS, MASK, gamma)
    size = 100_000
    tokens = torch.tensor([[5] * size, [EOS] * size])
    t = torch.tensor([0.7, 0.7])
    uniform = torch.rand(2, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    real = torch.ones(2, size, dtype=torch.bool)
    real[:, :100] = False
    noised, scored = process.corrupt(tokens, t, uniform, real)
    assert torch.equal(noised[:, :100], tokens[:, :100]) and not scored[:, :100].any()
    assert torch.equal(scored, process.elbo_weights(tokens, noised, t[:, None]) > 0)
    for row, states in ((0, [5, V + 1, MASK]), (1, [EOS, MASK])):
        law = torch.stack(process.levels(t[0]))
        law = law if row == 0 else torch.stack([law[0] + law[1], law[2]])
        counts = torch.stack([(noised[row, 100:] == state).sum() for state in states]).double()
        assert counts.sum() == size - 100 and abs(chi_square_deviation(counts, law)) < 4


@pytest.mark.parametrize("gamma", [1.0, 1.5, 3.0])
def test_posterior_sums_to_one_composes_and_is_what_reverse_draws(gamma):
    process = HierarchicalProcess(torch.tensor([0, 0, 1, -1, 0, 1, 1]), MASK, gamma)
    x_hat = random_logits(1)[0].softmax(0)

    def posterior(t, s):
        forward = transition(process, t, s)
        before = x_hat @ transition(process, s)[:V]
        after = x_hat @ transition(process, t)[:V]
        return (forward * before[:, None] / after).T.nan_to_num(0.0), after  # [z_t, z_s]

    t, middle, s = (torch.tensor(value, dtype=torch.float64) for value in (0.9, 0.7, 0.3))
    whole, law = posterior(t, s)
    torch.testing.assert_close(whole.sum(1), (law > 0).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        posterior(t, middle)[0] @ posterior(middle, s)[0], whole, rtol=1e-10, atol=1e-12
    )
    generator, size = torch.Generator().manual_seed(2), 40_000
    for z in (MASK, V + 1, 5):
        for start, end in ((t, s), (t, torch.zeros_like(t)), (torch.ones_like(t), s)):
            if z != MASK and start == 1:
                continue
            tokens = torch.full((1, size), z)
            uniform = torch.rand(2, 1, size, dtype=torch.float64, generator=generator)
            logits = process.possible_words(tokens, x_hat.log().expand(1, size, V))
            drawn = process.reverse(tokens, logits, start[None], end[None], uniform)
            row = posterior(start, end)[0][z]
            seen, counts = row > 1e-12, torch.bincount(drawn[0], minlength=V + 2).double()
            assert (
                not counts[~seen].any() and abs(chi_square_deviation(counts[seen], row[seen])) < 4
            )
            if end == 0:
                assert (drawn < V).all() and not (drawn == MASK).any()


@pytest.mark.parametrize("clusters, steps", [([0, 0, -1, -1], 60), ([0, 1, 1, -1], 200)])
def test_an_exact_denoiser_reaches_the_entropy_and_its_samples_follow_the_law(clusters, steps):
    process, (texts, law) = HierarchicalProcess(torch.tensor(clusters), WORDS), toy_law()
    base = WORDS + 1 + process.num_clusters
    states = all_states(base)

    def words_to_states(t):
        return transition(process, t)[:WORDS]

    def score(x, z, t, logits):
        scored = z != x
        d, _ = process.divergence(x[scored], z[scored]).score(logits[scored], slice(None), False)
        cost = torch.zeros(len(x), dtype=torch.float64)
        cost[scored] = process.elbo_weights(x, z, t)[scored] * d
        return cost

    best, flatter = expected_nelbo(score, words_to_states, texts, law, states, WORDS + 1)
    entropy = float(-(law * law.log()).sum())
    assert abs(best - entropy) < 1e-4 and flatter > entropy + 0.05

    def denoiser(q):
        return exact_denoiser(q, texts, law, states, WORDS + 1)

    def reverse(tokens, logits, *more):
        return process.reverse(tokens, process.possible_words(tokens, logits), *more)

    tokens = sample_toy(reverse, words_to_states, WORDS, base, denoiser, steps, size=4000)
    assert tokens.max() < WORDS
    counts = torch.bincount(index_of(tokens, WORDS), minlength=len(law)).double()
    assert abs(chi_square_deviation(counts, law)) < 4


def test_four_steps_are_exact_for_one_position_where_a_first_order_step_is_not():
    process = HierarchicalProcess(torch.tensor([0, 0, 1, -1]), 3)
    law = torch.tensor([0.1, 0.3, 0.6, 0.0], dtype=torch.float64)
    generator, size = torch.Generator().manual_seed(5), 20_000
    tokens = torch.full((1, size), 3)
    grid = torch.linspace(1, 0, 5, dtype=torch.float64)
    for t, s in zip(grid[:-1], grid[1:], strict=True):
        uniform = torch.rand(2, 1, size, dtype=torch.float64, generator=generator)
        logits = process.possible_words(tokens, law.log().expand(1, size, 4))
        tokens = process.reverse(tokens, logits, t[None], s[None], uniform)
        found = torch.bincount(tokens[0], minlength=6).double()
        expected = law @ transition(process, s)[:4]
        seen = expected > 1e-12
        assert (
            not found[~seen].any() and abs(chi_square_deviation(found[seen], expected[seen])) < 4
        )
    at_t, at_s = process.levels(torch.tensor(0.9)), process.levels(torch.tensor(0.5))
    # No probability: what a first-order step would use.
    assert (at_s.word - at_t.word) / at_t.cluster > 1.7
