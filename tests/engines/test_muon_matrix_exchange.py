"""Which rank transforms which matrix (the exchange itself: test_optimizer.py, on cut matrices)."""

from __future__ import annotations

import pytest

from mmldlm.engines.muon_exchange import Matrix, assign_owners, stacked_matrices


def test_owners_share_the_work():
    matrices = [Matrix(str(i), 0, 64, 64) for i in range(8)] + stacked_matrices("small", (6, 4), 3)
    owners = assign_owners(matrices, 4)
    assert sorted(owners[:8]) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert assign_owners(matrices[:2], 5) == [0, 1]  # fewer matrices than ranks


def test_a_parameter_that_stacks_another_number_is_refused():
    with pytest.raises(ValueError, match="stack 4 matrices"):
        stacked_matrices("to_qkv", (6, 4), 4)
