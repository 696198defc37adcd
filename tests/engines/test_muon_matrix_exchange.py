"""Which rank transforms which matrix (the exchange itself: test_optimizer.py, on cut matrices)."""

from __future__ import annotations

import pytest
import torch

from mmldlm.engines import muon_exchange
from mmldlm.engines.muon_exchange import (
    Matrix,
    MatrixExchange,
    ShardRange,
    assign_owners,
    stacked_matrices,
)


def test_owners_share_the_work():
    matrices = [Matrix(str(i), 0, 64, 64) for i in range(8)] + stacked_matrices("small", (6, 4), 3)
    owners = assign_owners(matrices, 4)
    assert sorted(owners[:8]) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert assign_owners(matrices[:2], 5) == [0, 1]  # fewer matrices than ranks


def test_a_parameter_that_stacks_another_number_is_refused():
    with pytest.raises(ValueError, match="stack 4 matrices"):
        stacked_matrices("to_qkv", (6, 4), 4)


@pytest.mark.parametrize(("world_size", "is_sharded"), [(1, True), (4, True), (4, False)])
def test_an_exchange_has_as_many_matrices_as_a_rank_takes(monkeypatch, world_size, is_sharded):
    """Of sharded matrices an exchange of four ranks has four times those of one rank."""
    monkeypatch.setattr(muon_exchange, "BUCKET_ELEMENTS", 2 * 16 * 16)
    names = [f"matrix{index}" for index in range(32)]
    size = 256 // world_size if is_sharded else 256
    shards = [
        [ShardRange(name, (16, 16), size * rank if is_sharded else 0, size) for name in names]
        for rank in range(world_size)
    ]
    exchange = MatrixExchange(shards, dict.fromkeys(names, 1), 0, torch.device("cpu"))
    assert sum(exchange._buckets, []) == list(range(32))
    expected = 2 * world_size if is_sharded else 2
    assert {len(bucket) for bucket in exchange._buckets} == {expected}


def test_ranks_that_hold_whole_matrices_take_turns(monkeypatch):
    """As under ZeRO-1 and 2, whose partitions are consecutive."""
    monkeypatch.setattr(muon_exchange, "BUCKET_ELEMENTS", 2 * 16 * 16)
    names = [f"matrix{index:02}" for index in range(32)]
    shards = [
        [ShardRange(name, (16, 16), 0, 256) for name in names[8 * rank : 8 * rank + 8]]
        for rank in range(4)
    ]
    exchange = MatrixExchange(shards, dict.fromkeys(names, 1), 0, torch.device("cpu"))
    assert {len(bucket) for bucket in exchange._buckets} == {8}
    for bucket in exchange._buckets:
        owners = [exchange.owners[k] for k in bucket]
        assert sorted(owners) == [0, 0, 1, 1, 2, 2, 3, 3]
