import hashlib

import numpy as np
import pytest

from mmldlm.data.batch_plan import (
    BatchPlan,
    MixtureOrder,
    build_batch_plan,
    local_slots,
    permute,
)


@pytest.mark.parametrize("count", [1, 2, 3, 17, 1000, 4097])
def test_permute_visits_every_id_once(count):
    ids = permute(np.arange(count), count, seed=5, epoch=2)
    assert np.array_equal(np.sort(ids), np.arange(count))


def test_permute_is_a_function_of_position_seed_and_epoch():
    whole = permute(np.arange(1000), 1000, 1, 0)
    assert np.array_equal(permute(np.array([7, 999, 3]), 1000, 1, 0), whole[[7, 999, 3]])
    others = [
        permute(np.arange(1000), 1000, seed, epoch) for seed, epoch in ((1, 1), (2, 0), (0, 0))
    ]
    for other in others:
        assert (other == whole).mean() < 0.02
    # no visible order: neighbours are as far apart as in a random permutation
    assert abs(np.abs(np.diff(whole)).mean() - 333) < 40


def lengths(count=1003):
    return np.random.default_rng(0).integers(2, 60, count).astype(np.int32)


@pytest.mark.parametrize("bucket", [1, 4, 64])
@pytest.mark.parametrize("kind", ["samples", "tokens"])
def test_an_epoch_holds_every_sample_once(bucket, kind):
    plan = build_batch_plan(kind, lengths(), 24, seed=3, bucket_batches=bucket)
    for epoch in (0, 1):
        batches = [
            plan.batch(epoch * plan.batches_per_epoch + i) for i in range(plan.batches_per_epoch)
        ]
        assert np.array_equal(np.sort(np.concatenate([b.ids for b in batches])), np.arange(1003))
        assert {b.epoch for b in batches} == {epoch}
        if kind == "samples":
            assert sum(len(b.ids) < 24 for b in batches) == 1


@pytest.mark.parametrize("kind", ["samples", "tokens"])
def test_any_step_can_be_asked_first(kind):
    plan = build_batch_plan(kind, lengths(), 24, seed=3)
    expected = [plan.batch(step).ids for step in range(100)]
    for step in (99, 41, 42, 0):
        assert np.array_equal(
            build_batch_plan(kind, lengths(), 24, seed=3).batch(step).ids, expected[step]
        )


def test_the_order_of_runs_that_exist_does_not_change():
    """A run that is resumed by a later release must see the samples that it would have seen."""
    plan = BatchPlan(lengths(), 24, seed=3)
    assert plan.version == "samples-1:64"
    digest = hashlib.sha256(
        b"".join(plan.batch(step).ids.astype("<i8").tobytes() for step in range(100))
    )
    assert digest.hexdigest()[:16] == "231c92b02cfd3615"


def test_token_batches_have_equal_tokens_and_share_them_evenly():
    sizes = np.random.default_rng(1).integers(2, 500, 20_000).astype(np.int32)
    plan = build_batch_plan("tokens", sizes, 64, seed=0)
    real = padded = 0
    for step in range(64):
        batch = plan.batch(step)
        assert sizes[batch.ids].sum() == pytest.approx(64 * sizes.mean(), rel=0.06)
        parts = [plan.slots(batch, 2, 2, rank, micro) for micro in range(2) for rank in range(2)]
        assert np.array_equal(np.concatenate(parts), np.arange(len(batch.ids)))
        for part in parts:
            own = sizes[batch.ids[part]]
            real, padded = real + own.sum(), padded + own.max() * len(own)
    assert real / padded > 0.98
    assert len({len(plan.batch(step).ids) for step in range(64)}) > 10


