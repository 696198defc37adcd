"""One optimizer step: forward and backward of every micro-batch, one reduction, then apply or
discard on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmldlm.config.schema import Config
from mmldlm.data.batch import Batch
from mmldlm.data.batch_plan import BatchPlan
from mmldlm.engines.base import Engine
from mmldlm.engines.ema import WeightAverage
from mmldlm.engines.optimizer import learning_rate
from mmldlm.observe.layer_stats import LayerStatsCollector
from mmldlm.stability.guard import Guard
from mmldlm.tasks.base import Objective, Task
from mmldlm.training.state import (
    Requests,
    SharedNumbers,
    StepCounts,
    StepReport,
    TrainingState,
)


@dataclass
class StepContext:
    """What an optimizer step uses. A run has more (Session); a replay has only this.

    Attributes:
        average: Moving average of the weights, if the run has one.
    """

    task: Task
    config: Config
    engine: Engine
    plan: BatchPlan
    objective: Objective
    state: TrainingState
    guard: Guard
    layer_stats: LayerStatsCollector
    average: WeightAverage | None


def train_step(
    context: StepContext, batches: list[Batch], requests: Callable[[], Requests] = Requests
) -> StepReport:
    """Train on one global batch, and count it. Collective.

    Args:
        batches: This rank's micro-batches.
        requests: Called as late as possible, just before the step's one reduction.
    """
    engine, state, guard = context.engine, context.state, context.guard
    config, layer_stats = context.config, context.layer_stats
    lr = state.lr_scale * learning_rate(
        state.applied_steps, config.training.num_train_steps, config.optimizer
    )
    layer_stats.before_forward(state.step + 1)
    names = context.task.sums_of(config)
    sums = torch.zeros(len(names) + 1, dtype=torch.float64, device=engine.device)
    engine.loss_scale, losses = guard.loss_scale.value, []
    for batch in batches:
        loss, metrics = context.objective(engine.module, batch.to(engine.device))
        declared = context.task.stack_sums(names, loss, metrics)
        # Run backward even for a non-finite loss, so that all ranks issue the same collectives.
        engine.backward(loss)
        losses.append(loss.detach())
        is_nonfinite = ~torch.isfinite(losses[-1])
        sums += torch.cat([declared, is_nonfinite.double().reshape(1)])
    norm = engine.grad_norm().to(sums)
    layer_stats.before_step()
    local = StepCounts.of(batches, requests())
    shared = reduce_step(engine, names, sums, norm, local)

    decision = guard.decide(
        shared.sums["loss"],
        shared.num_nonfinite_losses,
        shared.grad_norm,
        int(shared.counts.usable),
    )
    if decision.apply:
        engine.step(lr, shared.grad_norm)
        if context.average is not None:
            context.average.update()
    else:
        engine.discard_gradients()
    statistics = layer_stats.after_step(lr, decision.apply)
    num_samples = len(context.plan.batch(state.step).ids)
    guard.bad_samples.update(int(shared.counts.bad), num_samples)
    state.advance(decision, num_samples)
    return StepReport(lr, shared, decision, num_samples, statistics, losses, batches)


def reduce_step(
    engine: Engine, names: Sequence[str], sums: Tensor, grad_norm: Tensor, local: StepCounts
) -> SharedNumbers:
    """Add up one vector over all ranks and read it: the step's one host sync. Collective.

    Args:
        names: Names of the sums.
        sums: [len(names) + 1] fp64 on the device: the sums and the number of non-finite losses.
        grad_norm: Global norm, a scalar on the device.
    """
    # Average the norm over ranks: if any rank's norm is non-finite, the average is too.
    norm = (grad_norm / engine.world_size).view(1)
    vector = engine.sum_on_host(
        torch.cat([sums, norm, engine.to_device(list(vars(local).values()))])
    )
    *values, num_nonfinite_losses, shared_norm = vector[: len(names) + 2]
    counts = StepCounts(*vector[len(names) + 2 :])
    return SharedNumbers(
        dict(zip(names, values, strict=True)), int(num_nonfinite_losses), shared_norm, counts
    )
