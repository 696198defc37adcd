"""What a run prints before its first step."""

from __future__ import annotations

from mmldlm.config.schema import Config, OptimizerConfig
from mmldlm.data.run_data import RunData
from mmldlm.engines.base import Engine
from mmldlm.engines.muon import muon_of
from mmldlm.tasks.base import Task


def summary(
    task: Task,
    data: RunData,
    engine: Engine,
    global_batch: int,
    trainable: dict[str, tuple[int, int]],
    optimizer_groups: list[tuple[float, int]],
) -> list[str]:
    """Return the lines about run, model, data, batch and optimizer.

    Args:
        trainable: Numbers of (trainable, all) parameters by group.
        optimizer_groups: (weight decay, elements) of each group of the optimizer.
    """
    config, training, optimizer = data.config, data.config.training, data.config.optimizer
    total = sum(count for _, count in trainable.values())
    groups = ", ".join(
        f"{name} {part / 1e6:.1f}M of {count / 1e6:.1f}M"
        for name, (part, count) in trainable.items()
    )
    num_epochs = training.num_train_steps * global_batch / len(data.train_lengths)
    return [
        (
            f"run      {config.run_dir()} on {engine.describe()}, {engine.world_size} rank(s),"
            f" {engine.device.type}"
        ),
        f"model    {total / 1e6:.1f}M parameters; trainable {groups} ({task.describe(config)})",
        f"data     {data.describe()}",
        *(f"data     {note}" for note in data.notes),
        (
            f"batch    {global_batch} = {training.train_batch_size} per rank x"
            f" {training.grad_accum_steps} accumulated x {engine.world_size} rank(s);"
            f" {training.num_train_steps:,} steps = {num_epochs:.2f} epochs; {training.dtype}"
        ),
        *_optimizer_lines(engine, optimizer, optimizer_groups),
    ]


def _optimizer_lines(
    engine: Engine, optimizer: OptimizerConfig, groups: list[tuple[float, int]]
) -> list[str]:
    decays = [f"weight decay {decay:g} on {size / 1e6:.1f}M" for decay, size in groups]
    schedule = (
        f"after {optimizer.warmup_steps:,} steps of warm-up, {optimizer.schedule} to"
        f" {optimizer.min_lr:g}"
    )
    muon = muon_of(engine)
    if muon is None:
        return [f"optim    AdamW, lr {optimizer.lr:g} {schedule}; {', '.join(decays)}"]
    cost = muon.cost()
    excess = cost["flops_per_rank"] * engine.world_size / max(cost["flops"], 1.0)
    work = f"{cost['flops'] / 1e9:.2g} GFLOP per step"
    if engine.world_size > 1:
        work += (
            f", the busiest rank {excess:.2f} x the mean, {cost['bytes'] / 1e6:.1f} MB exchanged"
        )
    # Muon's group is the first.
    muon_line = (
        f"optim    Muon, lr {optimizer.muon_rate():g}, for {cost['matrices']} matrices;"
        f" {decays[0]} ({work})"
    )
    adamw_line = (
        f"optim    AdamW for all other parameters, lr {optimizer.lr:g} {schedule};"
        f" {', '.join(decays[1:])}"
    )
    return [muon_line, adamw_line]


def setting_warnings(task: Task, config: Config, is_fresh: bool) -> list[str]:
    """Return warnings about the config.

    Args:
        is_fresh: Whether the run starts without a checkpoint to continue from.
    """
    training, optimizer = config.training, config.optimizer
    warnings = task.warnings(config) if is_fresh else []
    if optimizer.warmup_steps >= training.num_train_steps:
        warnings.append(
            f"optimizer.warmup_steps={optimizer.warmup_steps} in a run of"
            f" training.num_train_steps={training.num_train_steps}: the learning rate never"
            f" reaches optimizer.lr={optimizer.lr:g}"
        )
    return warnings
