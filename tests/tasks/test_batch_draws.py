"""Normal numbers from keys: a distribution, and functions of the key alone."""

import math

import numpy as np
import pytest
import torch

from mmldlm.tasks.collation import dropout_keys, keyed_normals, noise_keys

KEYS = noise_keys(3, 0, np.arange(40), np.arange(40))


def test_they_are_standard_normal_and_independent():
    drawn = keyed_normals(KEYS, (25, 100)).double()
    assert drawn.shape == (40, 25, 100)
    values = drawn.flatten()
    count = len(values)  # 100,000
    for power, expected, spread in (
        (1, 0, 1),
        (2, 1, 2),
        (3, 0, 15),
        (4, 3, 96),
    ):
        # Variance of each power.
        assert abs(float((values**power).mean()) - expected) < 4.5 * math.sqrt(spread / count), (
            power
        )
    ranks = torch.special.ndtr(values.sort().values)
    distance = (ranks - torch.arange(1, count + 1).double() / count).abs().max()
    assert distance < 1.95 / math.sqrt(count)  # Kolmogorov-Smirnov at 0.1 %
    rows = drawn.flatten(1)
    half = rows.shape[1] // 2  # cosine and sine of one pair are this far apart
    for one, other in (
        (rows[:-1], rows[1:]),
        (rows[:, :-1], rows[:, 1:]),
        (rows[:, :half], rows[:, half:]),
    ):
        for f in (torch.clone, torch.square, torch.abs):
            pair = torch.stack([f(one).flatten(), f(other).flatten()])
            assert abs(float(pair.corrcoef()[0, 1])) < 4.5 / math.sqrt(pair.shape[1])


def test_a_samples_numbers_follow_from_its_key():
    whole = keyed_normals(KEYS, (7, 3))  # an odd number of them
    torch.testing.assert_close(keyed_normals(KEYS[5:8], (7, 3)), whole[5:8], rtol=0, atol=1e-6)
    torch.testing.assert_close(
        keyed_normals(KEYS.flip(0), (7, 3)).flip(0), whole, rtol=0, atol=1e-6
    )


def test_every_machine_and_release_draws_the_numbers_of_the_formula():
    def splitmix64(state):  # in Python's whole numbers
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            state = (state ^ state >> shift) * factor % 2**64
        return state

    for key in (0, -1, 1 << 40):
        drawn = []
        for i in (1, 2):
            bits = splitmix64((key + i * 0x9E3779B97F4A7C15) % 2**64)
            radius = math.sqrt(-2 * math.log(((bits & 0x7FFFFFFF) + 0.5) / 2**31))
            turn = 2 * math.pi * (bits >> 32) / 2**32
            drawn.append((radius * math.cos(turn), radius * math.sin(turn)))
        expected = torch.tensor(drawn).T.flatten()
        torch.testing.assert_close(
            keyed_normals(torch.tensor([key]), (4,))[0], expected, rtol=0, atol=5e-6
        )


@pytest.mark.parametrize("other", [(4, 0, 0, 0), (3, 1, 0, 0), (3, 0, 1, 0), (3, 0, 0, 1)])
def test_keys_depend_on_seed_epoch_sample_and_slot(other):
    seed, epoch, sample, slot = other
    first, ids, slots = (
        noise_keys(3, 0, np.array([0]), np.array([0])),
        np.array([sample]),
        np.array([slot]),
    )
    assert (
        noise_keys(seed, epoch, ids, slots) != first
        and dropout_keys(3, 0, np.array([0]), np.array([0])) != first
    )
