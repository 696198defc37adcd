"""Schedules: sums, optimality by enumeration, and the Kullback-Leibler divergence that they cost
an exact model.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from studies.information.curve import InformationCurve
from studies.information.schedule import even_schedule, optimal_schedules, schedule_cost


def compositions(total: int, parts: int):
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield [after - before for before, after in itertools.pairwise((0, *cuts, total))]


def perfect_curve(toy) -> np.ndarray:
    """c(j) of the exact model, averaged over all texts and all sets of known positions."""
    model = toy.Model()
    sums, counts = np.zeros(toy.LENGTH), np.zeros(toy.LENGTH)
    for known in itertools.product((False, True), repeat=toy.LENGTH):
        if all(known):
            continue
        mask = torch.tensor(known)
        log_p = model.log_probabilities(torch.where(mask, model.texts, toy.MASK))
        own = log_p.gather(2, model.texts[..., None])[..., 0][:, ~mask].mean(1)
        sums[sum(known)] -= float(own @ model.law)
        counts[sum(known)] += 1
    return sums / counts


@pytest.mark.parametrize("length", [1, 2, 7, 20])
def test_schedules_fill_every_position_once(length, toy):
    curve = np.sort(np.random.default_rng(length).gamma(2.0, size=length))[::-1]
    for passes in (1, 2, 3, 7, 40):
        even = even_schedule(length, passes)
        assert (
            sum(even) == length and len(even) == min(passes, length) and max(even) - min(even) <= 1
        )
    for passes, counts in optimal_schedules(curve, 40).items():
        assert sum(counts) == length and len(counts) == passes and min(counts) >= 1
    assert len(optimal_schedules(curve, 40)) == min(length, 40)


def test_the_optimal_schedule_is_the_best_of_all():
    for seed in range(5):
        curve = np.sort(np.random.default_rng(seed).gamma(1.0, size=9))[::-1]
        for passes, counts in optimal_schedules(curve, 9).items():
            best = min(schedule_cost(curve, other) for other in compositions(9, passes))
            assert schedule_cost(curve, counts) == pytest.approx(best, abs=1e-12)


def test_optimal_is_at_most_even_which_is_at_most_one_pass(toy):
    curve = InformationCurve(toy.curves())
    for length in (2, 5, 15, 30):
        c = curve.fitted(length)
        costs = [schedule_cost(c, counts) for counts in optimal_schedules(c, length).values()]
        assert costs[0] == pytest.approx(length * c[0]) and costs[-1] == pytest.approx(c.sum())
        assert all(after <= before + 1e-12 for before, after in itertools.pairwise(costs))
        for passes, cost in enumerate(costs, 1):
            even = schedule_cost(c, even_schedule(length, passes))
            assert cost <= even + 1e-12 <= costs[0] + 2e-12


def test_a_curve_without_context_costs_the_same_under_every_schedule():
    for counts in compositions(6, 3):
        assert schedule_cost(np.full(6, 1.5), counts) == pytest.approx(9.0)


@pytest.mark.parametrize("counts", list(compositions(4, 2)) + [[4], [1, 1, 2], [1, 1, 1, 1]])
def test_the_excess_of_an_exact_model_is_the_divergence_of_the_sampled_law(toy, counts):
    """Of the law given the order of the positions, on average over orders; that of their mixture
    is smaller.
    """
    model, curve = toy.Model(), perfect_curve(toy)
    laws = []
    for order in itertools.permutations(range(toy.LENGTH)):
        known, total = (
            torch.zeros(toy.LENGTH, dtype=torch.bool),
            torch.zeros(27, dtype=torch.float64),
        )
        for filled in np.split(order, np.cumsum(counts)[:-1]):
            log_p = model.log_probabilities(torch.where(known, model.texts, toy.MASK))
            total += log_p.gather(2, model.texts[..., None])[:, filled, 0].sum(1)
            known[filled] = True
        laws.append(total)
    divergences = [float(model.law @ (model.law.log() - law)) for law in laws]
    mixture = torch.stack(laws).exp().mean(0)
    excess = schedule_cost(curve, counts) - curve.sum()
    # The entropy of the law.
    assert curve.sum() == pytest.approx(float(-(model.law @ model.law.log())), abs=1e-9)
    assert excess == pytest.approx(np.mean(divergences), abs=1e-9)
    assert float(model.law @ (model.law / mixture).log()) <= excess + 1e-9
