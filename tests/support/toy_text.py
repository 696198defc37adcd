"""Texts of three positions over three words, small enough to enumerate: exact denoisers, NELBOs
and laws.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

WORDS, LENGTH = 3, 3


def quadrature(count: int = 400) -> tuple[Tensor, Tensor]:
    """Points in (0, 1) and weights of an integral over it, dense at both ends (tanh-sinh);
    fp64.
    """
    y = torch.linspace(-3.0, 3.0, count, dtype=torch.float64)
    inner = torch.pi * torch.sinh(y)
    t = torch.sigmoid(inner)
    return t, t * torch.sigmoid(-inner) * torch.pi * torch.cosh(y) * (y[1] - y[0])


def toy_law(seed: int = 0) -> tuple[Tensor, Tensor]:
    """All texts [27, 3] int64 and their probabilities [27] fp64, with strong dependence between
    positions.
    """
    texts = torch.tensor(list(itertools.product(range(WORDS), repeat=LENGTH)))
    law = (
        2
        * torch.randn(
            len(texts), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
    ).softmax(0)
    return texts, law


def all_states(num_states: int) -> Tensor:
    """All states of a text. [num_states^3, 3] int64"""
    return torch.tensor(list(itertools.product(range(num_states), repeat=LENGTH)))


def exact_denoiser(
    likelihood: Tensor, texts: Tensor, law: Tensor, states: Tensor, vocab_size: int
) -> Tensor:
    """log p(x_i | z_j, j != i) of every state z.

    Both processes want the evidence of the other positions alone: the posterior of a step adds
    that of z_i by itself. (For masks and clusters z_i says nothing that the step does not know.)

    Args:
        likelihood: q(z_i | x_i) of a word and a state. [WORDS, states]
        texts, law: of `toy_law`.
        states: of `all_states`. [Z, 3]
        vocab_size: width of the result; tokens besides the words get -inf.

    Returns:
        [Z, 3, vocab_size] fp64.
    """
    evidence = torch.stack([likelihood[texts[:, i]][:, states[:, i]] for i in range(LENGTH)])
    result = torch.full((len(states), LENGTH, vocab_size), float("-inf"), dtype=torch.float64)
    for i in range(LENGTH):
        joint = law[:, None] * evidence[[j for j in range(LENGTH) if j != i]].prod(0)
        joint = joint / joint.sum(0).clamp_min(1e-300)
        for word in range(WORDS):
            result[:, i, word] = joint[texts[:, i] == word].sum(0).clamp_min(1e-300).log()
    return result


def expected_nelbo(
    score, transition, texts: Tensor, law: Tensor, states: Tensor, vocab_size: int
) -> tuple:
    """NELBO of a text in nats, averaged over the law, times and states, of the exact denoiser and
    of a flatter one.

    Args:
        score: (x [R], z [R], t, logits [R, vocab_size]) -> weight times divergence [R].
        transition: t -> q(z | x) of a word and a state. [WORDS, states of a position]
        texts, law, states, vocab_size: see `exact_denoiser`.
    """
    totals = [0.0, 0.0]
    for t, dt in zip(*quadrature(80), strict=True):
        q = transition(t)
        log_p = exact_denoiser(q, texts, law, states, vocab_size)
        mass = law[:, None] * torch.stack(
            [q[texts[:, i]][:, states[:, i]] for i in range(LENGTH)]
        ).prod(0)
        rows, columns = torch.nonzero(mass, as_tuple=True)
        for i in range(LENGTH):
            for kind, scale in enumerate((1.0, 0.5)):
                cost = score(texts[rows, i], states[columns, i], t, scale * log_p[columns, i])
                totals[kind] += float((mass[rows, columns] * cost).sum() * dt)
    return tuple(totals)


def sample_toy(
    reverse, transition, mask: int, base: int, denoiser, steps: int, size: int, seed: int = 3
) -> Tensor:
    """Texts [size, 3] by `steps` steps back from all-[MASK], on a grid that is finer near 1 and 0.

    Args:
        reverse: of the process.
        transition: t -> q(z | x). [WORDS, states of a position]
        mask: state of [MASK].
        base: number of states of a position.
        denoiser: q(z | x) -> log probabilities of every state. [base^3, 3, V]
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.full((size, LENGTH), mask)
    grid = torch.sin(0.5 * torch.pi * torch.linspace(1, 0, steps + 1, dtype=torch.float64)) ** 2
    for t, s in zip(grid[:-1], grid[1:], strict=True):
        logits = denoiser(transition(t))[index_of(tokens, base)]
        uniform = torch.rand(2, size, LENGTH, dtype=torch.float64, generator=generator)
        tokens = reverse(tokens, logits, t.expand(size), s.expand(size), uniform)
    return tokens


def chi_square_deviation(counts: Tensor, law: Tensor) -> float:
    """Pearson's statistic minus its mean, in standard deviations; 0 if there is one cell.

    Cells of an expectation below 5 count as one.
    """
    rare = law * counts.sum() < 5
    if rare.sum() > 1:
        law, counts = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (law, counts))
    expected = law * counts.sum()
    statistic = ((counts - expected).square() / expected).sum()
    freedom = len(law) - 1
    if freedom == 0:
        return 0.0
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


def index_of(tokens: Tensor, base: int) -> Tensor:
    """Number of a text or state [..., 3] among all, in the order of itertools.product."""
    return (tokens * torch.tensor([base**2, base, 1])).sum(-1)
