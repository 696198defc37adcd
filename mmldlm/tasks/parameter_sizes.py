"""Parameters of a task's model, counted on the model itself: on torch's meta device, where tensors
have shapes and no values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import torch
from torch import nn

from mmldlm.config.schema import Config

if TYPE_CHECKING:
    from mmldlm.tasks.text_task import TextTask


class ParameterSizes(TypedDict):
    """The part of `ModelSizes` that is known of the model alone, in elements."""

    trainable: int
    frozen: int
    largest_block: int
    buffers: int
    matrices: int


def model_without_values(task: TextTask, config: Config) -> nn.Module:
    """The model of a config with latent_dim and vocab_size set, on the meta device."""
    with torch.device("meta"):
        return task.model_class()(config.model)


def parameter_sizes(task: TextTask, config: Config) -> ParameterSizes:
    """Count the model of a config whose keys are all set, training.freeze=auto too."""
    model = model_without_values(task, config)
    plan = task.parameter_plan(model, config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    buffers = dict(model.named_buffers())
    # What a sharding engine gathers at once; tied weights count wherever they are read.
    others = [module for module in model.children() if not isinstance(module, nn.ModuleList)]
    units = [*plan.sharding_units, *others]
    num_frozen = sum(sizes[name] for name in plan.frozen)
    return ParameterSizes(
        trainable=sum(sizes.values()) - num_frozen,
        frozen=num_frozen,
        largest_block=max(sum(p.numel() for p in unit.parameters()) for unit in units),
        buffers=sum(buffers[name].numel() for name in task.buffers),
        matrices=sum(sizes[name] for name in plan.matrices),
    )


def count_by_group(task: TextTask, config: Config) -> dict[str, int]:
    """Parameters of each of the task's groups; tied weights count once."""
    model = model_without_values(task, config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    groups = task.parameter_groups(model)
    return {group: sum(sizes[name] for name in names) for group, names in groups.items()}
