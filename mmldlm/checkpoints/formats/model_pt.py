"""`model.pt`, a torch.save'd dict name -> tensor, and mmldlm's `optimizer.pt` next to it, a torch
optimizer's state_dict with names: detect, open, read optimizer metadata, write.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mmldlm.checkpoints.files.tensor_writer import TensorSpec
from mmldlm.checkpoints.files.torch_file import TorchFile
from mmldlm.checkpoints.files.torch_writer import scalar
from mmldlm.checkpoints.files.unpickler import TensorRef, module_names_of
from mmldlm.checkpoints.formats.base import WEIGHT, WritePlan, WriteRequest
from mmldlm.checkpoints.formats.deepspeed_counters import read_scalar
from mmldlm.checkpoints.formats.deepspeed_files import buffer_names
from mmldlm.checkpoints.formats.deepspeed_state import add_deepspeed_state, write_deepspeed_state
from mmldlm.checkpoints.formats.named_optimizer import add_named_optimizer
from mmldlm.checkpoints.formats.optimizer import (
    Group,
    OptimizerMetadata,
    applied_steps,
    configured_dtype,
    group_settings,
    moments_by_name,
    named_groups,
    states_by_index,
    torch_metadata,
)
from mmldlm.checkpoints.formats.part_files import (
    INDEX_SUFFIX,
    check_keys,
    check_listed,
    read_shard_index,
)
from mmldlm.checkpoints.formats.selection import (
    Keys,
    find_optimizers,
    node_at,
    select_model,
    tree_of,
)
from mmldlm.checkpoints.formats.state_dict import add_tensors, tensors_of
from mmldlm.checkpoints.formats.weight_source import (
    READ_DEFAULTS,
    OpenedCheckpoint,
    ReadOptions,
    WeightSource,
)
from mmldlm.checkpoints.manifest import DCP_METADATA, MODEL_FILE, OPTIMIZER_FILE


class ModelPtFormat:
    """A torch.save'd state_dict under any name, an index of such files, or a folder with
    model.pt.
    """

    name = "model.pt"
    targets: tuple[str, ...] = ("model.pt", "ddp")
    has_keys = True

    def detect(self, path: Path) -> Path | None:
        if path.is_file():
            is_other = (
                path.name.endswith((".safetensors", ".safetensors.index.json"))
                or path.name == DCP_METADATA
            )
            return None if is_other else path
        return path if (path / MODEL_FILE).is_file() else None

    def open(self, path: Path, options: ReadOptions) -> WeightSource:
        # A file that is opened by itself holds weights alone.
        if path.is_file():
            return ModelFile.open(path, options)
        if self.can_resume(path):
            return ModelFile.open(path / MODEL_FILE, options, optimizer=path / OPTIMIZER_FILE)
        return ModelFile.open(path / MODEL_FILE, replace(options, with_moments=False))

    def can_resume(self, path: Path) -> bool:
        # Opening it reports what is not a regular file.
        return os.path.lexists(path / OPTIMIZER_FILE)

    def read_optimizer_metadata(self, opened: OpenedCheckpoint) -> OptimizerMetadata:
        source = opened.weights
        file = source.files[1]
        state = file.load_dict()
        names_of = named_groups(source, file, state.get("param_names"))
        tables = state.get("param_groups")
        if not isinstance(tables, list) or len(tables) != len(names_of):
            tables = [{} for _ in names_of]
        groups = [
            Group(names, settings)
            for names, settings in zip(names_of, group_settings(file, tables))
        ]
        first: dict = next(iter((state.get("state") or {}).values()), {})
        step = read_scalar(file, first.get("step"))
        steps = applied_steps(opened) if step is None else float(step)
        metadata = torch_metadata(opened, groups, steps, configured_dtype(opened))
        return add_deepspeed_state(metadata, file.path.parent)

    def plan_write(self, request: WriteRequest) -> tuple[WritePlan, Callable[[Path], object]]:
        source, folder = request.source, request.folder
        if request.target == "ddp":
            optimizer = request.required_optimizer
            plan = plan_model_and_optimizer(source, optimizer, folder)
            return plan, lambda folder: write_deepspeed_state(optimizer, folder)
        export = request.required_export
        tensors = {name: planned.spec for name, planned in export.tensors.items()}
        plan = plan_model_file(tensors, export.source_names(), folder / MODEL_FILE)
        return plan, lambda folder: None


# -- Reading --------------------------------------------------------------------------------------

# accelerate and the Hugging Face Trainer save the optimizer of FSDP's full state dict in a file
# beside it.
_ACCELERATE = re.compile(r"pytorch_model_fsdp(_\d+)?\.bin")


def _optimizer_beside(path: Path) -> Path | None:
    match = _ACCELERATE.fullmatch(path.name)
    beside = path.parent / f"optimizer{match[1] or ''}.bin" if match else path
    return beside if match and beside.is_file() else None


def _of_trainer(tensors: dict[str, TensorRef], notes: list[str]) -> dict[str, TensorRef]:
    """Return the weights of an MM-LDLM trainer: the model under `model.`, without the noise
    schedules next to it.
    """
    schedules = [name for name in tensors if "noise_schedule" in name.partition(".")[0]]
    others = [name for name in tensors if name not in schedules]
    if not schedules or not others or not all(name.startswith("model.") for name in others):
        return tensors
    notes.append(
        f"the trainer's noise schedules ({len(schedules)} tensors) are not weights and were"
        " left out"
    )
    return {name.removeprefix("model."): tensors[name] for name in others}


class ModelFile(WeightSource):
    """An opened `model.pt`, or the files of an index of shards; see WeightSource.

    Args:
        path: File of weights, or index.
        options: With moments: those in `optimizer`, or else of an optimizer beside the model that
            names its parameters.
        optimizer: The optimizer.pt saved with it, which records the trained weights: {"state",
            "param_groups"} of torch's AdamW, "param_names" [[names of group 0], ...], and
            optionally "buffer_names" and "aliases" {second name: name} of tied weights.
    """

    engine = "model.pt"

    def __init__(
        self, path: Path, options: ReadOptions = READ_DEFAULTS, optimizer: Path | None = None
    ):
        super().__init__(path, options)
        self._optimizer = optimizer

    def _read(self) -> None:
        if self.path.name.endswith(INDEX_SUFFIX):
            self._read_shards()
            return
        file = self._open(self.path)
        value = file.load()
        check_keys(self.path, value)
        model = select_model(tree_of(file, value), self.path, self.options.key)
        self.notes += model.notes
        self.other_models = model.other_models
        self.module_names = module_names_of(node_at(value, model.path))
        refs = {name: tensor.ref for name, tensor in model.tensors.items()}
        add_tensors(self, file, _of_trainer(refs, self.notes), {})
        if self._optimizer is not None:
            self._read_optimizer(self._open(self._optimizer))
        elif self.options.with_moments:
            self._read_named_optimizer(model.optimizers, model.path)

    def _read_shards(self) -> None:
        """Read an index and its shards, each a torch.save'd dict name -> tensor."""
        shard_of = read_shard_index(self.path)
        states = {}
        for name in sorted(set(shard_of.values())):
            file = self._open(self.path.parent / name)
            states[name] = tensors_of(file.load_dict(), file.path, "the file", self.notes)
            # A shard may hold a tensor that the index lists in another one.
            own = {key: ref for key, ref in states[name].items() if shard_of.get(key) == name}
            add_tensors(self, file, own, {})
        check_listed(self.path, shard_of, {name: set(state) for name, state in states.items()})
        self.tensors = {name: self.tensors[name] for name in shard_of}

    def _open(self, path: Path) -> TorchFile:
        file = TorchFile(path, self.options.random_access)
        self.files.append(file)
        return file

    def _read_named_optimizer(self, optimizers: dict[Keys, dict], path: Keys) -> None:
        beside = _optimizer_beside(self.path)
        if beside is not None:
            file = self._open(beside)
            optimizers = optimizers | find_optimizers(tree_of(file, file.load()))
        add_named_optimizer(self, optimizers, path)

    def _read_optimizer(self, file: TorchFile) -> None:
        state = file.load_dict()
        if "param_names" not in state and not self.options.with_moments:
            # Old versions of mmldlm did not save the names: only the weights can be used.
            return
        self.mark_tied(state.get("aliases"), file.path)
        groups = named_groups(self, file, state.get("param_names"))
        names = [name for group in groups for name in group]
        self.classify(set(names), buffer_names(state))
        if self.options.with_moments:
            states = states_by_index(file, state, len(names))
            shapes = {name: info.shape for name, info in self.tensors.items()}
            self.moments = moments_by_name(file, states, names, shapes) if states else {}


