"""Load a model for sampling and evaluation from a run, a checkpoint of any engine, a model.pt or a
converted folder.

The weights are copied from the files into the model; nothing is written or unpickled.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mmldlm.checkpoints.formats.open import open_source
from mmldlm.checkpoints.formats.weight_source import OpenedCheckpoint, WeightSource
from mmldlm.checkpoints.init_from import as_torch
from mmldlm.checkpoints.manifest import MODEL_CONFIG
from mmldlm.config.renamed_keys import is_removed_weight
from mmldlm.config.task_names import DEFAULT_TASK
from mmldlm.config.task_names import TASK_NAMES as TASKS
from mmldlm.errors import UserError
from mmldlm.models.base import BaseTransformer
from mmldlm.models.pretrained_io import check_shapes, checked_section, read_values
from mmldlm.tasks.registry import find_task

if TYPE_CHECKING:
    from mmldlm.tasks.text_task import TextTask

CONVERT = (
    "name a run or a checkpoint of mmldlm, or create the folder with `mmldlm convert RUN/latest"
    " OUT`"
)


def load_model(
    path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, dict[str, Any], Path, TextTask]:
    """Load the weights, not their moving average (as in `mmldlm convert` without --ema).

    Args:
        path: RUN, RUN/latest, a step folder, a model.pt, or a folder written by `mmldlm convert`.
        device: device of the model.
        dtype: dtype of the weights; the task's buffers (latent statistics) stay as they are.

    Returns:
        the model in eval mode, its config.json as a dict, the path of that file (the tokenizer is
        next to it), and the task that trained it.

    Raises:
        UserError: an unreadable, corrupt or unsafe file, weights that do not match the config, or
            a task whose models are not sampled.
    """
    opened = open_source(path)
    with opened.weights as weights:
        config_path = _find_config(opened, path)
        values = read_values(config_path)
        task = _task_of(values, config_path)
        config = checked_section(
            values, task.config_class.model_fields["model"].annotation, config_path
        )
        shapes = {name: info.shape for name, info in weights.tensors.items()}
        kind = task.model_class()
        check_shapes(
            kind, config, shapes, config_path
        )  # before allocating: a corrupt config may name any size
        model = kind(config)
        _copy_weights(model, weights)
        if isinstance(model, BaseTransformer):
            model.check_latent_statistics(weights.path)
    kept = {name: model.get_buffer(name).clone() for name in task.buffers}
    model.to(device=device, dtype=dtype)
    for name, buffer in kept.items():
        owner, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner), own_name, buffer.to(device))
    return model.eval(), values, config_path, task


def _task_of(values: dict[str, Any], config_path: Path) -> TextTask:
    """The task of a config.json; one of a user's own module is not imported, because a file from
    elsewhere names it.

    Raises:
        UserError: a task whose models are not sampled, or another architecture than the task's.
    """
    name = values.get("task", DEFAULT_TASK)
    task = find_task(name) if isinstance(name, str) and name in TASKS else None
    if task is None or not task.samplers:
        raise UserError(
            f"a model of one of the tasks {', '.join(TASKS)}, which can be sampled",
            f"task={name} in {config_path}",
            "convert it with `mmldlm convert` and sample it with the library that it belongs to",
        )
    if values.get("architecture", task.architecture) != task.architecture:
        found = f"{values['architecture']!r}"
        raise UserError(f"the config of a {task.architecture} in {config_path}", found, CONVERT)
    return task


def _find_config(opened: OpenedCheckpoint, named: str | Path) -> Path:
    """Find the model's config: in the checkpoint, next to the weights, or in one of two parent
    folders.

    Raises:
        UserError: no config was found.
    """
    weights = opened.weights.path
    folder = weights if weights.is_dir() else weights.parent
    folders = [opened.checkpoint] if opened.checkpoint else [folder, *list(folder.parents)[:2]]
    for folder in folders:
        for name in (MODEL_CONFIG, "config.json"):
            if (folder / name).is_file():
                return folder / name
    raise UserError(
        f"config.json next to the weights in {named}, which describes the model",
        f"no such file in {folders[0]}",
        CONVERT,
    )


@torch.no_grad()
def _copy_weights(model: nn.Module, weights: WeightSource) -> None:
    own = model.state_dict()
    # Of tied weights, one name is enough: they share their memory.
    for name, info in weights.tensors.items():
        if not is_removed_weight(name):
            own[name].copy_(as_torch(weights.read(name), info.dtype))
    weights.finish()
