"""Write a DeepSpeed ZeRO-1, 2 or 3 checkpoint of any world size, or a universal one, as DeepSpeed
0.19 saves and loads them, in one pass and bounded memory.

ZeRO (layouts: see deepspeed_reader): the files are those of engine.save_checkpoint in plain
pickles: OrderedDicts are dicts, every tensor has its own storage, ds_config names the new stage.

Universal, as ds_to_universal makes it:

    latest_universal                 the word "universal"
    universal/*_model_states.pt      those of the source, or new ones if it has none
    universal/zero/<parameter>/{fp32,exp_avg,exp_avg_sq}.pt, and step.pt for ZeRO-1 and 2; no
                                     exp_avg_sq.pt for Muon's
    universal/zero/optimizer_state.pt    the groups' settings, and the step

DeepSpeed then loads it at another world size with {"checkpoint": {"load_universal": true}}; with
Muon, only what came from ZeRO-1 and 2. The loss scaler, a Python object that DeepSpeed would
unpickle, is left out: DeepSpeed keeps its own. Unlike DeepSpeed's tool this writer follows
param_shapes, which is correct under round_robin_gradients too.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.files.tensor_writer import TensorSpec
from mmldlm.checkpoints.files.torch_file import TorchFile
from mmldlm.checkpoints.files.torch_writer import (
    GlobalRef,
    ObjectSpec,
    TorchFileLayout,
    TorchFileWriter,
    TorchSize,
    scalar,
    write_torch,
)
from mmldlm.checkpoints.formats.base import WEIGHT, WritePlan, WriteSegment
from mmldlm.checkpoints.formats.deepspeed_files import param_shapes, slice_sizes
from mmldlm.checkpoints.formats.deepspeed_reader import ZeroCheckpoint
from mmldlm.checkpoints.formats.optimizer import OptimizerMetadata, plain_scaling
from mmldlm.checkpoints.formats.universal_folder import OPTIMIZER_STATE, folders_of_parameters
from mmldlm.checkpoints.formats.weight_source import WeightSource
from mmldlm.checkpoints.manifest import SUB_GROUP_SIZE, UNIVERSAL_TAG, ZERO_TAG
from mmldlm.utils.moments import moment_keys

# The version of DeepSpeed with this layout.
LAYOUT = "0.19.8"
_FRAGMENT = GlobalRef("deepspeed.utils.tensor_fragment", "fragment_address")


@dataclass(frozen=True)
class ZeroTarget:
    """Layout of a new ZeRO checkpoint.

    Attributes:
        stage: ZeRO stage (1, 2 or 3).
        world_size: Number of ranks.
        sub_group_size: Size of ZeRO-3's sub-groups in elements.
    """

    stage: int
    world_size: int
    sub_group_size: int = SUB_GROUP_SIZE


def plan_zero(
    source: WeightSource, metadata: OptimizerMetadata, target: ZeroTarget, folder: Path
) -> WritePlan:
    """Return the plan that writes the checkpoint into `folder`."""
    plan = WritePlan()
    plan_model_states(plan, source, metadata, target, folder)
    _plan_optimizer(plan, source, metadata, target, folder)
    return plan


# -- the optimizer's files
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """Elements [start, start + count) of a parameter, stored from element `offset` of a rank's
    flat group.
    """

    name: str
    offset: int
    start: int
    count: int


@dataclass
class _Flat:
    """One flat group of one rank.

    Attributes:
        size: Number of elements with the tail padding.
        held: Number of elements without it.
        pieces: Parameters in the slice.
        gaps: (first element, number) of padding.
    """

    size: int
    held: int
    pieces: list[_Piece]
    gaps: list[tuple[int, int]]


def _flats(source: WeightSource, groups: list[list[str]], target: ZeroTarget) -> list[list[_Flat]]:
    """Return the flat groups of every rank (sub-groups under ZeRO-3)."""
    sizes = {name: source.tensors[name].numel for group in groups for name in group}
    cut, world = _gathered if target.stage == 3 else _sliced, target.world_size
    return [[cut(group, sizes, rank, world) for group in groups] for rank in range(world)]


def _sliced(group: list[str], sizes: dict[str, int], rank: int, world: int) -> _Flat:
    size, held = slice_sizes(sum(sizes[name] for name in group), world)[rank]
    low, pieces, offset = rank * size, [], 0
    for name in group:
        first, last = max(low, offset), min(low + held, offset + sizes[name])
        if first < last:
            pieces.append(_Piece(name, first - low, first - offset, last - first))
        offset += sizes[name]
    return _Flat(size, held, pieces, [(held, size - held)] if size > held else [])


def _gathered(group: list[str], sizes: dict[str, int], rank: int, world: int) -> _Flat:
    pieces, gaps, offset = [], [], 0
    for name in group:
        size = -(-sizes[name] // world)
        held = max(0, min(size, sizes[name] - rank * size))
        pieces.append(_Piece(name, offset, rank * size, held))
        if held < size:
            gaps.append((offset + held, size - held))
        offset += size
    return _Flat(offset, offset, pieces, gaps)


def flat_groups_of(
    source: WeightSource, metadata: OptimizerMetadata, target: ZeroTarget
) -> list[tuple[int, list[str]]]:
    """Return (index of the optimizer's group, names) of every flat group; ZeRO-3 closes one at
    its maximum size.
    """
    flat_groups: list[tuple[int, list[str]]] = []
    for index, group in enumerate(metadata.groups):
        partition_sizes = {
            name: -(-source.tensors[name].numel // target.world_size) for name in group.names
        }
        if target.stage < 3 or target.sub_group_size >= sum(partition_sizes.values()):
            flat_groups.append((index, group.names))
            continue
        names, size = [], 0
        for name in group.names:
            names.append(name)
            size += partition_sizes[name]
            if size >= target.sub_group_size or name == group.names[-1]:
                flat_groups.append((index, names))
                names, size = [], 0
    return flat_groups


def _plan_optimizer(
    plan: WritePlan,
    source: WeightSource,
    metadata: OptimizerMetadata,
    target: ZeroTarget,
    folder: Path,
) -> None:
    numbered = flat_groups_of(source, metadata, target)
    flats = _flats(source, [names for _, names in numbered], target)
    prefix = "bf16_" if metadata.compute_dtype == "bfloat16" else ""
    for rank in range(target.world_size):
        masters, states = [], {}
        padding: list[tuple[TensorSpec, int, int]] = []
        sent: list[tuple[_Flat, str, TensorSpec]] = []
        for index, flat in enumerate(flats[rank]):
            # ZeRO-1 and 2 save masters without the tail's padding, moments with it.
            masters.append(TensorSpec("float32", (flat.held,)))
            sent.append((flat, WEIGHT, masters[-1]))
            if metadata.steps is not None:
                keys = moment_keys(metadata.groups[numbered[index][0]].settings)
                moments = {what: TensorSpec("float32", (flat.size,)) for what in keys}
                states[index] = {"step": scalar(metadata.steps), **moments}
                sent += [(flat, what, tensor) for what, tensor in moments.items()]
        for flat, _, tensor in sent:
            padding += [
                (tensor, first, count)
                for first, count in flat.gaps
                if first + count <= tensor.numel
            ]
        optimizer = {"state": states, "param_groups": _param_groups(metadata, numbered)}
        inner = _inner(source, metadata, target, flats, rank, optimizer, masters)
        value = {
            "optimizer_state_dict": inner,
            "ds_config": ds_config(metadata, target),
            "ds_version": LAYOUT,
        }
        path = folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        file = TorchFileWriter(path, [TorchFileLayout(value, path.stem)], padding)
        plan.files.append(file)
        for flat, what, tensor in sent:
            for piece in flat.pieces:
                plan.add(
                    piece.name,
                    what,
                    [WriteSegment(file, tensor, piece.offset, piece.start, piece.count)],
                )


def _param_groups(
    metadata: OptimizerMetadata, numbered: list[tuple[int, list[str]]]
) -> list[dict[str, Any]]:
    """Return the optimizer's groups, whose parameters are the indices of flat groups."""
    return [
        {
            **group.settings,
            "params": [flat for flat, (owner, _) in enumerate(numbered) if owner == index],
        }
        for index, group in enumerate(metadata.groups)
    ]


def _inner(
    source: WeightSource,
    metadata: OptimizerMetadata,
    target: ZeroTarget,
    flats: list[list[_Flat]],
    rank: int,
    optimizer: dict[str, Any],
    masters: list[TensorSpec],
) -> dict[str, Any]:
    """Return `optimizer_state_dict` of a rank's file."""
    common = {"zero_stage": target.stage, **metadata.optimizer}
    if target.stage == 3:
        count = target.world_size
        return {
            **common,
            "partition_count": count,
            "optimizer_state_dict": optimizer,
            "fp32_flat_groups": masters,
        }
    own_flats = flats[rank]
    return {
        **common,
        "base_optimizer_state": optimizer,
        "single_partition_of_fp32_groups": masters,
        "group_paddings": [flat.size - flat.held for flat in own_flats],
        "param_alignment_paddings": [[0] * len(group.names) for group in metadata.groups],
        "partition_count": [target.world_size] * len(own_flats),
        "ds_version": LAYOUT,
        "param_slice_mappings": [
            {
                piece.name: ObjectSpec(
                    _FRAGMENT, state={"numel": piece.count, "start": piece.offset}
                )
                for piece in flat.pieces
            }
            for flat in own_flats
        ],
    }


# -- the model's files
# ------------------------------------------------------------------------------------------------


def plan_model_states(
    plan: WritePlan,
    source: WeightSource,
    metadata: OptimizerMetadata,
    target: ZeroTarget,
    folder: Path,
) -> list[Path]:
    """Add the *_model_states.pt files to a plan; return their paths."""
    if target.stage == 3:
        return [
            _plan_model3(plan, source, metadata, target, folder, rank)
            for rank in range(target.world_size)
        ]
    module: dict[str, TensorSpec] = {}
    for name, info in source.tensors.items():
        if not info.alias_of:
            dtype = metadata.compute_dtype if info.kind == "trainable" else info.dtype
            module[name] = TensorSpec(dtype, info.shape)
    stored = dict(module)
    module = {name: stored[info.alias_of or name] for name, info in source.tensors.items()}
    frozen = {name: info.shape for name, info in source.tensors.items() if info.kind == "frozen"}
    fragments = {name: stored[name] for name in frozen}
    # ZeRO-1 leaves frozen weights to `module`.
    is_saved = target.stage == 2
    value = {
        **_common(source, metadata, target),
        "module": module,
        "frozen_param_shapes": {name: TorchSize(shape) for name, shape in frozen.items()}
        if is_saved
        else None,
        "frozen_param_fragments": fragments if is_saved else None,
    }
    path = folder / "mp_rank_00_model_states.pt"
    file = TorchFileWriter(path, [TorchFileLayout(value, path.stem)])
    plan.files.append(file)
    for name, tensor in stored.items():
        plan.add_whole(name, WEIGHT, file, tensor)
    return [path]


def _plan_model3(
    plan: WritePlan,
    source: WeightSource,
    metadata: OptimizerMetadata,
    target: ZeroTarget,
    folder: Path,
    rank: int,
) -> Path:
    frozen_dtypes = {info.dtype for info in source.tensors.values() if info.kind == "frozen"}
    nothing = {
        dtype: TensorSpec(dtype, (0,), []) for dtype in {metadata.compute_dtype, *frozen_dtypes}
    }
    module, fragments, shapes = {}, {}, {}
    padding, sent = [], []
    for name, info in source.tensors.items():
        owner = source.tensors[info.alias_of] if info.alias_of else info
        if owner.kind == "buffer":
            module[name] = TensorSpec(info.dtype, info.shape)
            sent.append((name, module[name], _Piece(name, 0, 0, info.numel)))
            continue
        module[name] = nothing[
            metadata.compute_dtype if owner.kind == "trainable" else owner.dtype
        ]
        if info.kind == "frozen":
            flat = _gathered([name], {name: info.numel}, rank, target.world_size)
            shapes[name] = TorchSize(info.shape)
            fragments[name] = TensorSpec(info.dtype, (flat.size,))
            padding += [(fragments[name], first, count) for first, count in flat.gaps]
            sent += [(name, fragments[name], piece) for piece in flat.pieces]
    value = {
        **_common(source, metadata, target),
        "module": module,
        "frozen_param_shapes": shapes,
        "frozen_param_fragments": fragments,
    }
    path = folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
    file = TorchFileWriter(path, [TorchFileLayout(value, path.stem)], padding)
    plan.files.append(file)
    for name, tensor, piece in sent:
        plan.add(
            name, WEIGHT, [WriteSegment(file, tensor, piece.offset, piece.start, piece.count)]
        )
    return path


def _common(
    source: WeightSource, metadata: OptimizerMetadata, target: ZeroTarget
) -> dict[str, Any]:
    shapes = [
        {name: TorchSize(source.tensors[name].shape) for name in names}
        for _, names in flat_groups_of(source, metadata, target)
    ]
    return {
        "buffer_names": [name for name, info in source.tensors.items() if info.kind == "buffer"],
        "optimizer": None,
        "param_shapes": shapes,
        "shared_params": {
            name: info.alias_of for name, info in source.tensors.items() if info.alias_of
        },
        **metadata.model_states,
        "dp_world_size": target.world_size,
        "mp_world_size": 1,
        "ds_config": ds_config(metadata, target),
        "ds_version": LAYOUT,
    }


def ds_config(metadata: OptimizerMetadata, target: ZeroTarget) -> dict[str, Any]:
    """Return the source's DeepSpeed config with the new stage, or a minimal one if it has none."""
    config = dict(metadata.ds_config)
    zero = config.get("zero_optimization")
    config["zero_optimization"] = {
        **(zero if isinstance(zero, dict) else {}),
        "stage": target.stage,
    }
    if not metadata.ds_config:
        config["bf16"] = {"enabled": metadata.compute_dtype == "bfloat16"}
        config["fp16"] = {"enabled": metadata.compute_dtype == "float16"}
    return config


# -- Universal checkpoints
# -------------------------------------------------------------------------------------------------


def plan_universal(source: WeightSource, metadata: OptimizerMetadata, folder: Path) -> WritePlan:
    """Return the plan of universal/zero/, and of the model files if the source has none, in
    `folder`.
    """
    out, plan, stage = folder / UNIVERSAL_TAG, WritePlan(), stage_of(source)
    folders = folders_of_parameters(out / ZERO_TAG, source.tensors, source.path)
    for name, info in source.tensors.items():
        if info.kind != "trainable":
            # DeepSpeed's tool writes these for ZeRO-1 and 2 only, widened to fp32; its loader
            # reads them from the model files.
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
    if model_files(source):
        plan.copied = {name for name, info in source.tensors.items() if info.kind != "trainable"}
    else:
        plan_model_states(plan, source, metadata, ZeroTarget(stage, source.world_size or 1), out)
    return plan


def _add_file(
    plan: WritePlan, name: str, what: str, path: Path, value: Any, tensor: TensorSpec
) -> None:
    file = TorchFileWriter(path, [TorchFileLayout(value, path.stem)])
    plan.files.append(file)
    plan.add_whole(name, what, file, tensor)


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
    owner = {name: index for index, group in enumerate(metadata.groups) for name in group.names}
    owners = [owner[next(iter(names))] for names in _flat_groups(source, metadata, stage)]
    groups = [
        {**group.settings, "params": [flat for flat, of in enumerate(owners) if of == index]}
        for index, group in enumerate(metadata.groups)
    ]
    state = {**plain_scaling(metadata), "ds_version": LAYOUT, "param_groups": groups}
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
