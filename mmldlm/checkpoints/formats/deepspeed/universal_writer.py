"""Write what DeepSpeed's ds_to_universal makes, from a checkpoint of any engine, in one pass and
bounded memory.

    latest_universal                                 the word "universal"
    universal/*_model_states.pt      those of the source, or new ones if it has none
    universal/zero/<parameter>/{fp32,exp_avg,exp_avg_sq}.pt, and step.pt for ZeRO-1 and 2; no
    exp_avg_sq.pt for Muon's
    universal/zero/optimizer_state.pt                the groups' settings, and the step

DeepSpeed then loads it at another world size with {"checkpoint": {"load_universal": true}}; with
Muon, only what came from ZeRO-1 and 2. The loss scaler, a Python object that DeepSpeed would
unpickle, is left out: DeepSpeed keeps its own. Unlike DeepSpeed's tool this writer follows
param_shapes, which is correct under round_robin_gradients too.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.formats.deepspeed.files import param_shapes
from mmldlm.checkpoints.formats.deepspeed.reader import ZeroCheckpoint
from mmldlm.checkpoints.formats.deepspeed.universal_reader import (
    OPTIMIZER_STATE,
    folders_of_parameters,
)
from mmldlm.checkpoints.formats.deepspeed.writer import (
    LAYOUT,
    ZeroTarget,
    flat_groups_of,
    plan_model_states,
)
from mmldlm.checkpoints.formats.optimizer_metadata import (
    PLAIN_SCALER,
    OptimizerMetadata,
    plain_scaler,
)
from mmldlm.checkpoints.formats.torch_save.pickler import TensorSpec, scalar
from mmldlm.checkpoints.formats.torch_save.reader import TorchFile
from mmldlm.checkpoints.formats.torch_save.writer import (
    TorchFileLayout,
    TorchFileWriter,
    write_torch,
)
from mmldlm.checkpoints.formats.weight_source import WeightSource
from mmldlm.checkpoints.formats.write_plan import WEIGHT, WritePlan, WriteSegment
from mmldlm.checkpoints.layout import UNIVERSAL_TAG, ZERO_TAG


def plan_universal(source: WeightSource, metadata: OptimizerMetadata, folder: Path) -> WritePlan:
    """Return the plan of universal/zero/, and of the model files if the source has none, in
    `folder`.
    """
    out, plan, stage = folder / UNIVERSAL_TAG, WritePlan(), stage_of(source)
    folders = folders_of_parameters(out / ZERO_TAG, source.tensors, source.path)
    for name, info in source.tensors.items():
        if info.kind != "trainable":
            # DeepSpeed's tool writes these for ZeRO-1 and 2 only, widened; its loader reads them
            # from the model files.
            if stage < 3:
                tensor = TensorSpec("float32", info.shape)
                _add_file(
                    plan,
                    info.alias_of or name,
                    WEIGHT,
                    folders[name] / "fp32.pt",
                    {"param": tensor},
                    tensor,
                )
            continue
        # ZeRO-3 is loaded flat, ZeRO-1 and 2 in the parameter's shape: as ds_to_universal leaves
        # them.
        shape = (info.numel,) if stage == 3 else info.shape
        for what, key in (
            (WEIGHT, "fp32"),
            *((moment, moment) for moment in source.moments_of(name)),
        ):
            tensor = TensorSpec("float32", shape)
            value = tensor if stage == 3 else {"cat_dim": 0, "param": tensor}
            _add_file(plan, name, what, folders[name] / f"{key}.pt", value, tensor)
    if not model_files(source):
        plan_model_states(plan, source, metadata, ZeroTarget(stage, source.world_size or 1), out)
    return plan


def _add_file(
    plan: WritePlan, name: str, what: str, path: Path, value: Any, tensor: TensorSpec
) -> None:
    file = TorchFileWriter(path, [TorchFileLayout(value, path.stem)])
    plan.files.append(file)
    plan.add(name, what, [WriteSegment(file, tensor, 0, 0, tensor.numel)])


def write_other_files(source: WeightSource, metadata: OptimizerMetadata, folder: Path) -> int:
    """Write everything outside the plan; return the bytes of the model files, which are copied and
    verified.
    """
    out, stage, copied = folder / UNIVERSAL_TAG, stage_of(source), 0
    if stage < 3:
        names = [name for group in metadata.groups for name in group.names]
        for path in folders_of_parameters(out / ZERO_TAG, names, source.path).values():
            write_torch(path / "step.pt", scalar(metadata.steps or 0.0))
    write_torch(out / ZERO_TAG / OPTIMIZER_STATE, _optimizer_state(source, metadata, stage))
    for file in model_files(source):
        for record in file.records:
            file.check_record(record)
        shutil.copyfile(file.path, out / file.path.name)
        copied += file.file_size
    (folder / "latest_universal").write_text(UNIVERSAL_TAG)
    return copied


def stage_of(source: WeightSource) -> int:
    """Return the stage of the new checkpoint: the source's, or 2, which ZeRO-1 loads too."""
    return source.stage or 2


def model_files(source: WeightSource) -> list[TorchFile]:
    """Return the source's own model files if they are those of ZeRO-1, 2 or 3."""
    if not isinstance(source, ZeroCheckpoint) or not source.stage:
        return []
    return [file for file in source.files if file.path.name.endswith("model_states.pt")]


def _optimizer_state(
    source: WeightSource, metadata: OptimizerMetadata, stage: int
) -> dict[str, Any]:
    saved = {key: value for key, value in metadata.optimizer.items() if key != "loss_scaler"}
    saved[PLAIN_SCALER] = plain_scaler(metadata.optimizer["loss_scaler"])
    owner = {name: number for number, group in enumerate(metadata.groups) for name in group.names}
    owners = [owner[next(iter(names))] for names in _flat_groups(source, metadata, stage)]
    groups = [
        {**group.settings, "params": [flat for flat, of in enumerate(owners) if of == number]}
        for number, group in enumerate(metadata.groups)
    ]
    state = {**saved, "ds_version": LAYOUT, "param_groups": groups}
    if stage == 3:
        state["optimizer_state_dict"] = {
            "state": {0: {"step": scalar(metadata.steps or 0.0)}},
            "param_groups": groups,
        }
    return state


def _flat_groups(
    source: WeightSource, metadata: OptimizerMetadata, stage: int
) -> list[Iterable[str]]:
    """Return the names in each flat group that param_shapes of the model files lists."""
    files = model_files(source)
    if files:
        return list(param_shapes(files[0], files[0].load_dict()))
    return [
        names
        for _, names in flat_groups_of(source, metadata, ZeroTarget(stage, source.world_size or 1))
    ]
