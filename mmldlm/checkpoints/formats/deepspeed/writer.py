"""Write a DeepSpeed ZeRO-1, 2 or 3 checkpoint of any world size, as DeepSpeed 0.19 saves and loads
it.

Layouts: see reader. The files are those of engine.save_checkpoint in plain pickles: OrderedDicts
are dicts, every tensor has its own storage, ds_config names the new stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.formats.deepspeed.partitioning import slice_sizes
from mmldlm.checkpoints.formats.optimizer_metadata import OptimizerMetadata
from mmldlm.checkpoints.formats.torch_save.pickler import (
    GlobalRef,
    ObjectSpec,
    TensorSpec,
    TorchSize,
    scalar,
)
from mmldlm.checkpoints.formats.torch_save.writer import TorchFileLayout, TorchFileWriter
from mmldlm.checkpoints.formats.weight_source import WeightSource
from mmldlm.checkpoints.formats.write_plan import WEIGHT, WritePlan, WriteSegment
from mmldlm.checkpoints.layout import SUB_GROUP_SIZE
from mmldlm.utils.moments import moment_keys

LAYOUT = "0.19.8"  # the version of DeepSpeed with this layout
_FRAGMENT = GlobalRef("deepspeed.utils.tensor_fragment", "fragment_address")


@dataclass(frozen=True)
class ZeroTarget:
    """What to write.

    Attributes:
        stage: ZeRO stage (1, 2 or 3).
        world_size: number of ranks.
        sub_group_size: ZeRO-3's, in elements.
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
        size: elements with the tail padding.
        held: elements without it.
        pieces: the parameters in it.
        gaps: (first element, number) of padding.
    """

    size: int
    held: int
    pieces: list[_Piece]
    gaps: list[tuple[int, int]]


def _flats(source: WeightSource, groups: list[list[str]], target: ZeroTarget) -> list[list[_Flat]]:
    """Return the flat groups of every rank (sub-groups under ZeRO-3)."""
    sizes = {name: source.tensors[name].numel for group in groups for name in group}
    if target.stage == 3:
        return [
            [_gathered(group, sizes, rank, target.world_size) for group in groups]
            for rank in _ranks(target)
        ]
    return [
        [_sliced(group, sizes, rank, target.world_size) for group in groups]
        for rank in _ranks(target)
    ]


def _ranks(target: ZeroTarget) -> range:
    return range(target.world_size)


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
        share = -(-sizes[name] // world)
        held = max(0, min(share, sizes[name] - rank * share))
        pieces.append(_Piece(name, offset, rank * share, held))
        if held < share:
            gaps.append((offset + held, share - held))
        offset += share
    return _Flat(offset, offset, pieces, gaps)


def flat_groups_of(
    source: WeightSource, metadata: OptimizerMetadata, target: ZeroTarget
) -> list[tuple[int, list[str]]]:
    """Return (number of the optimizer's group, names) of every flat group; ZeRO-3 closes one at
    its maximum size.
    """
    found: list[tuple[int, list[str]]] = []
    for number, group in enumerate(metadata.groups):
        shares = {
            name: -(-source.tensors[name].numel // target.world_size) for name in group.names
        }
        if target.stage < 3 or target.sub_group_size >= sum(shares.values()):
            found.append((number, group.names))
            continue
        names, size = [], 0
        for name in group.names:
            names.append(name)
            size += shares[name]
            if size >= target.sub_group_size or name == group.names[-1]:
                found.append((number, names))
                names, size = [], 0
    return found


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
    for rank in _ranks(target):
        masters, states = [], {}
        padding: list[tuple[TensorSpec, int, int]] = []
        sent: list[tuple[_Flat, str, TensorSpec]] = []
        for number, flat in enumerate(flats[rank]):
            # ZeRO-1 and 2 save masters without the tail's padding, moments with it.
            masters.append(TensorSpec("float32", (flat.held,)))
            sent.append((flat, WEIGHT, masters[-1]))
            if metadata.steps is not None:
                keys = moment_keys(metadata.groups[numbered[number][0]].settings)
                moments = {what: TensorSpec("float32", (flat.size,)) for what in keys}
                states[number] = {"step": scalar(metadata.steps), **moments}
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
    """Return the optimizer's groups, whose parameters are the numbers of flat groups."""
    return [
        {
            **group.settings,
            "params": [flat for flat, (owner, _) in enumerate(numbered) if owner == number],
        }
        for number, group in enumerate(metadata.groups)
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
    mine = flats[rank]
    return {
        **common,
        "base_optimizer_state": optimizer,
        "single_partition_of_fp32_groups": masters,
        "group_paddings": [flat.size - flat.held for flat in mine],
        "param_alignment_paddings": [[0] * len(group.names) for group in metadata.groups],
        "partition_count": [target.world_size] * len(mine),
        "ds_version": LAYOUT,
        "param_slice_mappings": [
            {
                piece.name: ObjectSpec(
                    _FRAGMENT, state={"numel": piece.count, "start": piece.offset}
                )
                for piece in flat.pieces
            }
            for flat in mine
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
            _plan_model3(plan, source, metadata, target, folder, rank) for rank in _ranks(target)
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
    is_saved = target.stage == 2  # ZeRO-1 leaves frozen weights to `module`
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
        plan.add(name, WEIGHT, [WriteSegment(file, tensor, 0, 0, tensor.numel)])
    return [path]


def _plan_model3(
    plan: WritePlan,
    source: WeightSource,
    metadata: OptimizerMetadata,
    target: ZeroTarget,
    folder: Path,
    rank: int,
) -> Path:
    nothing = {
        dtype: TensorSpec(dtype, (0,), [])
        for dtype in {metadata.compute_dtype, *_frozen_dtypes(source)}
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
            shapes[name], fragments[name] = (
                TorchSize(info.shape),
                TensorSpec(info.dtype, (flat.size,)),
            )
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


def _frozen_dtypes(source: WeightSource) -> Iterator[str]:
    return (info.dtype for info in source.tensors.values() if info.kind == "frozen")


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
