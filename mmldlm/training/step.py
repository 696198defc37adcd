"""One optimizer step: forward and backward of every micro-batch, one reduction, then apply or
discard on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmldlm.data.batch import Batch
from mmldlm.engines.base import Engine
from mmldlm.engines.optimizer import learning_rate
from mmldlm.training.state import LocalCounts, SharedNumbers, StepReport

if TYPE_CHECKING:
    from mmldlm.training.session import Session


def train_step(session: Session, batches: list[Batch]) -> StepReport:
    """Train on one global batch. Collective.

    Args:
        batches: this rank's micro-batches.
    """
    engine, state, guard = session.engine, session.state, session.guard
    config = session.config
    lr = state.lr_scale * learning_rate(
        state.applied_steps, config.training.num_train_steps, config.optimizer
    )
    session.layer_stats.before_forward(state.step + 1)
    names = session.task.sums_of(config)
    sums = torch.zeros(len(names) + 1, dtype=torch.float64, device=engine.device)
    engine.loss_scale, losses = guard.loss_scale.value, []
    for batch in batches:
        loss, metrics = session.objective(engine.module, batch.to(engine.device))
        declared = session.task.stack_sums(names, loss, metrics)
        # Run backward even for a non-finite loss, so that all ranks issue the same collectives.
        engine.backward(loss)
        losses.append(loss.detach())
        is_bad = ~torch.isfinite(losses[-1])
        sums += torch.cat([declared, is_bad.double().reshape(1)])
    norm = engine.grad_norm().to(sums)
    session.layer_stats.before_step()
    shared = reduce_step(engine, names, sums, norm, LocalCounts.of(session, batches))
    decision = guard.decide(
        shared.sums["loss"], shared.num_bad_losses, shared.grad_norm, int(shared.counts.usable)
    )
    if decision.apply:
        engine.step(lr, shared.grad_norm)
        if session.average is not None:
            session.average.update()
    else:
        engine.discard_gradients()
    layer_stats = session.layer_stats.after_step(lr, decision.apply)
    num_samples = len(session.plan.batch(state.step).ids)
    guard.bad_samples.update(int(shared.counts.bad), num_samples)
    state.advance(decision, num_samples)
    cost = session.timer.step(
        num_samples,
        shared.counts.tokens,
        {**shared.sums, **batches[0].counts},
        epoch=batches[0].epoch,
    )
    return StepReport(lr, shared, decision, num_samples, cost, layer_stats, losses, batches)


def reduce_step(
    engine: Engine, names: Sequence[str], sums: Tensor, grad_norm: Tensor, local: LocalCounts
) -> SharedNumbers:
    """Add up one vector over all ranks and read it: the step's one host sync. Collective.

    Args:
        names: of the sums.
        sums: [len(names) + 1] fp64 on the device: the sums and the number of non-finite losses.
        grad_norm: global norm, a scalar on the device.
    """
    # Average the norm over ranks: if any rank's norm is non-finite, the average is too.
    norm = (grad_norm / engine.world_size).view(1)
    vector = engine.sum_on_host(
        torch.cat([sums, norm, engine.to_device(list(vars(local).values()))])
    )
    *values, num_bad_losses, shared_norm = vector[: len(names) + 2]
    counts = LocalCounts(*vector[len(names) + 2 :])
    return SharedNumbers(
        dict(zip(names, values, strict=True)), int(num_bad_losses), shared_norm, counts
    )