# -- Writing --------------------------------------------------------------------------------------


def plan_model_file(
    tensors: dict[str, TensorSpec], names: dict[str, str], path: Path
) -> WritePlan:
    """Return the plan of one file, a dict name -> tensor.

    Args:
        tensors: Source name -> what to write of it.
        names: Every name in the file -> source name; tied weights share one.
        path: File to write.
    """
    plan = WritePlan()
    file = plan.new_file(path, {name: tensors[owner] for name, owner in names.items()})
    for name, tensor in tensors.items():
        plan.add_whole(name, WEIGHT, file, tensor)
    return plan


def plan_model_and_optimizer(
    source: WeightSource, optimizer: OptimizerMetadata, folder: Path
) -> WritePlan:
    """Return the plan of model.pt and optimizer.pt in `folder`."""
    stored = {
        name: TensorSpec(i.dtype, i.shape) for name, i in source.tensors.items() if not i.alias_of
    }
    owners = {name: info.alias_of or name for name, info in source.tensors.items()}
    plan = plan_model_file(stored, owners, folder / MODEL_FILE)
    names = [name for group in optimizer.groups for name in group.names]
    states: dict[int, dict[str, TensorSpec]] = {}
    if optimizer.steps is not None:
        for index, name in enumerate(names):
            shape = source.tensors[name].shape
            states[index] = {
                "step": scalar(optimizer.steps),
                **{what: TensorSpec("float32", shape) for what in source.moments_of(name)},
            }
    index_of = {name: index for index, name in enumerate(names)}
    groups = [
        {**group.settings, "params": [index_of[name] for name in group.names]}
        for group in optimizer.groups
    ]
    value = {
        "state": states,
        "param_groups": groups,
        "param_names": [group.names for group in optimizer.groups],
        "buffer_names": [name for name, info in source.tensors.items() if info.kind == "buffer"],
        "aliases": {name: info.alias_of for name, info in source.tensors.items() if info.alias_of},
    }
    file = plan.new_file(folder / OPTIMIZER_FILE, value)
    for index, state in states.items():
        for what in source.moments_of(names[index]):
            plan.add_whole(names[index], what, file, state[what])
    return plan
