"""The registry of checkpoint formats, and the functions that pick one of them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mmldlm.checkpoints.files.file_io import closed_on_error
from mmldlm.checkpoints.formats.base import CheckpointFormat
from mmldlm.checkpoints.formats.dcp import DcpFormat
from mmldlm.checkpoints.formats.deepspeed import DeepSpeedFormat
from mmldlm.checkpoints.formats.model_pt import ModelPtFormat
from mmldlm.checkpoints.formats.named_optimizer import named_optimizer_metadata
from mmldlm.checkpoints.formats.optimizer import OptimizerMetadata, check_groups
from mmldlm.checkpoints.formats.safetensors import SafetensorsFormat
from mmldlm.checkpoints.formats.weight_source import OpenedCheckpoint, ReadOptions, WeightSource
from mmldlm.errors import UserError
from mmldlm.utils.formatting import is_utf8, join_some

# In the order of detection.
FORMATS: tuple[CheckpointFormat, ...] = (
    DeepSpeedFormat(),
    DcpFormat(),
    ModelPtFormat(),
    SafetensorsFormat(),
)


class Detected(NamedTuple):
    """A format, and the file or folder that it opens."""

    format: CheckpointFormat
    path: Path


def detect(path: Path) -> Detected | None:
    """Return the format of a file or folder; None if it is in none of them."""
    for candidate in FORMATS:
        opened_path = candidate.detect(path)
        if opened_path is not None:
            return Detected(candidate, opened_path)
    return None


def open_path(path: Path, options: ReadOptions) -> WeightSource | None:
    """Open a file or folder of weights; None if it is in no known format.

    Raises:
        UserError: damaged, missing, hostile or mismatched files.
    """
    detected = detect(path)
    if detected is None:
        return None
    if options.key is not None and not detected.format.has_keys:
        raise UserError(
            f"--key {options.key} for a torch.save'd file or a DCP folder, which may hold several"
            " state dicts",
            f"{path}, a checkpoint of {detected.format.name}, which holds one model",
            "leave --key out",
        )
    source = detected.format.open(detected.path, options)
    with closed_on_error(source):
        if invalid := [name for name in source.tensors if not is_utf8(name)]:
            raise UserError(
                f"names of tensors in {path} that are valid text",
                f"{invalid[0][:80]!r}",
                "rename it in the model and save again",
            )
    return source


def writer_of(target: str) -> CheckpointFormat:
    """Return the format that writes a target of manifest.TARGETS."""
    return next(candidate for candidate in FORMATS if target in candidate.targets)


def read_optimizer_metadata(opened: OpenedCheckpoint) -> OptimizerMetadata:
    """Return the optimizer metadata of a source that was opened with its moments.

    Raises:
        UserError: the checkpoint does not record which of its weights were trained, or it is
            damaged.
    """
    source = opened.weights
    if source.unclassified:
        weights = f"weights alone: {join_some(source.unclassified)}"
        reason = source.optimizer_left_out
        raise UserError(
            f"a training checkpoint at {source.path}: which weights were trained, and their"
            " optimizer",
            f"an optimizer that cannot be carried over: {reason}" if reason else weights,
            "write weights alone with --to safetensors, model.pt or dcp",
        )
    if source.named_optimizer is not None:
        metadata = named_optimizer_metadata(opened, source.named_optimizer)
    else:
        detected = detect(source.path)
        assert detected is not None, f"{source.path} has lost its files"
        metadata = detected.format.read_optimizer_metadata(opened)
    check_groups(source, metadata)
    return metadata
