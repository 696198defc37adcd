"""The files of a universal checkpoint (ds_to_universal), one per parameter and state:

DIR/zero/<parameter>/{fp32,exp_avg,exp_avg_sq}.pt    {"param": tensor} from ZeRO-1 and 2;
                                                     a bare flat tensor from ZeRO-3
DIR/zero/optimizer_state.pt                          the groups (Muon has no exp_avg_sq.pt)
DIR/*_model_states.pt                                those of the source, with all buffers
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.files.dtypes import WIDE_FLOATS, numel
from mmldlm.checkpoints.files.torch_file import TorchFile, corrupt_file_error
from mmldlm.checkpoints.files.unpickler import TensorRef
from mmldlm.checkpoints.formats.deepspeed_counters import read_scalar
from mmldlm.checkpoints.formats.deepspeed_files import missing_file_error
from mmldlm.checkpoints.formats.optimizer import check_no_other_moment
from mmldlm.checkpoints.formats.weight_source import (
    FileRange,
    TensorInfo,
    WeightSource,
    whole_tensor,
)
from mmldlm.checkpoints.manifest import ZERO_TAG
from mmldlm.errors import UserError
from mmldlm.utils.moments import MOMENTS, moment_keys
from mmldlm.utils.paths import check_distinct, path_inside

OPTIMIZER_STATE = "optimizer_state.pt"
# The files in the folder of a parameter, without .pt.
PARAMETER_FILES = ("fp32", *MOMENTS, "step")


def is_universal(folder: Path) -> bool:
    """Return whether a folder of model_states files stores its optimizer in one folder per
    parameter.
    """
    # The name of a parameter may contain slashes.
    return any((folder / ZERO_TAG).rglob("fp32.pt"))


def folders_of_parameters(zero: Path, names: Iterable[str], listed_in: Path) -> dict[str, Path]:
    """Return name -> folder of each parameter below DIR/zero: for the reader and the writer alike.

    Raises:
        UserError: a name that leaves the folder or is not valid, or names whose files would
            collide; it names `listed_in`.
    """
    try:
        folders = {name: path_inside(zero, name) for name in names}
        check_distinct(
            [OPTIMIZER_STATE, *(f"{name}/{key}.pt" for name in folders for key in PARAMETER_FILES)]
        )
    except ValueError as error:
        raise UserError(
            f"parameters in {listed_in} whose names are those of folders, which a universal"
            " checkpoint makes of them",
            str(error),
            "rename that parameter in the model, or take another target than universal (--to"
            " zero2, --to safetensors)",
        ) from error
    return folders


def add_universal(
    source: WeightSource, groups: list[dict[str, tuple[int, ...]]], with_moments: bool
) -> None:
    """Add the fp32 masters of all parameters in `groups` (param_shapes), and the moments if
    requested.

    Raises:
        UserError: missing or damaged files, or states of some parameters only.
    """
    folder = source.path / ZERO_TAG
    shapes = {name: shape for group in groups for name, shape in group.items()}
    folders = folders_of_parameters(folder, shapes, source.path)
    for name, shape in shapes.items():
        source.tensors[name] = TensorInfo(name, "float32", shape, "trainable")
        source.parts[name] = _state(source, folders[name], name, "fp32", shape)
    if not with_moments or not any(
        (folders[name] / f"{MOMENTS[0]}.pt").exists() for name in shapes
    ):
        return
    for group, keys in zip(groups, _moment_keys(source, folder, len(groups))):
        for name, shape in group.items():
            saved = [key for key in MOMENTS if (folders[name] / f"{key}.pt").exists()]
            check_no_other_moment(folders[name], saved, keys, name)
            for key in keys:
                source.moments.setdefault(key, {})[name] = _state(
                    source, folders[name], name, key, shape
                )


def universal_steps(source: WeightSource, names: list[str]) -> list[tuple[Path, float]]:
    """Return (file, the optimizer's step count in it) of every file that records one.

    ZeRO-1 and 2 have a step.pt for each parameter, ZeRO-3 has one count in optimizer_state.pt.
    """
    folder = source.path / ZERO_TAG
    paths = [
        path / "step.pt" for path in folders_of_parameters(folder, names, source.path).values()
    ]
    steps = []
    for path in (path for path in (folder / OPTIMIZER_STATE, *paths) if path.exists()):
        with TorchFile(path, source.options.random_access) as file:
            value = file.load()
            if path.name == OPTIMIZER_STATE:
                value = value.get("optimizer_state_dict") if isinstance(value, dict) else None
                value = value.get("state") if isinstance(value, dict) else None
                value = next(iter(value.values()), None) if isinstance(value, dict) else None
                value = value.get("step") if isinstance(value, dict) else None
            step = read_scalar(file, value)
        if step is not None:
            steps.append((path, step))
    return steps


def _moment_keys(source: WeightSource, folder: Path, count: int) -> list[tuple[str, ...]]:
    """Return which moments each of the `count` flat groups has; a group lists its flat groups as
    its parameters.
    """
    keys: list[tuple[str, ...]] = [MOMENTS] * count
    if not (folder / OPTIMIZER_STATE).exists():
        return keys
    file = TorchFile(folder / OPTIMIZER_STATE, source.options.random_access)
    source.files.append(file)
    try:
        for table in file.load_dict().get("param_groups") or []:
            for index in table["params"]:
                keys[index] = moment_keys(table)
    except (TypeError, AttributeError, LookupError) as error:
        raise corrupt_file_error(
            file.path, f"param_groups that do not fit {count} flat groups ({error!r})"
        ) from error
    return keys


def _state(
    source: WeightSource, folder: Path, name: str, key: str, shape: tuple[int, ...]
) -> list[FileRange]:
    path = folder / f"{key}.pt"
    if not os.path.lexists(path):
        raise missing_file_error(path.parent, f"{key}.pt of {name}", "no such file")
    file = TorchFile(path, source.options.random_access)
    source.files.append(file)
    value: Any = file.load()
    ref = value.get("param") if isinstance(value, dict) else value
    if (
        not isinstance(ref, TensorRef)
        or ref.shape not in (shape, (numel(shape),))
        or not ref.is_contiguous
    ):
        found = (
            f"a tensor of shape {ref.shape}"
            if isinstance(ref, TensorRef)
            else f"a {type(ref).__name__}"
        )
        raise corrupt_file_error(path, f"{found} instead of {key} of {name} {shape}")
    if ref.dtype not in WIDE_FLOATS:
        raise corrupt_file_error(path, f"{key} of {name} in {ref.dtype}")
    file.check_ref(ref, f"{key} of {name}")
    return whole_tensor(file, ref)
