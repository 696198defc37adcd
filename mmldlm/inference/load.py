"""Load a model for sampling and evaluation from a run, a checkpoint of any engine, a model.pt or a
converted folder.

The weights are copied from the files into the model; nothing is written or unpickled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import nn

from mmldlm.checkpoints.formats.open import open_source, reports_deletion
from mmldlm.checkpoints.formats.weight_source import OpenedCheckpoint, WeightSource
from mmldlm.checkpoints.init_from import as_torch
from mmldlm.checkpoints.manifest import MODEL_CONFIG
from mmldlm.config.renamed_keys import is_removed_weight
from mmldlm.config.task_names import DEFAULT_TASK, TASK_NAMES
from mmldlm.data.encoders.model_files import read_tokenizer
from mmldlm.data.encoders.specs import EncoderIdentity
from mmldlm.data.manifest import CodecIdentity
from mmldlm.errors import UserError
from mmldlm.models.base import BaseTransformer
from mmldlm.models.pretrained_io import COPY_AGAIN, check_shapes, checked_section, read_values
from mmldlm.tasks.registry import find_task
from mmldlm.tasks.text_task import Pretrained, TextTask
from mmldlm.utils.formatting import first_line
from mmldlm.utils.hub import model_path
from mmldlm.utils.validation import find_problems

CONVERT = (
    "name a run or a checkpoint of mmldlm, or create the folder with `mmldlm convert RUN/latest"
    " OUT`"
)


def load_model(
    path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Any, dict[str, Any], Path, TextTask]:
    """Load the weights, not their moving average (as in `mmldlm convert` without --ema).

    Args:
        path: RUN, RUN/latest, a step folder, a model.pt, or a folder written by `mmldlm convert`.
        device: Device of the model.
        dtype: Type of the weights; the task's buffers (latent statistics) stay as they are.

    Returns:
        The model in eval mode, its config.json as a dict, the path of that file (the tokenizer is
        next to it), and the task that trained it.

    Raises:
        UserError: an unreadable, corrupt or unsafe file, weights that do not match the config, or
            a task whose models are not sampled, or a device that this machine lacks.
    """
    device = usable_device(device)
    opened = open_source(path)
    with opened.weights as weights:
        config_path = _find_config(opened, path)
        values = read_values(config_path)
        task = _task_of(values, config_path)
        config_class: Any = task.config_class.model_fields["model"].annotation
        config = checked_section(values, config_class, config_path)
        shapes = {name: info.shape for name, info in weights.tensors.items()}
        model_class = task.model_class()
        # Before anything is allocated: a corrupt config may name any size.
        check_shapes(model_class, config, shapes, config_path)
        model = model_class(config)
        _copy_weights(model, weights)
        if isinstance(model, BaseTransformer):
            model.check_latent_statistics(weights.path)
    buffers = {name: model.get_buffer(name).clone() for name in task.buffers}
    model.to(device=device, dtype=dtype)
    for name, buffer in buffers.items():
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
    task: Any = find_task(name) if isinstance(name, str) and name in TASK_NAMES else None
    if task is None or not task.samplers:
        raise UserError(
            f"a model of one of the tasks {', '.join(TASK_NAMES)}, which can be sampled",
            f"task={name} in {config_path}",
            "convert it with `mmldlm convert` and sample it with the library that it belongs to",
        )
    if values.get("architecture", task.architecture) != task.architecture:
        architecture = f"{values['architecture']!r}"
        raise UserError(
            f"the config of a {task.architecture} in {config_path}", architecture, CONVERT
        )
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
    state = model.state_dict()
    # Of tied weights, one name is enough: they share their memory.
    for name, info in weights.tensors.items():
        if not is_removed_weight(name):
            state[name].copy_(as_torch(weights.read(name), info.dtype))
    weights.finish()


@reports_deletion
def load_pretrained(
    path: str | Path,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    revision: str | None = None,
) -> Pretrained:
    """Load a model and its settings from a run, checkpoint or converted folder.

    Args:
        path: A run, RUN/latest, a checkpoint of any engine, a model.pt, or a folder written by
            `mmldlm convert`, here or on the Hugging Face hub (OWNER/NAME). From a checkpoint the
            weights are read, not their moving average (as in `mmldlm convert` without --ema).
        revision: Branch, tag or commit of a model on the hub.

    Raises:
        UserError: unreadable or corrupt files, a missing config, tokenizer or diffusion settings,
            a tokenizer with another vocabulary, or a checkpoint that its run deletes meanwhile.
    """
    model, values, config_path, task = load_model(model_path(path, revision), device, dtype)
    sections: dict[str, Any] = {"text_diffusion": None, "latent_diffusion": None}
    for key in sections:
        if key not in task.config_class.model_fields:
            continue
        if not isinstance(values.get(key), dict):
            raise UserError(
                f'"{key}" in {config_path}: the diffusion settings the model was trained with',
                "no such key",
                f"{CONVERT}; other settings than those of training would give nonsense without an"
                " error",
            )
        section_class: Any = task.config_class.model_fields[key].annotation
        try:
            sections[key] = section_class(**values[key])
        except ValidationError as error:
            raise UserError(f'a valid "{key}" in {config_path}', str(error), CONVERT) from error
    training, encoder = values.get("training") or {}, values.get("encoder")
    try:
        settings = _TrainingSettings(**training)
    except (ValidationError, TypeError) as error:
        raise UserError(f'a valid "training" in {config_path}', str(error), COPY_AGAIN) from error
    if encoder is not None and (problem := find_problems(EncoderIdentity, encoder, "encoder")):
        raise UserError(f'a valid "encoder" in {config_path}', problem, COPY_AGAIN)
    image = values.get("image")
    if image is not None and (problem := find_problems(CodecIdentity, image)):
        raise UserError(f'a valid "image" in {config_path}', problem, COPY_AGAIN)
    return Pretrained(
        model,
        _load_tokenizer(config_path.parent, model),
        sections["text_diffusion"],
        sections["latent_diffusion"],
        settings.mode_weights,
        settings.condition_dropout,
        settings.l2t_condition_noise,
        encoder,
        Path(path),
        task,
        image,
        config_path.parent,
    )


class _TrainingSettings(BaseModel):
    """Keys of "training" in config.json that sampling uses; others are ignored."""

    mode_weights: dict[str, float] | None = None
    condition_dropout: float | None = None
    l2t_condition_noise: float = 0.0


def _load_tokenizer(folder: Path, model: Any) -> Any:
    # In a checkpoint, and in folders converted until 0.1.0, it is in a folder of its own.
    path = folder / "tokenizer"
    if not path.is_dir():
        path = folder
    if not (path / "tokenizer_config.json").is_file():
        raise UserError(f"the tokenizer in {folder}", "no tokenizer_config.json", CONVERT)
    from transformers import PreTrainedConfig

    # Without a config transformers reads the model's, and warns of a type that it does not know.
    options = {"config": PreTrainedConfig()}
    tokenizer = read_tokenizer(path, f"a tokenizer in {path}", CONVERT, **options)
    config = model.config
    expected = {
        key: getattr(config, key) for key in ("mask_token_id", "pad_token_id", "eos_token_id")
    }
    token_ids = {key: getattr(tokenizer, key) for key in expected}
    if token_ids != expected or len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer the model was trained with in {path}: {expected}, at most"
            f" {config.vocab_size} tokens",
            f"{token_ids}, {len(tokenizer)} tokens",
            CONVERT,
        )
    # As in preparation: "[MASK]" in a text is six characters, not a mask.
    tokenizer.split_special_tokens = True
    return tokenizer


def usable_device(name: str | None) -> str:
    """Return a device that exists; by default cuda if available, else cpu.

    Raises:
        UserError: a device that this machine or this build of torch lacks.
    """
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        # A tensor of the device `meta` has no values to copy.
        torch.empty(1, device=name).cpu()
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise UserError(
            f"a device (--device) that this machine has: {', '.join(devices)}",
            f"{name}: {first_line(error)}",
            "omit --device; where a GPU is missing, `nvidia-smi` and `python -c 'import torch;"
            " print(torch.version.cuda)'` say whether driver and torch have it",
        ) from error
    return name
