"""Keyed dropout: rates, independence, and that a mask depends on nothing but its row's key."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmldlm.models.dropout import ATTENTION, MLP, RowDropout, mix
from mmldlm.utils.counter_rng import mix64


def dropout(samples=64, length=8, layers=2, rate=0.1, seed=0) -> RowDropout:
    keys = torch.from_numpy(np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, samples))
    sample = torch.arange(samples).repeat_interleave(length)
    return RowDropout.of_rows(keys, sample, torch.arange(length).repeat(samples), layers, rate)


def masks(found: RowDropout, width: int, place: int = ATTENTION) -> torch.Tensor:
    """[R, width] fp64 of ones where an element is dropped."""
    return (found.drop(torch.ones(found.keys.shape[1], width), place) == 0).double()


def test_the_finalizer_is_that_of_the_counter_rng():
    values = np.random.default_rng(0).integers(0, 2**64 - 1, 1000, dtype=np.uint64)
    found = mix(torch.from_numpy(values.view(np.int64))).numpy().view(np.uint64)
    assert np.array_equal(found, mix64(values))


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("width", [1, 6, 64])
def test_elements_are_dropped_at_the_rate_and_the_mean_stays(rate, width):
    found = dropout(samples=2000, rate=rate).of_layer(1)
    mask = masks(found, width)
    error = 4 * (rate * (1 - rate) / mask.numel()) ** 0.5
    assert abs(float(mask.mean()) - rate) < error + 1e-5
    kept = found.drop(torch.full(mask.shape, 3.0), ATTENTION)[mask == 0]
    assert (
        torch.equal(kept, torch.full_like(kept, float(kept[0])))
        and abs(float(kept[0]) * (1 - rate) - 3) < 3e-4
    )
    # In every row and every column: the largest deviations are those of independent draws.
    for sums, count in ((mask.sum(0), mask.shape[0]), (mask.sum(1), width)):
        if count * rate > 20:
            z = (sums - count * rate) / (count * rate * (1 - rate)) ** 0.5
            assert z.abs().max() < 5.5 and (len(z) < 50 or 0.8 < float(z.std()) < 1.2)


def test_rows_columns_layers_and_places_are_independent():
    """Correlations of 0/1 masks of 4,000 rows are within 5 standard errors of 0."""
    found, rate = dropout(samples=500, layers=3, rate=0.5), 0.5
    parts = [
        (masks(found.of_layer(layer), 32, place) - rate) / rate
        for layer in range(3)
        for place in (ATTENTION, MLP)
    ]
    for index, one in enumerate(parts):
        for other in parts[:index]:
            assert abs(float((one * other).mean())) < 5 / one.numel() ** 0.5
    one = parts[0]
    columns = (one.T @ one / len(one)).fill_diagonal_(0)
    assert float(columns.abs().max()) < 5 / len(one) ** 0.5
    neighbors = (one[1:] * one[:-1]).mean(1)
    assert (
        abs(float(neighbors.mean())) < 5 / one.numel() ** 0.5
        and float(neighbors.abs().max()) < 1.0
    )


def test_a_mask_depends_on_its_row_alone():
    """Not on which rows stand beside it, in which order, nor on the other layers."""
    whole = dropout(samples=20, layers=2)
    chosen = torch.randperm(160, generator=torch.Generator().manual_seed(0))[:30]
    for layer in range(2):
        expected = masks(whole.of_layer(layer), 10, MLP)[chosen]
        assert torch.equal(masks(whole.of_layer(layer).select(chosen), 10, MLP), expected)
        assert torch.equal(
            masks(dropout(samples=20, layers=7).of_layer(layer), 10, MLP)[chosen], expected
        )
    assert whole.select(None) is whole
    assert not torch.equal(
        masks(whole.of_layer(0), 10), masks(dropout(samples=20, seed=1).of_layer(0), 10)
    )


def test_in_any_dtype_it_is_the_same_and_its_own_gradient():
    found = dropout(rate=0.3).of_layer(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(512, 10).to(dtype).requires_grad_()
        out = found.drop(x, MLP)
        out.backward(torch.ones_like(out))
        assert out.dtype == dtype
        assert torch.equal(x.grad, found.drop(torch.ones_like(x), MLP).detach())
        assert torch.equal((out == 0), (found.drop(torch.ones(512, 10), MLP) == 0))
