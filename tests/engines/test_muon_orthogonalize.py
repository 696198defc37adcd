"""Newton-Schulz: singular values near one, its cost."""

from __future__ import annotations

import pytest
import torch

from mmldlm.engines.muon import (
    orthogonal_update,
    orthogonalization_flops,
    orthogonalize,
    update_flops,
)


@pytest.mark.parametrize("shape", [(16, 16), (64, 16), (16, 64), (3, 5, 40)])
def test_singular_values_are_near_one(shape):
    values = torch.linalg.svdvals(
        orthogonalize(torch.randn(*shape, generator=torch.Generator().manual_seed(0)))
    )
    assert values.min() > 0.6 and values.max() < 1.3


def test_zeros_stay_zeros():
    assert torch.equal(orthogonalize(torch.zeros(4, 6)), torch.zeros(4, 6))


@pytest.mark.parametrize("scale", [1e-6, 1e12])
def test_the_scale_of_the_matrix_does_not_matter(scale):
    matrix = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(orthogonalize(matrix * scale), orthogonalize(matrix), atol=2e-3)


@pytest.mark.parametrize("scale", [1e-12, 1e-21, 1e-25, 1e-38, 1e-44])
def test_momentum_that_dies_out_moves_nothing(scale):
    """Its squares underflow below 1e-22; divided by a norm of zero they once became NaN in a run
    of 3,308 steps.
    """
    matrix = torch.randn(32, 192, generator=torch.Generator().manual_seed(0))
    found = orthogonalize(matrix * scale)
    assert found.isfinite().all()
    assert found.norm() < 0.1 * orthogonalize(matrix).norm()


@pytest.mark.parametrize("shape", [(8, 24), (24, 8)])
def test_flops_are_those_that_torch_counts(shape):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(*shape))
    assert counter.get_total_flops() == orthogonalization_flops(*shape)


def test_blocks_of_rows_are_orthogonalized_by_themselves():
    matrix = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    whole, blocks = orthogonal_update(matrix), orthogonal_update(matrix, 4)
    torch.testing.assert_close(whole, orthogonalize(matrix) * 1.5**0.5)
    torch.testing.assert_close(
        blocks, torch.cat([orthogonalize(part) for part in matrix.split(4)])
    )
    assert torch.equal(orthogonal_update(matrix, 64), whole)
    assert update_flops(12, 8, 4) == 3 * orthogonalization_flops(4, 8) < update_flops(12, 8)
