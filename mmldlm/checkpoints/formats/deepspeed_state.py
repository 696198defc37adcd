"""What DeepSpeed records besides tensors, kept in `deepspeed.pt` beside the files of other
formats.

Counters, lr_scheduler, the caller's client state, the loss scaler and the config have no place in
torch's DCP or in an optimizer.pt. Without them DeepSpeed would resume at step 0, with a fresh
schedule, after ZeRO -> fsdp or ddp -> ZeRO.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmldlm.checkpoints.formats.optimizer_metadata import (
    COPIED_KEYS,
    PLAIN_SCALER,
    PLAIN_TYPES,
    OptimizerMetadata,
    copied_values,
    loss_scaler,
    plain_scaler,
)
from mmldlm.checkpoints.formats.torch_save.reader import TorchFile, corrupt_file_error
from mmldlm.checkpoints.formats.torch_save.writer import write_torch
from mmldlm.checkpoints.layout import DEEPSPEED_STATE


def write_deepspeed_state(metadata: OptimizerMetadata | None, folder: Path) -> None:
    """Write deepspeed.pt into `folder` if DeepSpeed saved the source; plain values and tensors
    alone.
    """
    if metadata is None or not metadata.is_of_deepspeed:
        return
    value = {
        "model_states": metadata.model_states,
        "optimizer": {
            **{key: metadata.optimizer[key] for key in COPIED_KEYS if key in metadata.optimizer},
            PLAIN_SCALER: plain_scaler(metadata.optimizer["loss_scaler"]),
        },
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
        model_states, optimizer, config = (
            saved.get(key) for key in ("model_states", "optimizer", "ds_config")
        )
        if not all(isinstance(part, dict) for part in (model_states, optimizer, config)):
            raise corrupt_file_error(path, "no model_states, optimizer and ds_config in it")
        metadata.model_states = {**metadata.model_states, **_copied(file, model_states)}
        copied = {
            key: optimizer[key]
            for key in COPIED_KEYS
            if key in optimizer and type(optimizer[key]) in PLAIN_TYPES
        }
        metadata.optimizer.update(copied, loss_scaler=loss_scaler(optimizer.get(PLAIN_SCALER)))
        metadata.ds_config = _copied(file, config)
    metadata.is_of_deepspeed = True
    return metadata


def _copied(file: TorchFile, value: dict) -> dict[str, Any]:
    try:
        return copied_values(file, value, "an entry")
    except ValueError as error:
        raise corrupt_file_error(file.path, "an object of a class in it") from error
