import numpy as np
import pytest

from mmldlm.data.plan import BatchPlan, local_slots, permute


@pytest.mark.parametrize("count", [1, 2, 3, 17, 1000, 4097])
def test_permute_visits_every_id_once(count):
    ids = permute(np.arange(count), count, seed=5, epoch=2)
    assert np.array_equal(np.sort(ids), np.arange(count))


def test_permute_is_a_function_of_position_seed_and_epoch():
    whole = permute(np.arange(1000), 1000, 1, 0)
    assert np.array_equal(permute(np.array([7, 999, 3]), 1000, 1, 0), whole[[7, 999, 3]])
    others = [permute(np.arange(1000), 1000, seed, epoch) for seed, epoch in ((1, 1), (2, 0), (0, 0))]
    for other in others:
        assert (other == whole).mean() < 0.02
    # no visible order: neighbours are as far apart as in a random permutation
    assert abs(np.abs(np.diff(whole)).mean() - 333) < 40


def lengths(count=1003):
    return np.random.default_rng(0).integers(2, 60, count).astype(np.int32)


@pytest.mark.parametrize("bucket", [1, 4, 64])
def test_an_epoch_holds_every_sample_once(bucket):
    plan = BatchPlan(lengths(), 24, seed=3, bucket_batches=bucket)
    for epoch in (0, 1):
        batches = [plan.batch(epoch * plan.batches_per_epoch + i) for i in range(plan.batches_per_epoch)]
        assert np.array_equal(np.sort(np.concatenate([b.ids for b in batches])), np.arange(1003))
        assert {b.epoch for b in batches} == {epoch} and sum(len(b.ids) < 24 for b in batches) == 1


def test_any_step_can_be_asked_first():
    plan = BatchPlan(lengths(), 24, seed=3)
    expected = [plan.batch(step).ids for step in range(100)]
    for step in (99, 41, 42, 0):
        assert np.array_equal(BatchPlan(lengths(), 24, seed=3).batch(step).ids, expected[step])


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
        slots = [local_slots(16, world, accum, rank, micro) for micro in range(accum) for rank in range(world)]
        assert np.array_equal(np.sort(np.concatenate(slots)), np.arange(16))