@pytest.mark.parametrize("num", range(1, 9))
def test_every_rank_has_a_place_in_a_small_token_batch(num):
    plan = build_batch_plan("tokens", np.full(num, 5, np.int32), 64, seed=0)
    parts = [plan.slots(plan.batch(0), 4, 1, rank, 0) for rank in range(4)]
    assert min(map(len, parts)) >= 1
    assert np.array_equal(np.concatenate(parts)[:num], np.arange(num)) and len(
        np.concatenate(parts)
    ) == max(num, 4)


def test_a_mixture_keeps_its_shares_and_every_store_its_epochs():
    order = MixtureOrder([1000, 50, 3000], [0.5, 0.2, 0.3], seed=7)
    ids = np.concatenate([order.ids(np.arange(order.count), epoch) for epoch in range(3)])
    counts = np.bincount(ids, minlength=order.count)
    shares = np.array([part.sum() for part in np.split(counts, [1000, 1050])]) / len(ids)
    np.testing.assert_allclose(shares, [0.5, 0.2, 0.3], atol=2e-3)
    for part in np.split(counts, [1000, 1050]):
        # No sample comes again before all others of its store have come.
        assert part.max() - part.min() <= 1
    place = np.array([5, 4000, 77])
    assert np.array_equal(order.ids(place, 2), order.ids(np.arange(order.count), 2)[place])
    plan = build_batch_plan("samples", lengths(order.count), 24, 3, order=order)
    assert (
        plan.version == "samples-1:64:mixed:1000x2048:50x819:3000x1229"
        and len(plan.batch(3).ids) == 24
    )
    digest = hashlib.sha256(
        b"".join(plan.batch(step).ids.astype("<i8").tobytes() for step in range(200))
    )
    assert digest.hexdigest()[:16] == "7961fe1d8779fac7", (
        "a run that exists must see the same samples when resumed"
    )


@pytest.mark.parametrize("kind", ["samples", "tokens"])
@pytest.mark.parametrize("bucket", [3, 64])
def test_a_mixture_by_batches_has_one_store_a_batch(kind, bucket):
    counts = [100, 50]
    order = MixtureOrder(counts, [0.6, 0.4], seed=7, run=8)
    assert order.count == 144
    plan, stores, seen = (
        build_batch_plan(kind, lengths(150), 8, 3, bucket, order=order),
        [],
        np.zeros(150, int),
    )
    for step in range(20 * plan.batches_per_epoch):
        ids = plan.batch(step).ids
        np.add.at(seen, ids, 1)
        (store,) = np.unique(ids >= 100)
        stores.append(store)
        assert kind == "tokens" or len(ids) == 8
    assert np.mean(stores) == pytest.approx(0.4, abs=0.05)
    for part in np.split(seen, [100]):
        # No sample comes again before all others of its store have come.
        assert part.max() - part.min() <= 1
    again = build_batch_plan(kind, lengths(150), 8, 3, bucket, order=order)
    for step in (355, 17, 0):
        assert np.array_equal(again.batch(step).ids, plan.batch(step).ids)
    small = build_batch_plan(
        kind, lengths(5), 8, 3, order=MixtureOrder([3, 2], [1, 1], seed=0, run=8)
    )
    assert len({bool(i >= 3) for i in small.batch(0).ids}) == 1 and small.batches_per_epoch == 1


def test_buckets_hold_texts_of_one_length():
    sizes = lengths(20_000)
    plan = BatchPlan(sizes, 32, seed=0, bucket_batches=64)
    real = padded = 0
    for step in range(200):
        ids = plan.batch(step).ids
        real, padded = real + sizes[ids].sum(), padded + len(ids) * sizes[ids].max()
    assert real / padded > 0.97


def test_ranks_and_micro_batches_cut_the_global_batch():
    for world, accum in ((1, 1), (2, 1), (1, 4), (2, 2), (4, 1)):
        slots = [
            local_slots(16, world, accum, rank, micro)
            for micro in range(accum)
            for rank in range(world)
        ]
        assert np.array_equal(np.sort(np.concatenate(slots)), np.arange(16))
