"""Load a model for sampling and evaluation from a run, a checkpoint of any engine, a model.pt or a converted folder.

The weights are copied from the files into the model; nothing is written or unpickled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmldlm.checkpoints.formats.base import OpenedCheckpoint
from mmldlm.checkpoints.formats.open import open_source
from mmldlm.checkpoints.formats.weight_source import WeightSource
from mmldlm.checkpoints.init_from import as_torch
from mmldlm.checkpoints.layout import MODEL_CONFIG
from mmldlm.config.task_registry import DEFAULT_TASK
from mmldlm.errors import UserError
from mmldlm.models import MultimodalMMDiT
from mmldlm.models.pretrained_io import check_shapes, model_config, read_config

ARCHITECTURE = "MultimodalMMDiT"
CONVERT = "name a run or a checkpoint of mmldlm, or create the folder with `mmldlm convert RUN/latest OUT`"
_HEAD, _EMBEDDING = "text_head.weight", "text_encoder.token_embedding.weight"


def load_model(
    path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[MultimodalMMDiT, dict[str, Any], Path]:
    """Load the weights, not their moving average (as in `mmldlm convert` without --ema).

    Args:
        path: RUN, RUN/latest, a step folder, a model.pt, or a folder written by `mmldlm convert`.
        device: device of the model.
        dtype: dtype of the weights; the latent statistics stay fp32.

    Returns:
        the model in eval mode, its config.json as a dict, and the path of that file (the tokenizer is next to it).

    Raises:
        UserError: an unreadable, corrupt or unsafe file, or weights that do not match the config.
    """
    opened = open_source(path)
    with opened.weights as weights:
        config_path = _find_config(opened, path)
        values = read_config(config_path)
        if values.get("task", DEFAULT_TASK) != DEFAULT_TASK:
            raise UserError(
                f"a model of task={DEFAULT_TASK}, the task that can be sampled",
                f"task={values['task']} in {config_path}",
                "convert it with `mmldlm convert` and sample it with the library that it belongs to",
            )
        if values.get("architecture", ARCHITECTURE) != ARCHITECTURE:
            raise UserError(f"the config of a {ARCHITECTURE} in {config_path}", f"{values['architecture']!r}", CONVERT)
        config = model_config(values)
        shapes = {name: info.shape for name, info in weights.tensors.items()}
        check_shapes(
            MultimodalMMDiT, config, shapes, config_path
        )  # before allocating: a corrupt config may name any size
        model = MultimodalMMDiT(config)
        _copy_weights(model, weights)
    mean, std = model.latent_mean.clone(), model.latent_std.clone()
    model.to(device=device, dtype=dtype)
    model.latent_mean, model.latent_std = mean.to(device), std.to(device)
    return model.eval(), values, config_path


def _find_config(opened: OpenedCheckpoint, named: str | Path) -> Path:
    """Find the model's config: in the checkpoint, next to the weights, or in one of two parent folders.

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
def _copy_weights(model: MultimodalMMDiT, weights: WeightSource) -> None:
    own = model.state_dict()
    for name, info in weights.tensors.items():
        own[name].copy_(as_torch(weights.read(name), info.dtype))
    if model.config.tie_embeddings and _HEAD not in weights.tensors:  # save_pretrained omits a tied head
        own[_HEAD].copy_(own[_EMBEDDING])
    weights.finish()
