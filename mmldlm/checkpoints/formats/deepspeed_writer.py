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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.files.tensor_writer import TensorSpec
from mmldlm.checkpoints.files.torch_file import TorchFile
from mmldlm.checkpoints.files.torch_writer import (
    GlobalRef,
    ObjectSpec,
    TorchSize,
    scalar,
    write_torch,
)
from mmldlm.checkpoints.formats.base import WEIGHT, WritePlan, WriteRequest, WriteSegment
from mmldlm.checkpoints.formats.deepspeed_files import LATEST_UNIVERSAL, param_shapes, slice_sizes
from mmldlm.checkpoints.formats.deepspeed_reader import ZeroCheckpoint
from mmldlm.checkpoints.formats.optimizer import OptimizerMetadata, plain_scaling, scaling_of
from mmldlm.checkpoints.formats.universal_folder import OPTIMIZER_STATE, folders_of_parameters
from mmldlm.checkpoints.formats.weight_source import WeightSource
from mmldlm.checkpoints.manifest import SUB_GROUP_SIZE, UNIVERSAL_TAG, ZERO_TAG
from mmldlm.utils.moments import moment_keys

# The version of DeepSpeed with this layout.
LAYOUT = "0.19.8"
_FRAGMENT = GlobalRef("deepspeed.utils.tensor_fragment", "fragment_address")


def plan_zero(request: WriteRequest) -> WritePlan:
    """Return the plan of a checkpoint of ZeRO-1, 2 or 3."""
    writer = ZeroWriter(request, int(request.target.removeprefix("zero")), ZERO_TAG)
    writer.add_model_files()
    writer.add_optimizer_files()
    return writer.plan


# -- Partitions -----------------------------------------------------------------------------------


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


def _sliced(group: list[str], sizes: dict[str, int], rank: int, world: int) -> _Flat:
    """Return a rank's slice of a flat group under ZeRO-1 and 2."""
    size, held = slice_sizes(sum(sizes[name] for name in group), world)[rank]
    low, pieces, offset = rank * size, [], 0
    for name in group:
        first, last = max(low, offset), min(low + held, offset + sizes[name])
        if first < last:
            pieces.append(_Piece(name, first - low, first - offset, last - first))
        offset += sizes[name]
    return _Flat(size, held, pieces, [(held, size - held)] if size > held else [])


