"""The files of a DeepSpeed checkpoint and the fields of the dicts in them, all validated.

* Fields: names, shapes, stages, flat groups.
* Partitions: how ZeRO cuts parameters over the ranks.
"""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.files.dtypes import WIDE_FLOATS
from mmldlm.checkpoints.files.torch_file import TorchFile, corrupt_file_error
from mmldlm.checkpoints.files.unpickler import OpaqueObject, TensorRef
from mmldlm.checkpoints.formats.weight_source import FileRange, RegularParts
from mmldlm.checkpoints.manifest import ENGINE_FOLDER, UNIVERSAL_TAG, ZERO_TAG
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some
from mmldlm.utils.input_files import read_bytes
from mmldlm.utils.paths import path_inside
from mmldlm.utils.run_files import LATEST

# macOS puts a file of attributes, "._" and the name, next to every file that it copies to other
# systems.
_STATES = re.compile(r"(?!\._).*(model|optim)_states\.pt")
_OPTIM = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_MODEL3 = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OTHER_FRAMEWORKS = re.compile(r"(layer_\d+.*|.*expert_\d+.*)[_-](model|optim)_states\.pt")


# What DeepSpeed's loader of universal checkpoints reads in place of `latest`.
LATEST_UNIVERSAL = "latest_universal"
_SUBFOLDERS = (
    ZERO_TAG,
    ENGINE_FOLDER,
    f"{ENGINE_FOLDER}/{ZERO_TAG}",
    UNIVERSAL_TAG,
    f"{ENGINE_FOLDER}/{UNIVERSAL_TAG}",
)


def find_states(path: Path) -> Path | None:
    """Return the folder with the *_states.pt files for an engine, tag or step folder.

    Raises:
        UserError: a `latest` or `latest_universal` file names a tag that does not exist.
    """
    if list_states(path):
        return path
    latest = next(
        (path / name for name in (LATEST, LATEST_UNIVERSAL) if (path / name).is_file()), None
    )
    if latest is not None:
        tag = read_bytes(latest, 1 << 16).decode(errors="replace").strip()
        try:
            folder = path_inside(path, tag)
        except ValueError:
            return None
        if not list_states(folder):
            raise UserError(
                f"the checkpoint {tag!r} that {latest} names",
                "no *_states.pt files there",
                f"give the folder of the checkpoint itself, one of those in {path}",
            )
        return folder
    return next((path / name for name in _SUBFOLDERS if list_states(path / name)), None)


def list_states(folder: Path) -> list[Path]:
    """Return the files of a folder that are DeepSpeed's by their names; other programs' may end in
    _states.pt, too.
    """
    return sorted(path for path in folder.glob("*_states.pt") if _STATES.fullmatch(path.name))


def list_files(folder: Path) -> tuple[dict[int, Path], dict[int, Path], dict[int, Path]]:
    """List a checkpoint's files.

    Returns:
        rank -> optimizer file; {0: model file of ZeRO-0, 1 or 2}; rank -> model file of ZeRO-3.

    Raises:
        UserError: tensor, pipeline or expert parallelism, files of two saves, or no model file.
    """
    optim: dict[int, Path] = {}
    model: dict[int, Path] = {}
    model3: dict[int, Path] = {}
    paths = list_states(folder)
    # Pipeline stages have tensor-parallel names, too: what is not ZeRO's is named first.
    paths.sort(key=lambda path: _OTHER_FRAMEWORKS.fullmatch(path.name) is None)
    for path in paths:
        name = path.name
        if match := _OPTIM.fullmatch(name):
            rank, mp, table = int(match[2]), int(match[3]), optim
        elif match := _MODEL3.fullmatch(name):
            rank, mp, table = int(match[1]), int(match[2]), model3
        elif match := _MODEL.fullmatch(name):
            rank, mp, table = 0, int(match[1]), model
        else:
            kind = (
                "pipeline or expert parallel" if _OTHER_FRAMEWORKS.fullmatch(name) else "unknown"
            )
            fix = "convert such checkpoints with DeepSpeed's own tools"
            raise UserError(f"ZeRO files only in {folder}", f"{name} ({kind})", fix)
        if mp != 0:
            fix = "merge the tensor-parallel parts with the tool that made them"
            raise UserError(
                f"a checkpoint without tensor parallelism in {folder}",
                f"{name} (mp_rank {mp})",
                fix,
            )
        if rank in table:
            found_two = f"a second file of rank {rank}, next to {table[rank].name}"
            raise corrupt_file_error(
                path, found_two, "remove the one that belongs to another save"
            )
        table[rank] = path
    if model and model3:
        found_two = (
            f"model files of ZeRO-3 ({model3[min(model3)].name}) next to one of another stage"
        )
        raise corrupt_file_error(model[0], found_two, "remove the files of the other checkpoint")
    if not model and not model3:
        raise missing_file_error(
            folder, "mp_rank_00_model_states.pt or zero_pp_rank_*_model_states.pt", "neither"
        )
    return optim, model, model3


