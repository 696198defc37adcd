"""How many samples an evaluation during training has."""

from __future__ import annotations

import numpy as np
import pytest

from mmldlm.data.batch_plan import BatchPlan, SpacedOrder
from mmldlm.tasks import validation
from mmldlm.tasks.registry import load_config
from mmldlm.tasks.translation.data import open_data
from mmldlm.tasks.translation.task import TranslationTask, passes_of


def num_samples(config, available: int, global_batch: int) -> int:
    return validation.num_samples(config, available, global_batch, len(passes_of(config)))


def test_auto_costs_a_few_percent_of_the_training_between_two():
    config = load_config("mmdit_stable", None, [])
    assert [name for name, *_ in passes_of(config)] == ["unconditional", "l2t", "l2t_null", "t2l"]
    found = num_samples(config, 10**9, global_batch=512)
    forward_passes, training = found * 4, 5000 * 512 * 3
    assert 0.03 <= forward_passes / training <= 0.05
    assert num_samples(config, 700, global_batch=512) == 700


def test_a_short_interval_gets_few_samples_but_enough_to_mean_something():
    slow = load_config("quickstart", None, ["logging.eval_freq=3", "training.train_batch_size=2"])
    assert (
        num_samples(slow, 1000, global_batch=2) == 64
        and num_samples(slow, 40, global_batch=2) == 40
    )
    single = load_config(
        "tiny", None, ["training.num_train_steps=100", "logging.eval_freq=100000"]
    )
    assert (
        num_samples(single, 10**6, 800)
        == num_samples(single, 10**6, 800)
        == 0.05 * 100 * 800 * 3 / 4
    )


@pytest.mark.parametrize("limit", ["null", "16"])
def test_what_the_user_says_holds(limit):
    config = load_config("tiny", None, [f"data.max_validation_samples={limit}"])
    assert num_samples(config, 1000, 8) == 1000, "open_data has applied it"


def test_the_report_of_the_quickstart_has_all_its_samples():
    assert num_samples(load_config("quickstart", None, []), 1000, 96) == 1000


def test_a_part_is_spread_over_the_whole_split_and_has_no_sample_twice():
    lengths = np.random.default_rng(0).integers(3, 60, 1000)
    plan = BatchPlan(lengths, 8, 0, bucket_batches=4, shuffle=False, order=SpacedOrder(100, 1000))
    assert plan.batches_per_epoch == 13
    ids = np.concatenate([plan.batch(step).ids for step in range(13)])
    assert sorted(ids) == list(range(0, 1000, 10))
    whole = BatchPlan(lengths, 8, 0, bucket_batches=4, shuffle=False)
    ids = np.concatenate([whole.batch(step).ids for step in range(whole.batches_per_epoch)])
    assert sorted(ids) == list(range(1000))


def test_noise_is_that_of_the_sample_whatever_the_ranks_and_their_batches(store):
    """A resume on other ranks compares with what was measured before."""
    words = [f"data.latent_data_root={store}", "data.max_validation_samples=37"]
    data, task = open_data(load_config("tiny", None, words)), TranslationTask()
    found = []
    for world_size, micro in ((1, 37), (1, 5), (2, 8), (3, 32)):
        timesteps = {}
        for rank in range(world_size):
            (order,) = data.validation_orders(37)
            plan = validation._WholeSplit(data.validation_lengths, order, micro, world_size)
            batches = validation.MicroBatches(
                data.validation, plan, task.collator(data, 3), rank, world_size, plan.accum
            )
            for batch in validation.iterate_items(batches, range(plan.accum)):
                real = batch.real.nonzero()[0].tolist()
                timesteps |= {int(batch.ids[i]): float(batch.text_timesteps[i]) for i in real}
        found.append(timesteps)
    assert len(found[0]) == 37 and all(timesteps == found[0] for timesteps in found)
