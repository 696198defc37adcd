"""Order by certainty, ties, and what waits for a surer position."""

from __future__ import annotations

import pytest
import torch

from mmldlm.diffusion import MaskedDiffusion
from mmldlm.sampling.text import sample_text


def orders(toys, model, sampler, lengths, temperature=None, **options):
    """Positions of each pass, and of each text in it."""
    spy = toys.Spy()
    found = sample_text(
        model,
        None,
        num_samples=len(lengths),
        lengths=torch.tensor(lengths),
        diffusion=MaskedDiffusion(0),
        sampler=sampler,
        sampler_options=options,
        temperature=temperature,
        recorder=spy,
    )
    passes = [
        {
            one.samples[row]: one.positions[one.rows == row].tolist()
            for row in one.rows.unique().tolist()
        }
        for one in spy.seen
    ]
    return passes, found


def fixed(toys, table):
    """A toy whose probabilities of tokens 3, 4, 5 at each place are given."""

    class Fixed(toys.Toy):
        def logits(self, tokens, latents, t, real):
            out = torch.full((*tokens.shape, 8), -1e9)
            out[:, : len(table), 3:6] = torch.tensor(table).log()
            return out

    return Fixed()


def test_the_largest_probability_is_filled_first(toys):
    table = [[0.50, 0.0, 0.50], [0.46, 0.27, 0.27], [0.52, 0.48, 0.0], [0.44, 0.24, 0.32]]
    passes, _ = orders(toys, fixed(toys, table), "confidence", [5], num_steps=4)
    assert [one[0] for one in passes] == [[2], [0], [1], [3]]


def test_equally_sure_positions_are_filled_from_the_left(toys):
    for sampler, options in (("confidence", {}), ("threshold", {"threshold": 1.01})):
        passes, _ = orders(toys, fixed(toys, [[0.6, 0.3, 0.1]] * 5), sampler, [6], **options)
        assert [one[0] for one in passes] == [[0], [1], [2], [3], [4]]


def test_more_is_chosen_the_less_certainty_is_asked_for(toys):
    """From one position at a time to all at once."""
    largest = [0.95, 0.6, 0.8, 0.45, 0.92, 0.55, 0.4, 0.75, 0.65, 0.48, 0.85]
    table = [[p, 0.6 - 0.6 * p, 0.4 - 0.4 * p] for p in largest]
    chosen = []
    for threshold in (1.01, 0.9, 0.7, 0.5, 0.0):
        passes, _ = orders(toys, fixed(toys, table), "threshold", [12], threshold=threshold)
        chosen.append(set(passes[0][0]))
        if threshold < 1:
            assert chosen[-1] == {i for i, p in enumerate(largest) if p >= threshold}
    assert len(chosen[0]) == 1 and len(chosen[-1]) == 11
    for fewer, more in zip(chosen, chosen[1:]):
        assert fewer < more


@pytest.mark.parametrize(
    "sampler, options", [("threshold", {"threshold": 0.0}), ("confidence", {"num_steps": 2})]
)
def test_spacing_keeps_neighbours_apart_and_ends(toys, sampler, options):
    """Distance: spacing x the masked share, rounded up; the surer of two near ones stays."""
    passes, found = orders(
        toys, toys.Noisy(max_seq_len=12), sampler, [12, 7, 2], spacing=3, **options
    )
    left = [11, 6, 1]
    for number, one in enumerate(passes):
        for row, positions in one.items():
            share = (left[row] + (number == 0)) / [12, 7, 2][
                row
            ]  # the EOS is masked in the first pass
            need = -(-3 * share // 1)
            assert all(b - a >= need for a, b in zip(positions, positions[1:]))
            left[row] -= len(positions)
    assert left == [0, 0, 0] and 2 < int(found.passes[0]) <= 11
    plain, _ = orders(toys, toys.Noisy(max_seq_len=12), sampler, [12, 7, 2], **options)
    assert len(plain) < len(passes)


def test_spacing_keeps_the_surest_of_those_that_are_near(toys):
    table = [[p, 1 - p - 0.01, 0.01] for p in (0.6, 0.8, 0.7, 0.65, 0.9)]
    passes, _ = orders(toys, fixed(toys, table), "threshold", [6], threshold=0.0, spacing=2)
    assert passes[0][0] == [1, 4]  # 4 is the surest and excludes 3; 1 is next and excludes 0 and 2


@pytest.mark.parametrize(
    "sampler, options", [("threshold", {"threshold": 0.0}), ("confidence", {"num_steps": 2})]
)
def test_distinct_fills_no_token_twice_in_a_pass_and_ends(toys, sampler, options):
    lengths = [12, 7, 2, 1]
    passes, found = orders(
        toys, toys.Noisy(max_seq_len=12), sampler, lengths, distinct=True, **options
    )
    for one in passes:
        for row, positions in one.items():
            tokens = [found.tokens[row][position] for position in positions]
            assert len(set(tokens)) == len(tokens)
    assert [len(text) for text in found.tokens] == [11, 6, 1, 0]
    plain, repeated = orders(toys, toys.Noisy(max_seq_len=12), sampler, lengths, **options)
    assert len(plain) < len(passes)
    first = [repeated.tokens[0][position] for position in plain[0][0]]
    assert len(set(first)) < len(first)


def test_distinct_compares_the_tokens_that_are_drawn(toys):
    """The most probable ones differ at every position."""
    model = fixed(toys, [[0.4, 0.3, 0.3], [0.3, 0.4, 0.3], [0.3, 0.3, 0.4]])
    passes, found = orders(
        toys, model, "threshold", [4] * 20, temperature=1.0, threshold=0.0, distinct=True
    )
    assert 1 < len(passes) <= 3
    for one in passes:
        for row, positions in one.items():
            tokens = [found.tokens[row][position] for position in positions]
            assert len(set(tokens)) == len(tokens)


def test_distinct_keeps_the_surest_of_those_with_one_token(toys):
    table = [
        [0.6, 0.3, 0.1],
        [0.1, 0.7, 0.2],
        [0.9, 0.05, 0.05],
        [0.2, 0.75, 0.05],
        [0.8, 0.1, 0.1],
    ]
    passes, _ = orders(toys, fixed(toys, table), "threshold", [6], threshold=0.0, distinct=True)
    assert [one[0] for one in passes] == [[2, 3], [1, 4], [0]]
    both, _ = orders(
        toys, fixed(toys, table), "threshold", [6], threshold=0.0, distinct=True, spacing=2
    )
    assert both[0][0] == [2]  # 3 is a neighbor, 4 has the same token


def test_one_token_a_pass_is_distinct_already(toys):
    model, given = toys.Noisy(max_seq_len=12), {"num_steps": 12}
    (plain, texts), (passes, same) = (
        orders(toys, model, "confidence", [12, 7, 2], distinct=is_distinct, **given)
        for is_distinct in (False, True)
    )
    assert passes == plain and same.tokens == texts.tokens