def missing_file_error(folder: Path, expected: str, found: str) -> UserError:
    """Return the error for an incomplete checkpoint."""
    return UserError(
        f"{expected} in {folder}", found, "copy the checkpoint again with all of its files"
    )


def open_named(path: Path, random_access: bool = False) -> TorchFile:
    """Open a rank's file.

    Raises:
        UserError: it was renamed since it was saved.
    """
    file = TorchFile(path, random_access)
    # torch names the zip's top folder after the file; writers that go through a buffer say
    # "archive".
    if file.top not in (path.stem, "archive"):
        file.close()
        renamed = f"it was saved as {file.top}.pt and renamed since: rank files are swapped"
        raise corrupt_file_error(
            path, renamed, "restore the files under the names they were saved with"
        )
    return file


def check_ranks(folder: Path, files: dict[int, Path], world_size: int, what: str) -> None:
    """Check that there is exactly one file per rank.

    Raises:
        UserError: a missing or surplus file.
    """
    # A recorded world size may be any number: no table of its length is built.
    absent = list(islice((rank for rank in range(world_size) if rank not in files), 5))
    extra = sorted(rank for rank in files if rank >= world_size)
    if absent:
        more = " ..." if len(absent) == 5 else ""
        raise missing_file_error(
            folder,
            f"{world_size} {what} files, one per rank",
            f"none for rank(s) {join_some(absent[:4])}{more}",
        )
    if extra:
        found = (
            f"a file of rank {extra[0]}, but the checkpoint is of {world_size} ranks"
            " (dp_world_size)"
        )
        raise corrupt_file_error(
            files[extra[0]], found, "remove the files of an older run with more ranks"
        )


# -- fields ---------------------------------------------------------------------------------------


def inner_optimizer(file: TorchFile) -> dict:
    """Return the optimizer's state in an optim_states file."""
    inner = file.load_dict().get("optimizer_state_dict")
    if not isinstance(inner, dict):
        raise corrupt_file_error(
            file.path, "no optimizer_state_dict in it: not an optimizer file of ZeRO"
        )
    return inner


def count_of(file: TorchFile, state: dict, key: str) -> int:
    """Return an entry that must be a non-negative int."""
    value = state.get(key)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise corrupt_file_error(file.path, f"{key} = {str(value)[:80]} instead of a count")
    return value


def configured_stage(state: dict) -> int:
    """Return zero_optimization.stage of the DeepSpeed config in a model_states file."""
    config = state.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    return stage if isinstance(stage, int) else 0


def saved_stage(file: TorchFile, inner: dict) -> int:
    """Return the ZeRO stage recorded in an optim_states file."""
    stage: Any = inner.get("zero_stage")
    if isinstance(stage, OpaqueObject) and len(stage.args) == 1:
        stage = stage.args[0]
    if stage is None and "single_partition_of_fp32_groups" in inner:
        # BF16_Optimizer does not record its stage.
        stage = 1
    if stage not in (1, 2, 3):
        raise corrupt_file_error(file.path, f"zero_stage {stage!r}")
    return int(stage)


def param_shapes(file: TorchFile, state: dict) -> list[dict[str, tuple[int, ...]]]:
    """Return one dict name -> shape per group, in the order of the flat weights."""
    groups = state.get("param_shapes")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise corrupt_file_error(
            file.path, "no param_shapes in it: the order of the flat weights is unknown"
        )
    for group in groups:
        _check_shapes(file, "param_shapes", group)
    names = [name for group in groups for name in group]
    if len(names) != len(set(names)):
        raise corrupt_file_error(file.path, "param_shapes names a parameter twice")
    return groups


