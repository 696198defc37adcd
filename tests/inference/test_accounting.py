"""What sampling costs: sums over arms, and FLOPs as torch counts them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.utils.flop_counter import FlopCounterMode

from mmldlm.sampling.judge import SamplingCost
from mmldlm.tasks.registry import find_task


def test_plain_sampling_costs_what_torch_counts(pretrained, hidden):
    task, config = pretrained.task, pretrained.model.config
    with FlopCounterMode(display=False) as counter:
        samples = task.write_texts(
            pretrained, hidden[1], sampler="confidence", num_steps=4, batch_tokens=16
        )
    cost = SamplingCost(5)
    cost.add_texts(samples, task.writing_flops(config, samples))
    assert cost.denoiser_rows == samples.num_rows <= 4 * 5
    assert cost.denoiser_positions == pytest.approx(
        float((samples.passes * samples.lengths).sum())
    )
    # The lengths were predicted first, by passes without a text.
    lengths = 5 * task.pass_flops(config, 1, 0)
    assert cost.denoiser_flops <= counter.get_total_flops() <= cost.denoiser_flops + lengths


def test_guidance_takes_two_rows_a_pass(pretrained, hidden):
    costs = []
    for guidance in (1.0, 2.0):
        given = {"sampler": "scheduled", "num_steps": 16, "guidance": guidance}
        cost = SamplingCost(5)
        samples = pretrained.task.write_texts(pretrained, hidden[1], **given)
        flops = pretrained.task.writing_flops(pretrained.model.config, samples)
        cost.add_texts(samples, flops)
        costs.append(cost)
    assert costs[1].denoiser_rows == 2 * costs[0].denoiser_rows
    assert costs[1].denoiser_flops == pytest.approx(2 * costs[0].denoiser_flops, rel=0.3)


def test_an_unknown_cost_stays_unknown():
    cost = SamplingCost(2)
    cost.add_rows(3, 30.0, None)
    cost.add_rows(1, 10.0, 5.0)
    cost.add_judge(SimpleNamespace(name="encoder", num_calls=4, num_tokens=40, flops=2e9))
    assert cost.flops is None and cost.denoiser_rows == 4
    found = cost.per_text()
    assert found["gflops"] is None and found["judge_gflops"] == 1.0 and found["judge_calls"] == 2.0


def test_tasks_without_a_cost_model_say_so():
    assert find_task("gidd").writing_flops(None, None) is None
