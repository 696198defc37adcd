"""A model for sampling and evaluation from whatever a user names: a run, a checkpoint of any engine, a model.pt, or a
converted folder. The weights go from the files into the model; nothing is written, nothing is unpickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from mmldlm.checkpoints.config_check import ARCHITECTURE, MODEL_CONFIG, check_shapes
from mmldlm.checkpoints.init_from import as_torch
from mmldlm.checkpoints.sources import Opened, open_source
from mmldlm.checkpoints.weights import WeightSource
from mmldlm.config.schema import ModelConfig
from mmldlm.errors import UserError

if TYPE_CHECKING:
    from mmldlm.models import MultimodalMMDiT

CONVERT = "give a run or a checkpoint of mmldlm, or make the folder with `mmldlm convert RUN/latest OUT`"
_HEAD, _EMBEDDING = "text_head.weight", "text_encoder.token_embedding.weight"
_CONFIG_BYTES = 16 << 20


def load_model(
    path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[MultimodalMMDiT, dict[str, Any], Path]:
    """Load the weights (not their moving average, as `mmldlm convert` without --ema).

    Args:
        path: RUN, RUN/latest, a step folder, a model.pt, or a folder that `mmldlm convert` wrote. device: where to put
            the model. dtype: of the weights; the latent statistics stay fp32.

    Returns:
        the model in eval mode, its config.json as a dict, the folder that holds it (and the tokenizer).

    Raises:
        UserError: nothing readable there, a damaged or unsafe file, or weights that do not fit the config.
    """
    opened = open_source(path)
    with opened.weights as weights:
        config_path = _find_config(opened, path)
        values = _read_config(config_path)
        sources = {name: name for name in weights.tensors}
        if values.get("tie_embeddings") and _EMBEDDING in sources:
            sources.setdefault(_HEAD, _EMBEDDING)
        shapes = {name: weights.tensors[source].shape for name, source in sources.items()}
        check_shapes(shapes, values, config_path, weights.path)  # first: a damaged config may name any size
        model = _build(values, config_path)
        _check_names(model, shapes, config_path, weights)
        _copy_weights(model, weights, sources)
    mean, std = model.latent_mean.clone(), model.latent_std.clone()
    model.to(device=device, dtype=dtype)
    model.latent_mean, model.latent_std = mean.to(device), std.to(device)
    return model.eval(), values, config_path.parent


def _find_config(opened: Opened, named: str | Path) -> Path:
    """The model's config: in the checkpoint, beside the weights, or in the checkpoint whose engine's files were named.

    Raises:
        UserError: there is none.
    """
    weights = opened.weights.path
    beside = weights if weights.is_dir() else weights.parent
    folders = [opened.checkpoint] if opened.checkpoint else [beside, *list(beside.parents)[:2]]
    for folder in folders:
        for name in (MODEL_CONFIG, "config.json"):
            if (folder / name).is_file():
                return folder / name
    raise UserError(
        f"config.json beside the weights in {named}, which says what model they are of",
        f"no such file in {folders[0]}",
        CONVERT,
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _CONFIG_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes")
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict) or values.get("architecture", ARCHITECTURE) != ARCHITECTURE:
            raise ValueError(f"not a JSON object that describes a {ARCHITECTURE}")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"the config of a model in {path}", f"{str(error)[:200]}", CONVERT) from error
    return values


def _build(values: dict[str, Any], path: Path) -> MultimodalMMDiT:
    from mmldlm.models import MultimodalMMDiT

    known = {key: value for key, value in values.items() if key in ModelConfig.model_fields}
    try:
        return MultimodalMMDiT(ModelConfig(**known))
    except ValidationError as error:
        raise UserError(f"a valid config of a model in {path}", str(error), CONVERT) from error


def _check_names(
    model: MultimodalMMDiT, shapes: dict[str, tuple[int, ...]], config_path: Path, weights: WeightSource
) -> None:
    own = model.state_dict()
    wrong = [
        f"{name}: {shapes.get(name, 'missing')}, expected {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if shapes.get(name) != tuple(tensor.shape)
    ] + [f"{name}: not a tensor of this model" for name in shapes if name not in own]
    if wrong:
        raise UserError(
            f"the tensors of the model in {config_path}",
            f"{len(wrong)} that differ in {weights.path}: " + "; ".join(wrong[:5]),
            "the config and the weights must come from the same run: restore them as they were saved",
        )


@torch.no_grad()
def _copy_weights(model: MultimodalMMDiT, weights: WeightSource, sources: dict[str, str]) -> None:
    own = model.state_dict()
    for name, source in sources.items():
        own[name].copy_(as_torch(weights.read(source), weights.tensors[source].dtype))
    weights.finish()