def frozen_shapes(file: TorchFile, state: dict) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the frozen parameters that a model file of ZeRO-2 or 3 records."""
    shapes = state.get("frozen_param_shapes") or {}
    if not isinstance(shapes, dict):
        raise corrupt_file_error(file.path, f"frozen_param_shapes: {str(shapes)[:80]}")
    _check_shapes(file, "frozen_param_shapes", shapes)
    return shapes


def _check_shapes(file: TorchFile, key: str, shapes: dict) -> None:
    for name, shape in shapes.items():
        is_shape = isinstance(shape, tuple) and all(
            type(size) is int and size >= 0 for size in shape
        )
        if not isinstance(name, str) or not is_shape:
            raise corrupt_file_error(
                file.path, f"{key} with {str(name)[:80]!r}: {str(shape)[:80]}"
            )


def buffer_names(state: dict) -> set[str]:
    """Return the names of the buffers in a model_states file."""
    names = state.get("buffer_names")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def flat_groups(file: TorchFile, inner: dict, key: str, count: int) -> list[TensorRef]:
    """Return a rank's flat masters, one per group."""
    flats = inner.get(key)
    if (
        not isinstance(flats, list)
        or len(flats) != count
        or not all(isinstance(flat, TensorRef) for flat in flats)
    ):
        count_found = f"{len(flats)} entries" if isinstance(flats, list) else type(flats).__name__
        raise corrupt_file_error(
            file.path, f"{count_found} in {key} instead of {count} flat tensors (one per group)"
        )
    for flat in flats:
        file.check_ref(flat, key)
        if not flat.is_contiguous or flat.dtype not in WIDE_FLOATS:
            raise corrupt_file_error(
                file.path, f"{key} holds a {flat.dtype} tensor of shape {flat.shape}"
            )
    return flats


def inner_paddings(file: TorchFile, inner: dict, group: int, count: int) -> list[int]:
    """Return the padding after each of a group's `count` parameters, in elements
    (parameter_alignment; mostly 0).
    """
    groups = inner.get("param_alignment_paddings")
    # DeepSpeed before 0.19.8 and BF16_Optimizer record no paddings.
    if groups is None:
        return [0] * count
    try:
        pads = list(groups[group])
    except (TypeError, IndexError, KeyError):
        pads = []
    if len(pads) != count or not all(type(pad) is int and pad >= 0 for pad in pads):
        raise corrupt_file_error(
            file.path,
            f"param_alignment_paddings of group {group}: {str(pads)[:80]}, {count} parameters",
        )
    return pads


# -- Partitions -----------------------------------------------------------------------------------


def slice_sizes(needed: int, world: int) -> list[list[int]]:
    """Return, per rank, the elements of its slice of a flat group with and without the tail
    padding (ZeRO-1 and 2).
    """
    size = -(-needed // (2 * world)) * 2
    return [[size, max(0, min(size, needed - rank * size))] for rank in range(world)]


def slice_parts(
    files: list[TorchFile], flats: list[TensorRef], offset: int, count: int
) -> list[FileRange]:
    """Return [offset, offset + count) of the concatenation of all ranks' flat tensors (ZeRO-1 and
    2).
    """
    parts = []
    base = 0
    for file, flat in zip(files, flats):
        low, high = max(offset, base), min(offset + count, base + flat.numel)
        if low < high:
            parts.append(FileRange(file, flat, low - base, high - low))
        base += flat.numel
    return parts


class GatheredParts(RegularParts):
    """A parameter of `count` elements, cut into equal partitions that start at `offset` on every
    rank (ZeRO-3); the last ranks may have none.
    """

    starts: range

    def __init__(self, files: list[TorchFile], flats: list[TensorRef], offset: int, count: int):
        self._files, self._flats, self._offset, self._count = files, flats, offset, count
        self.starts = range(0, count, max(1, -(-count // len(files))))

    def __getitem__(self, rank):
        count = min(self.starts.step, self._count - self.starts[rank])
        return FileRange(self._files[rank], self._flats[rank], self._offset, count)