def _gathered(group: list[str], sizes: dict[str, int], rank: int, world: int) -> _Flat:
    """Return a rank's partitions of the parameters of a sub-group under ZeRO-3."""
    pieces, gaps, offset = [], [], 0
    for name in group:
        size = -(-sizes[name] // world)
        held = max(0, min(size, sizes[name] - rank * size))
        pieces.append(_Piece(name, offset, rank * size, held))
        if held < size:
            gaps.append((offset + held, size - held))
        offset += size
    return _Flat(offset, offset, pieces, gaps)


def _param_groups(metadata: OptimizerMetadata, owners: list[int]) -> list[dict[str, Any]]:
    """Return the optimizer's groups, whose parameters are the indices of flat groups.

    Args:
        owners: Index of the optimizer's group of every flat group.
    """
    return [
        {**group.settings, "params": [flat for flat, owner in enumerate(owners) if owner == index]}
        for index, group in enumerate(metadata.groups)
    ]


# -- ZeRO -----------------------------------------------------------------------------------------


class ZeroWriter:
    """The files of a ZeRO checkpoint in a folder of the request's.

    Attributes:
        plan: Plan of the files.
        flat_groups: (index of the optimizer's group, names) of every flat group; of ZeRO-3 those
            are the sub-groups.
    """

    def __init__(self, request: WriteRequest, stage: int, tag: str, plan: WritePlan | None = None):
        self.source, self.metadata = request.source, request.required_optimizer
        self.stage, self.world_size = stage, request.world_size
        self.folder, self.plan = request.folder / tag, plan or WritePlan()
        self._sizes = {name: info.numel for name, info in self.source.tensors.items()}
        self.flat_groups = self._cut_groups(request.sub_group_size)

    def _cut_groups(self, sub_group_size: int) -> list[tuple[int, list[str]]]:
        """Return `flat_groups`; ZeRO-3 closes one at its maximum size."""
        flat_groups: list[tuple[int, list[str]]] = []
        for index, group in enumerate(self.metadata.groups):
            partition_sizes = {
                name: -(-self._sizes[name] // self.world_size) for name in group.names
            }
            if self.stage < 3 or sub_group_size >= sum(partition_sizes.values()):
                flat_groups.append((index, group.names))
                continue
            names, size = [], 0
            for name in group.names:
                names.append(name)
                size += partition_sizes[name]
                if size >= sub_group_size or name == group.names[-1]:
                    flat_groups.append((index, names))
                    names, size = [], 0
        return flat_groups

    def add_optimizer_files(self) -> None:
        """Add every rank's *_optim_states.pt to the plan."""
        prefix = "bf16_" if self.metadata.compute_dtype == "bfloat16" else ""
        for rank in range(self.world_size):
            self._add_optimizer_file(rank, f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states")

    def _add_optimizer_file(self, rank: int, name: str) -> None:
        metadata, cut = self.metadata, _gathered if self.stage == 3 else _sliced
        flats, states = [], {}
        written: list[tuple[_Flat, str, TensorSpec]] = []
        for index, (owner, names) in enumerate(self.flat_groups):
            flat = cut(names, self._sizes, rank, self.world_size)
            flats.append(flat)
            # ZeRO-1 and 2 save masters without the tail's padding, moments with it.
            written.append((flat, WEIGHT, TensorSpec("float32", (flat.held,))))
            if metadata.steps is not None:
                keys = moment_keys(metadata.groups[owner].settings)
                moments = {what: TensorSpec("float32", (flat.size,)) for what in keys}
                states[index] = {"step": scalar(metadata.steps), **moments}
                written += [(flat, what, tensor) for what, tensor in moments.items()]
        owners = [owner for owner, _ in self.flat_groups]
        optimizer = {"state": states, "param_groups": _param_groups(metadata, owners)}
        masters = [tensor for _, what, tensor in written if what == WEIGHT]
        value = {
            "optimizer_state_dict": self._optimizer_state(flats, optimizer, masters),
            "ds_config": self._ds_config(),
            "ds_version": LAYOUT,
        }
        padding = [
            (tensor, first, count)
            for flat, _, tensor in written
            for first, count in flat.gaps
            if first + count <= tensor.numel
        ]
        self._add_file(
            name,
            value,
            [(what, tensor, piece) for flat, what, tensor in written for piece in flat.pieces],
            padding,
        )

    def _optimizer_state(
        self, flats: list[_Flat], optimizer: dict[str, Any], masters: list[TensorSpec]
    ) -> dict[str, Any]:
        common = {"zero_stage": self.stage, **scaling_of(self.metadata)}
        if self.stage == 3:
            return {
                **common,
                "partition_count": self.world_size,
                "optimizer_state_dict": optimizer,
                "fp32_flat_groups": masters,
            }
        return {
            **common,
            "base_optimizer_state": optimizer,
            "single_partition_of_fp32_groups": masters,
            "group_paddings": [flat.size - flat.held for flat in flats],
            "param_alignment_paddings": [[0] * len(group.names) for group in self.metadata.groups],
            "partition_count": [self.world_size] * len(flats),
            "ds_version": LAYOUT,
            "param_slice_mappings": [
                {
                    piece.name: ObjectSpec(
                        _FRAGMENT, state={"numel": piece.count, "start": piece.offset}
                    )
                    for piece in flat.pieces
                }
                for flat in flats
            ],
        }

    def add_model_files(self) -> None:
        """Add the *_model_states.pt to the plan: one of ZeRO-1 and 2, one per rank of ZeRO-3."""
        if self.stage == 3:
            for rank in range(self.world_size):
                self._add_model_file_of_rank(rank)
            return
        tensors = self.source.tensors
        stored = {
            name: TensorSpec(
                self.metadata.compute_dtype if info.kind == "trainable" else info.dtype, info.shape
            )
            for name, info in tensors.items()
            if not info.alias_of
        }
        frozen = [name for name, info in tensors.items() if info.kind == "frozen"]
        # ZeRO-1 leaves frozen weights to `module`.
        is_saved = self.stage == 2
        value = {
            **self._model_entries(),
            "module": {name: stored[info.alias_of or name] for name, info in tensors.items()},
            "frozen_param_shapes": {name: TorchSize(tensors[name].shape) for name in frozen}
            if is_saved
            else None,
            "frozen_param_fragments": {name: stored[name] for name in frozen}
            if is_saved
            else None,
        }
        file = self.plan.new_file(self.folder / "mp_rank_00_model_states.pt", value)
        for name, tensor in stored.items():
            self.plan.add_whole(name, WEIGHT, file, tensor)

    def _add_model_file_of_rank(self, rank: int) -> None:
        tensors, compute_dtype = self.source.tensors, self.metadata.compute_dtype
        frozen_dtypes = {info.dtype for info in tensors.values() if info.kind == "frozen"}
        nothing = {dtype: TensorSpec(dtype, (0,), []) for dtype in {compute_dtype, *frozen_dtypes}}
        module, fragments, shapes = {}, {}, {}
        written: list[tuple[str, TensorSpec, _Piece]] = []
        padding = []
        for name, info in tensors.items():
            owner = tensors[info.alias_of] if info.alias_of else info
            if owner.kind == "buffer":
                module[name] = TensorSpec(info.dtype, info.shape)
                written.append((WEIGHT, module[name], _Piece(name, 0, 0, info.numel)))
                continue
            module[name] = nothing[compute_dtype if owner.kind == "trainable" else owner.dtype]
            if info.kind == "frozen":
                flat = _gathered([name], self._sizes, rank, self.world_size)
                shapes[name] = TorchSize(info.shape)
                fragments[name] = TensorSpec(info.dtype, (flat.size,))
                padding += [(fragments[name], first, count) for first, count in flat.gaps]
                written += [(WEIGHT, fragments[name], piece) for piece in flat.pieces]
        value = {
            **self._model_entries(),
            "module": module,
            "frozen_param_shapes": shapes,
            "frozen_param_fragments": fragments,
        }
        self._add_file(f"zero_pp_rank_{rank}_mp_rank_00_model_states", value, written, padding)

    def _add_file(
        self,
        name: str,
        value: Any,
        written: Iterable[tuple[str, TensorSpec, _Piece]],
        padding: list[tuple[TensorSpec, int, int]],
    ) -> None:
        file = self.plan.new_file(self.folder / f"{name}.pt", value, padding)
        for what, tensor, piece in written:
            segment = WriteSegment(file, tensor, piece.offset, piece.start, piece.count)
            self.plan.add(piece.name, what, [segment])

    def _model_entries(self) -> dict[str, Any]:
        tensors = self.source.tensors
        return {
            "buffer_names": [name for name, info in tensors.items() if info.kind == "buffer"],
            "optimizer": None,
            "param_shapes": [
                {name: TorchSize(tensors[name].shape) for name in names}
                for _, names in self.flat_groups
            ],
            "shared_params": {
                name: info.alias_of for name, info in tensors.items() if info.alias_of
            },
            **self.metadata.model_states,
            "dp_world_size": self.world_size,
            "mp_world_size": 1,
            "ds_config": self._ds_config(),
            "ds_version": LAYOUT,
        }

    def _ds_config(self) -> dict[str, Any]:
        """Return the source's DeepSpeed config with the new stage, or a minimal one if it has
        none.
        """
        config, dtype = dict(self.metadata.ds_config), self.metadata.compute_dtype
        zero = config.get("zero_optimization")
        config["zero_optimization"] = {
            **(zero if isinstance(zero, dict) else {}),
            "stage": self.stage,
        }
        if not self.metadata.ds_config:
            config["bf16"] = {"enabled": dtype == "bfloat16"}
            config["fp16"] = {"enabled": dtype == "float16"}
        return config


# -- Universal checkpoints ------------------------------------------------------------------------


def plan_universal(request: WriteRequest) -> WritePlan:
    """Return the plan of universal/zero/, and of the model files if the source has none."""
    source, out = request.source, request.folder / UNIVERSAL_TAG
    plan, stage = WritePlan(), stage_of(source)
    folders = folders_of_parameters(out / ZERO_TAG, source.tensors, source.path)

    def add_file(name: str, what: str, path: Path, shape: tuple[int, ...], entries: Any) -> None:
        tensor = TensorSpec("float32", shape)
        value = tensor if entries is None else {**entries, "param": tensor}
        plan.add_whole(name, what, plan.new_file(path, value), tensor)

    for name, info in source.tensors.items():
        if info.kind != "trainable":
            # DeepSpeed's tool writes these for ZeRO-1 and 2 only, widened to fp32; its loader
            # reads them from the model files.
            if stage < 3:
                add_file(info.alias_of or name, WEIGHT, folders[name] / "fp32.pt", info.shape, {})
            continue
        # ZeRO-3 is loaded flat, ZeRO-1 and 2 in the parameter's shape: as ds_to_universal leaves
        # them.
        shape = (info.numel,) if stage == 3 else info.shape
        entries = None if stage == 3 else {"cat_dim": 0}
        for what in (WEIGHT, *source.moments_of(name)):
            key = "fp32" if what == WEIGHT else what
            add_file(name, what, folders[name] / f"{key}.pt", shape, entries)
    if copied := model_files(source):
        plan.copied_bytes = sum(file.path.stat().st_size for file in copied)
        plan.copied = {name for name, info in source.tensors.items() if info.kind != "trainable"}
    else:
        _zero_writer(request, plan).add_model_files()
    return plan


def write_other_files(request: WriteRequest, folder: Path) -> None:
    """Write everything outside the plan; the model files are copied and verified."""
    source, metadata = request.source, request.required_optimizer
    out, stage = folder / UNIVERSAL_TAG, stage_of(source)
    if stage < 3:
        names = [name for group in metadata.groups for name in group.names]
        for path in folders_of_parameters(out / ZERO_TAG, names, source.path).values():
            write_torch(path / "step.pt", scalar(metadata.steps or 0.0))
    groups = _param_groups(metadata, _owners(request))
    state = {**plain_scaling(metadata), "ds_version": LAYOUT, "param_groups": groups}
    if stage == 3:
        state["optimizer_state_dict"] = {
            "state": {0: {"step": scalar(metadata.steps or 0.0)}},
            "param_groups": groups,
        }
    write_torch(out / ZERO_TAG / OPTIMIZER_STATE, state)
    for file in model_files(source):
        for record in file.records:
            file.check_record(record)
        shutil.copyfile(file.path, out / file.path.name)
    (folder / LATEST_UNIVERSAL).write_text(UNIVERSAL_TAG)


def stage_of(source: WeightSource) -> int:
    """Return the stage of the new checkpoint: the source's, or 2, which ZeRO-1 loads too."""
    return source.stage or 2


def model_files(source: WeightSource) -> list[TorchFile]:
    """Return the source's own model files if they are those of ZeRO-1, 2 or 3."""
    if not isinstance(source, ZeroCheckpoint) or not source.stage:
        return []
    return [file for file in source.files if file.path.name.endswith("model_states.pt")]


def _zero_writer(request: WriteRequest, plan: WritePlan | None = None) -> ZeroWriter:
    source = request.source
    request = replace(request, world_size=source.world_size or 1, sub_group_size=SUB_GROUP_SIZE)
    return ZeroWriter(request, stage_of(source), UNIVERSAL_TAG, plan)


def _owners(request: WriteRequest) -> list[int]:
    """Return the index of the optimizer's group of every flat group that param_shapes of the model
    files lists.
    """
    if not (files := model_files(request.source)):
        return [owner for owner, _ in _zero_writer(request).flat_groups]
    groups = enumerate(request.required_optimizer.groups)
    owner = {name: index for index, group in groups for name in group.names}
    return [owner[next(iter(names))] for names in param_shapes(files[0], files[0].load_dict())]
