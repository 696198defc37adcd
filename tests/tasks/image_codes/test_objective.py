"""The loss of codes: the NELBO of a uniform head is log2 Q bits; micro-batches add up; logs name
what they hold.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mmldlm.data.batch_plan import BatchPlan
from mmldlm.tasks.registry import find_task, load_config
from mmldlm.tasks.validation import PassTotals
from tests.support.image_store import make_image_store

Q = 48


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    root = make_image_store(tmp_path_factory.mktemp("codes") / "store", codes=Q)
    task = find_task("image_codes")
    data = task.open_data(
        load_config("tiny", None, ["task=image_codes", f"data.latent_data_root={root}"])
    )
    return task, data, task.build_model(data)


def batch_of(task, data, slots, **options):
    plan = BatchPlan(data.train_lengths, 8, data.config.training.seed)
    return task.collator(data, **options).collate(
        plan.batch(0), np.asarray(slots), data.train, data.train_lengths
    )


def test_a_uniform_head_has_log2_q_bits_and_its_part_of_the_loss(opened):
    task, data, model = opened
    with torch.no_grad():
        saved = model.latent_head.weight.clone()
        model.latent_head.weight.zero_()
    loss, sums = task.objective(data.config)(model, batch := batch_of(task, data, range(8)))
    total = sums["code_total"]
    assert float(total) == pytest.approx(batch.counts["codes"]) and float(
        sums["code_scored"]
    ) < float(total)
    assert float(sums["code_nelbo_sum"] / total) / math.log(2) == pytest.approx(
        math.log2(Q), rel=1e-5
    )
    text = sums["text_nelbo_sum"] / batch.counts["text_tokens"]
    length = 0.1 * sums["length_nll_sum"] / batch.counts["texts"]
    assert float(loss.detach()) == pytest.approx(float(text + length) + math.log(Q), rel=1e-4)
    with torch.no_grad():
        model.latent_head.weight.copy_(saved)


def test_micro_batches_add_up_to_the_loss_of_the_batch(opened):
    task, data, model = opened
    objective = task.objective(data.config)
    whole, sums = objective(model, batch_of(task, data, range(8)))
    parts = [objective(model, batch_of(task, data, slots)) for slots in (range(3), range(3, 8))]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    for name in task.sums:
        torch.testing.assert_close(sum(own[name] for _, own in parts), sums[name], msg=name)
    assert set(sums) == set(task.sums)


def test_a_batch_without_masked_codes_gives_every_parameter_a_gradient(opened):
    task, data, model = opened
    batch = batch_of(task, data, range(4), mode="l2t", seed=1, condition_dropout=0.0)
    assert not len(batch.code_targets)
    model.zero_grad()
    task.objective(data.config)(model, batch)[0].backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    assert not bool(model.latent_head.weight.grad.any())


def test_figures_are_named_by_what_they_hold(opened):
    task, data, model = opened
    _, sums = task.objective(data.config)(
        model, batch := batch_of(task, data, range(8), mode="t2l", seed=1)
    )
    totals = {
        "t2l": PassTotals({name: float(value) for name, value in sums.items()}, batch.counts, 40)
    }
    found = task.validation_figures(totals)
    assert set(found) == {"t2l_code_nelbo", "t2l_code_accuracy"} and found["t2l_code_nelbo"] > 1
    values = {
        metric.name: metric.value(totals["t2l"].sums, batch.counts) for metric in task.metrics
    }
    assert (
        values["code_loss"] == pytest.approx(found["t2l_code_nelbo"])
        and values["latent_loss"] is None
    )
