"""What a training checkpoint of another format needs besides its tensors: the metadata of the
optimizer, and the files of the run around it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.files.torch_file import corrupt_file_error
from mmldlm.checkpoints.formats import registry
from mmldlm.checkpoints.formats.deepspeed_writer import model_files
from mmldlm.checkpoints.formats.ema import list_ema_files
from mmldlm.checkpoints.formats.export_plan import DTYPE_NAMES
from mmldlm.checkpoints.formats.optimizer import OptimizerMetadata
from mmldlm.checkpoints.formats.weight_source import OpenedCheckpoint
from mmldlm.checkpoints.manifest import (
    ENGINE_FOLDER,
    EVALUATION,
    SKIPS,
    describe_file,
    read_manifest,
)
from mmldlm.checkpoints.output_folder import copy_file
from mmldlm.errors import UserError
from mmldlm.utils.formatting import count_noun

_RNG = re.compile(r"rng_state_rank(\d+)\.pt")


def optimizer_for(
    opened: OpenedCheckpoint, to: str, dtype: str | None
) -> OptimizerMetadata | None:
    """Return the metadata of a source's optimizer for a target; None for a DCP folder of a source
    that does not record which weights were trained.

    Args:
        dtype: Dtype of the low-precision copy, as of ConvertOptions.

    Raises:
        UserError: the source has no optimizer that the target can hold, or a dtype is given that
            the target does not use.
    """
    _check_dtype_is_used(opened, to, dtype)
    if to == "dcp" and opened.weights.unclassified:
        return None
    optimizer = registry.read_optimizer_metadata(opened)
    optimizer.compute_dtype = DTYPE_NAMES[dtype or "keep"] or optimizer.compute_dtype
    if optimizer.steps is None and opened.weights.moments and to not in ("dcp", "fsdp"):
        raise UserError(
            f"the step count of the optimizer in {opened.weights.path}",
            "moments without it",
            "give the checkpoint folder of the run, whose training_state.json has it",
        )
    if to == "universal":
        _check_universal(opened, optimizer)
    return optimizer


def _check_dtype_is_used(opened: OpenedCheckpoint, to: str, dtype: str | None) -> None:
    """Raise UserError for a dtype where no low-precision copy of the weights is written."""
    if dtype in (None, "keep"):
        return
    if to in ("ddp", "fsdp", "dcp"):
        reason = "which keeps every weight as the source has it, and masters in fp32"
    elif to == "universal" and model_files(opened.weights):
        reason = "which copies the model files of a ZeRO source as they are"
    else:
        return
    raise UserError(
        "--dtype for a target in which weights are rounded",
        f"--dtype {dtype} --to {to}, {reason}",
        "leave --dtype out; --to safetensors or model.pt writes weights of another dtype",
    )


def _check_universal(opened: OpenedCheckpoint, optimizer: OptimizerMetadata) -> None:
    """Check that there is what a universal checkpoint needs, and note what DeepSpeed does not load
    from one.

    Raises:
        UserError: the optimizer has not stepped, or its settings are unknown.
    """
    if optimizer.steps is None:
        raise UserError(
            f"a checkpoint with the state of an optimizer at {opened.weights.path}",
            f"{opened.engine} without the state of an optimizer that has stepped",
            "give a later checkpoint, or --to zero2, which does not need one",
        )
    if not all(group.settings for group in optimizer.groups):
        raise UserError(
            f"optimizer settings in {opened.weights.path}, without which DeepSpeed cannot load a"
            " universal checkpoint",
            "none (elastic_checkpoint keeps no param_groups, and older DCP folders none either)",
            "save without elastic_checkpoint; training.resume of mmldlm needs no settings and no"
            " conversion",
        )
    kinds = [info.kind for info in opened.weights.tensors.values()]
    counts = [(kinds.count("frozen"), "frozen weight"), (kinds.count("buffer"), "buffer")]
    if lost := " and ".join(count_noun(count, noun) for count, noun in counts if count):
        optimizer.notes.append(
            "DeepSpeed's own loader of universal checkpoints loads neither frozen weights nor"
            f" buffers ({lost} here): its model keeps those it was built with. They are in OUT,"
            " and mmldlm loads them; for DeepSpeed take --to zero1, zero2 or zero3, or load them"
            " yourself from --to safetensors"
        )
    has_muon = any("muon" in group.settings for group in optimizer.groups)
    if has_muon and opened.weights.stage == 3:
        optimizer.notes.append(
            "DeepSpeed's own ZeRO-3 loader cannot load this: it expects exp_avg_sq of all weights,"
            " and gives all groups the settings of the first. mmldlm can. For DeepSpeed convert"
            " --to zero2, then --to universal"
        )


def list_run_files(opened: OpenedCheckpoint, world: int) -> dict[str, dict[str, int]]:
    """Return name -> entry of the manifest of everything in an mmldlm checkpoint that no engine
    wrote, and of the moving average, which fits any engine.
    """
    source = opened.checkpoint
    assert source is not None
    averages = {
        path.relative_to(source).as_posix() for path in list_ema_files(source / ENGINE_FOLDER)
    }

    def is_copied(name: str) -> bool:
        match = _RNG.fullmatch(name)
        is_of_engine = name.startswith(f"{ENGINE_FOLDER}/") and name not in averages
        return not is_of_engine and (match is None or int(match[1]) < world)

    listed = read_manifest(source)["files"]
    return {name: entry for name, entry in listed.items() if is_copied(name)}


def copy_run(opened: OpenedCheckpoint, folder: Path, world: int) -> dict[str, Any]:
    """Copy the files of list_run_files.

    The copies are compared with the old manifest before the new one lists them.

    Returns:
        What the old manifest says of the weights in any format, for the new one.

    Raises:
        UserError: a file has changed since it was saved.
    """
    source = opened.checkpoint
    assert source is not None
    for name, entry in list_run_files(opened, world).items():
        copy_file(source, source / name, folder / name)
        if describe_file(folder / name)["crc32"] != entry["crc32"]:
            raise corrupt_file_error(
                source / name,
                "it has changed since it was saved (its CRC-32 is not the manifest's)",
            )
    manifest = read_manifest(source)
    return {name: manifest[name] for name in (EVALUATION, SKIPS) if name in manifest}
