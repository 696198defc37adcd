"""Poolings against their definitions on one unpadded text."""

from __future__ import annotations

import pytest
import torch

from mmldlm.data.encoders.encoder import pool

REFERENCE = {
    "mean": lambda states: states.mean(0),
    "cls": lambda states: states[0],
    "last": lambda states: states[-1],
    "max": lambda states: states.amax(0),
    "mean_sqrt_len": lambda states: states.sum(0) / len(states) ** 0.5,
}


@pytest.mark.parametrize("num_prompt_tokens", [0, 2])
@pytest.mark.parametrize("pooling", [*REFERENCE, "weightedmean", "max+mean"])
def test_padding_and_prompt_are_left_out(pooling, num_prompt_tokens):
    lengths = (7, 4, 3)
    torch.manual_seed(0)
    hidden = torch.randn(3, 7, 5)
    mask = (torch.arange(7) < torch.tensor(lengths)[:, None]).long()
    found = pool(hidden, mask, pooling, num_prompt_tokens)
    for row, length in enumerate(lengths):
        states = hidden[row, num_prompt_tokens:length]
        weight = torch.arange(1, length + 1)[num_prompt_tokens:, None]
        if pooling == "weightedmean":  # positions count from the beginning of the prompt
            expected = (states * weight).sum(0) / weight.sum()
        else:
            expected = torch.cat([REFERENCE[kind](states) for kind in pooling.split("+")])
        torch.testing.assert_close(found[row], expected)


@pytest.mark.parametrize("pooling", ["mean", "last", "max", "weightedmean"])
def test_a_text_of_the_prompt_alone_has_no_usable_vector(pooling):
    found = pool(torch.randn(1, 3, 4), torch.ones(1, 3, dtype=torch.long), pooling, 3)
    assert not found.isfinite().all() or not found.any()
