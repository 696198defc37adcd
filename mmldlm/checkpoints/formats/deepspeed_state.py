"""`deepspeed.pt`, next to the files of other formats: what DeepSpeed records besides tensors.

Counters, lr_scheduler, the caller's client state, the loss scaler and the config have no place in
torch's DCP or in an optimizer.pt. Without them DeepSpeed would resume at step 0, with a fresh
schedule, after ZeRO -> fsdp or ddp -> ZeRO.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmldlm.checkpoints.files.torch_file import TorchFile, corrupt_file_error
from mmldlm.checkpoints.files.torch_writer import write_torch
from mmldlm.checkpoints.formats.optimizer import (
    OptimizerMetadata,
    copied_values,
    plain_scaling,
    read_scaling,
)
from mmldlm.checkpoints.manifest import DEEPSPEED_STATE


def write_deepspeed_state(metadata: OptimizerMetadata | None, folder: Path) -> None:
    """Write deepspeed.pt into `folder` if DeepSpeed saved the source; plain values and tensors
    alone.
    """
    if metadata is None or not metadata.is_of_deepspeed:
        return
    value = {
        "model_states": metadata.model_states,
        "optimizer": plain_scaling(metadata),
        "ds_config": metadata.ds_config,
    }
    write_torch(folder / DEEPSPEED_STATE, value)


def add_deepspeed_state(metadata: OptimizerMetadata, folder: Path) -> OptimizerMetadata:
    """Add what the deepspeed.pt in `folder` holds, if there is one; return the metadata.

    Raises:
        UserError: the file is damaged, unsafe, or something else.
    """
    path = folder / DEEPSPEED_STATE
    if not path.exists():
        return metadata
    with TorchFile(path) as file:
        saved = file.load_dict()
        parts: list[Any] = [saved.get(key) for key in ("model_states", "optimizer", "ds_config")]
        model_states, optimizer, config = parts
        if not all(isinstance(part, dict) for part in parts):
            raise corrupt_file_error(path, "no model_states, optimizer and ds_config in it")
        metadata.model_states = {**metadata.model_states, **_copied(file, model_states)}
        metadata.optimizer |= read_scaling(optimizer)
        metadata.ds_config = _copied(file, config)
    metadata.is_of_deepspeed = True
    return metadata


def _copied(file: TorchFile, value: dict) -> dict[str, Any]:
    try:
        return copied_values(file, value, "an entry")
    except ValueError as error:
        raise corrupt_file_error(file.path, "an object of a class in it") from error
