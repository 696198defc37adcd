"""torch.distributed.checkpoint folders (FSDP2): detect, open, read optimizer metadata, write,
without torch and without executing a pickle.

The folder itself is described in dcp_folder. A folder of any world size is written as FSDP2 and
mmldlm's fsdp engine save it: weights are cut along their first dimension, buffers are stored in
rank 0's file, and a tied weight's second name points to the bytes of the first.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.files.dtypes import WIDE_FLOATS, numel
from mmldlm.checkpoints.files.file_io import read_json_object
from mmldlm.checkpoints.files.tensor_writer import TensorSpec
from mmldlm.checkpoints.files.torch_file import TorchFile, corrupt_file_error
from mmldlm.checkpoints.files.torch_writer import (
    GlobalRef,
    ObjectSpec,
    PickleWriter,
    TorchFileLayout,
    TorchFileWriter,
    TorchSize,
)
from mmldlm.checkpoints.files.unpickler import TensorRef
from mmldlm.checkpoints.formats.base import WEIGHT, WritePlan, WriteRequest, WriteSegment
from mmldlm.checkpoints.formats.dcp_folder import DcpFolder, DcpTensor
from mmldlm.checkpoints.formats.deepspeed_state import add_deepspeed_state, write_deepspeed_state
from mmldlm.checkpoints.formats.named_optimizer import add_named_optimizer
from mmldlm.checkpoints.formats.optimizer import (
    Group,
    OptimizerMetadata,
    applied_steps,
    check_no_other_moment,
    configured_dtype,
    plain_scaling,
    read_scaling,
    torch_metadata,
)
from mmldlm.checkpoints.formats.selection import (
    FileTensor,
    Keys,
    find_optimizers,
    select_model,
)
from mmldlm.checkpoints.formats.state_dict import add_tensors
from mmldlm.checkpoints.formats.weight_source import (
    READ_DEFAULTS,
    OpenedCheckpoint,
    ReadOptions,
    TensorInfo,
    WeightSource,
)
from mmldlm.checkpoints.manifest import DCP_METADATA, TRAINABLE_FILE
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some
from mmldlm.utils.input_files import read_bytes
from mmldlm.utils.moments import MOMENTS, moment_keys

# mmldlm's own name, that of accelerate and the Hugging Face Trainer, and OLMo-core's.
_SUBFOLDERS = (".", "dcp", "pytorch_model_fsdp_0", "model_and_optim")


class DcpFormat:
    """A folder with .metadata and *.distcp files."""

    name = "dcp"
    targets: tuple[str, ...] = ("dcp", "fsdp")
    has_keys = True

    def detect(self, path: Path) -> Path | None:
        if path.name == DCP_METADATA and path.is_file():
            return path.parent
        return next(
            (path / name for name in _SUBFOLDERS if (path / name / DCP_METADATA).is_file()), None
        )

    def open(self, path: Path, options: ReadOptions) -> WeightSource:
        return DcpCheckpoint.open(path, options)

    def can_resume(self, path: Path) -> bool:
        return True

    def read_optimizer_metadata(self, opened: OpenedCheckpoint) -> OptimizerMetadata:
        source = opened.weights
        path = source.path / TRAINABLE_FILE
        # DcpCheckpoint has validated the file.
        record = json.loads(read_bytes(path))
        groups, notes = _groups(path, record), []
        if "groups" not in record:
            groups = [Group(list(record["trainable"]), {})]
            notes.append(
                f"{path.name} names no parameter groups: all are in one, without settings"
            )
        for group in groups:
            group.names = source.resolve_tied(group.names, source.path)
        steps, dtype = record.get("steps"), record.get("compute_dtype")
        if not isinstance(steps, int | float | None) or dtype not in (None, *WIDE_FLOATS):
            raise corrupt_file_error(path, f"steps {steps!r} in {dtype!r}"[:200])
        steps = applied_steps(opened) if steps is None else float(steps)
        metadata = torch_metadata(opened, groups, steps, dtype or configured_dtype(opened))
        saved = record.get("deepspeed")
        metadata.optimizer |= read_scaling(saved if isinstance(saved, dict) else {})
        metadata.notes += notes
        return add_deepspeed_state(metadata, source.path)

    def plan_write(self, request: WriteRequest) -> tuple[WritePlan, Callable[[Path], object]]:
        source, optimizer = request.source, request.optimizer
        plan, metadata = plan_dcp(source, optimizer, request.world_size, request.folder)
        return plan, lambda folder: write_descriptions(source, optimizer, metadata, folder)


# -- Reading --------------------------------------------------------------------------------------

# accelerate and the Hugging Face Trainer save the optimizer of pytorch_model_fsdp_0 in optimizer_0
# beside it.
_ACCELERATE_MODEL = "pytorch_model_fsdp_"
_STACKED_LAYERS = re.compile(
    r"(^|\.)(decoder|encoder)\.layers\.(mlp|self_attention|cross_attention|input_layernorm|pre_mlp_layernorm|mixer)\."
)


class DcpCheckpoint(WeightSource):
    """An opened DCP folder; see WeightSource.

    mmldlm saves {"model": ..., "optim": {"exp_avg": ..., "exp_avg_sq": ...}}. `trainable.json`
    next to it lists the trained weights: {"trainable": [names]}, and optionally "buffers":
    [names], "aliases": {second name: name} and "groups": [{"names": [names], "settings": {...}}],
    which identify Muon's weights. In folders of other programs `selection` finds the model, and
    `named_optimizer` an optimizer that names its parameters.
    """

    engine = "fsdp"

    def __init__(self, path: Path, options: ReadOptions = READ_DEFAULTS):
        super().__init__(path, options)
        self._folders: list[DcpFolder] = []

    def close(self) -> None:
        super().close()
        for folder in self._folders:
            folder.close()

    def __getstate__(self) -> dict[str, Any]:
        # The tree of all names and chunks is not needed to read them.
        return super().__getstate__() | {"_folders": []}

    def _read(self) -> None:
        with_moments, key = self.options.with_moments, self.options.key
        _refuse_megatron(self.path)
        folder = self._open(self.path)
        names_file = _read_trainable(self.path)
        if key is None and names_file is not None and "model" in folder.tree:
            key = "model"
        model = select_model(folder.tree, folder.metadata_path, key)
        _refuse_stacked_layers(self.path, model.tensors)
        pickled: dict[TorchFile, dict[str, TensorRef]] = {}
        for name, tensor in model.tensors.items():
            if isinstance(tensor, FileTensor):
                pickled.setdefault(tensor.file, {})[name] = tensor.ref
            else:
                self.tensors[name] = TensorInfo(name, tensor.dtype, tensor.shape, "parameter")
                self.parts[name] = tensor.parts()
        for file, refs in pickled.items():
            add_tensors(self, file, refs, {})
        self.other_models = model.other_models
        if names_file is not None:
            self._set_kinds(names_file)
            if with_moments:
                groups = _groups(self.path / TRAINABLE_FILE, names_file)
                self._read_moments(
                    folder,
                    {
                        name: moment_keys(group.settings)
                        for group in groups
                        for name in group.names
                    },
                )
        else:
            self.notes += model.notes
            if with_moments:
                self._read_named_optimizer(model.optimizers, model.path)
        for folder in self._folders:
            self.files += [*folder.files, *folder.objects]

    def _open(self, path: Path) -> DcpFolder:
        self._folders.append(DcpFolder(path, self.options.random_access))
        return self._folders[-1]

    def _set_kinds(self, names_file: dict[str, Any]) -> None:
        path = self.path / TRAINABLE_FILE
        trained, buffers = names_file["trainable"], names_file.get("buffers", [])
        aliases = names_file.get("aliases", {})
        unknown = [
            name
            for name in [*trained, *buffers, *aliases, *aliases.values()]
            if name not in self.tensors
        ]
        if unknown:
            raise corrupt_file_error(
                path, f"names that {DCP_METADATA} does not have: {join_some(unknown)}"
            )
        self.classify(set(trained), set(buffers))
        self.mark_tied(aliases, path)

    def _read_moments(self, folder: DcpFolder, keys_of: dict[str, tuple[str, ...]]) -> None:
        """Read mmldlm's own {"optim": {"exp_avg": {name: ...}}}."""
        path = folder.metadata_path
        optim = folder.tree.get("optim")
        saved = {
            key: optim[key]
            for key in MOMENTS
            if isinstance(optim, dict) and isinstance(optim.get(key), dict)
        }
        if not saved:
            return
        for name, info in self.tensors.items():
            if info.kind != "trainable":
                continue
            keys = keys_of.get(name, MOMENTS)
            check_no_other_moment(
                path, [key for key, table in saved.items() if name in table], keys, name
            )
            for key in keys:
                moment = saved.get(key, {}).get(name)
                if not isinstance(moment, DcpTensor):
                    found = f"no optim.{key}.{name}, while other weights have their moments"
                    raise corrupt_file_error(path, found)
                if moment.shape != info.shape:
                    found = f"optim.{key}.{name} has shape {moment.shape}, the weight {info.shape}"
                    raise corrupt_file_error(path, found)
                self.moments.setdefault(key, {})[name] = moment.parts()

    # -- optimizers of other programs -------------------------------------------------------------

    def _read_named_optimizer(self, optimizers: dict[Keys, dict], path: Keys) -> None:
        suffix = self.path.name.removeprefix(_ACCELERATE_MODEL)
        beside = self.path.parent / f"optimizer_{suffix}"
        if suffix != self.path.name and (beside / DCP_METADATA).is_file():
            optimizers = optimizers | find_optimizers(self._open(beside).tree)
        add_named_optimizer(self, optimizers, path)


# -- Megatron-core --------------------------------------------------------------------------------


def _refuse_megatron(path: Path) -> None:
    """Raise UserError for a checkpoint of Megatron-core, which stores all layers of a stack as one
    tensor.
    """
    backend = read_json_object(path / "metadata.json").get("sharded_backend")
    if backend or (path / "common.pt").is_file():
        raise _megatron_error(
            path, f"one of Megatron-core ({'metadata.json' if backend else 'common.pt'} beside it)"
        )


def _refuse_stacked_layers(path: Path, names: Iterable[str]) -> None:
    """Raise UserError for Megatron-core's names without a layer's number, in folders that lack its
    other files.
    """
    if stacked := [name for name in names if _STACKED_LAYERS.search(name)]:
        raise _megatron_error(
            path, f"all layers of Megatron-core as one tensor: {join_some(stacked)}"
        )


def _megatron_error(path: Path, found: str) -> UserError:
    return UserError(
        f"a checkpoint under the names of its model in {path}",
        found,
        "export it with Megatron's own tools (Megatron Bridge, or tools/checkpoint/convert.py) and"
        " give their output",
    )


# -- trainable.json -------------------------------------------------------------------------------


def _read_trainable(folder: Path) -> dict[str, Any] | None:
    path = folder / TRAINABLE_FILE
    if not os.path.lexists(path):
        return None
    try:
        content = json.loads(read_bytes(path))
        lists = [
            content["trainable"],
            content.get("buffers", []),
            list(content.get("aliases", {}).values()),
        ]
        if not all(
            isinstance(names, list) and all(isinstance(name, str) for name in names)
            for names in lists
        ):
            raise ValueError("names that are not text")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise corrupt_file_error(
            path, f"something other than a JSON object with a list `trainable` ({error!r})"
        ) from error
    return content


def _groups(path: Path, record: dict[str, Any]) -> list[Group]:
    """Return the parameter groups in a trainable.json; [] for one of an older mmldlm."""
    try:
        groups = [
            Group(list(group["names"]), dict(group["settings"]))
            for group in record.get("groups", [])
        ]
        for group in groups:
            if "betas" in group.settings:
                # JSON has no tuples.
                group.settings["betas"] = tuple(group.settings["betas"])
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        found = f"groups that are not a list of names and settings ({error!r})"
        raise corrupt_file_error(path, found) from error
    return groups


# -- Writing --------------------------------------------------------------------------------------

_DCP = "torch.distributed.checkpoint.metadata"


def plan_dcp(
    source: WeightSource, optimizer: OptimizerMetadata | None, world_size: int, folder: Path
) -> tuple[WritePlan, bytes]:
    """Return the plan of the ranks' files in `folder`, and the bytes of its .metadata.

    Args:
        optimizer: Optimizer metadata; None to write the weights alone.
    """
    items: list[list[tuple[str, str, TensorSpec, tuple[int, ...]]]] = [
        [] for _ in range(world_size)
    ]
    described: dict[str, tuple[str, tuple[int, ...], list[tuple]]] = {}
    for name, info in source.tensors.items():
        if info.alias_of:
            continue
        for what in (WEIGHT, *(source.moments_of(name) if optimizer is not None else ())):
            dtype = info.dtype if what == WEIGHT else "float32"
            chunks = list(_chunks(info, world_size))
            described[_key(name, what)] = (
                dtype,
                info.shape,
                [(offsets, sizes) for _, offsets, sizes in chunks],
            )
            for rank, offsets, sizes in chunks:
                items[rank].append((name, what, TensorSpec(dtype, sizes), offsets))
    plan, places = WritePlan(), {}
    for rank, held in enumerate(items):
        layouts = [TorchFileLayout(tensor, "archive") for _, _, tensor, _ in held]
        if not layouts:
            continue
        file = TorchFileWriter(folder / f"__{rank}_0.distcp", layouts)
        plan.files.append(file)
        for (name, what, tensor, offsets), layout, base in zip(held, layouts, file.bases):
            start = offsets[0] * numel(source.tensors[name].shape[1:]) if offsets else 0
            plan.add(name, what, [WriteSegment(file, tensor, 0, start, tensor.numel)])
            places[_key(name, what), offsets] = (file.path.name, base, layout.size)
    for name, info in source.tensors.items():
        if info.alias_of:
            described[_key(name, WEIGHT)] = described[_key(info.alias_of, WEIGHT)]
            for offsets, _ in described[_key(name, WEIGHT)][2]:
                places[_key(name, WEIGHT), offsets] = places[_key(info.alias_of, WEIGHT), offsets]
    return plan, _metadata(described, places)


def write_descriptions(
    source: WeightSource, optimizer: OptimizerMetadata | None, metadata: bytes, folder: Path
) -> None:
    """Write trainable.json and deepspeed.pt, then .metadata, whose presence makes the folder a
    checkpoint.
    """
    if optimizer is not None:
        (folder / TRAINABLE_FILE).write_text(json.dumps(trainable_names(source, optimizer)) + "\n")
    write_deepspeed_state(optimizer, folder)
    (folder / DCP_METADATA).write_bytes(metadata)


def trainable_names(source: WeightSource, optimizer: OptimizerMetadata) -> dict[str, Any]:
    """Return the content of trainable.json: what DCP does not record, and what DeepSpeed needs."""
    kinds = {
        kind: [name for name, info in source.tensors.items() if info.kind == kind]
        for kind in ("buffer", "alias")
    }
    return {
        "trainable": [name for group in optimizer.groups for name in group.names],
        "buffers": kinds["buffer"],
        "aliases": {name: source.tensors[name].alias_of for name in kinds["alias"]},
        "groups": [
            {"names": group.names, "settings": group.settings} for group in optimizer.groups
        ],
        "steps": optimizer.steps,
        "compute_dtype": optimizer.compute_dtype,
        "deepspeed": plain_scaling(optimizer),
    }


def _key(name: str, what: str) -> str:
    return f"model.{name}" if what == WEIGHT else f"optim.{what}.{name}"


def _path(key: str) -> tuple[str, ...]:
    """Return the path of a flat name in the nested dict that was saved."""
    first, _, rest = key.partition(".")
    return (first, rest) if first == "model" else (first, *rest.split(".", 1))


def _chunks(
    info: TensorInfo, world: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield (rank, offsets, sizes) of the non-empty chunks of a tensor, whose rows are cut as by
    torch.chunk.
    """
    if info.kind == "buffer" or not info.shape or not info.numel:
        yield 0, (0,) * len(info.shape), info.shape
        return
    rows = -(-info.shape[0] // world)
    for rank in range(-(-info.shape[0] // rows)):
        held = min(rows, info.shape[0] - rank * rows)
        yield rank, (rank * rows, *(0,) * (len(info.shape) - 1)), (held, *info.shape[1:])


def _metadata(
    described: dict[str, tuple[str, tuple[int, ...], list[tuple]]], places: dict
) -> bytes:
    layout = ObjectSpec(GlobalRef("torch.serialization", "_get_layout"), ("torch.strided",))
    memory = ObjectSpec(GlobalRef(_DCP, "_MEM_FORMAT_ENCODING"), (0,))
    tensors, storage = {}, {}
    for key, (dtype, shape, chunks) in described.items():
        properties = ObjectSpec(
            GlobalRef(_DCP, "TensorProperties"),
            state=(GlobalRef("torch", dtype), layout, False, memory, False),
        )
        pieces = [
            ObjectSpec(
                GlobalRef(_DCP, "ChunkStorageMetadata"),
                state={"offsets": TorchSize(offsets), "sizes": TorchSize(sizes)},
            )
            for offsets, sizes in chunks
        ]
        state = {"properties": properties, "size": TorchSize(shape), "chunks": pieces}
        tensors[key] = ObjectSpec(GlobalRef(_DCP, "TensorStorageMetadata"), state=state)
        for position, (offsets, _) in enumerate(chunks):
            index = {"fqn": key, "offset": TorchSize(offsets), "index": position}
            file, at, length = places[key, offsets]
            info = {
                "relative_path": file,
                "offset": at,
                "length": length,
                "transform_descriptors": None,
            }
            storage[ObjectSpec(GlobalRef(_DCP, "MetadataIndex"), state=_Frozen(index))] = (
                ObjectSpec(
                    GlobalRef("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
                    state=info,
                )
            )
    fields = {
        "state_dict_metadata": tensors,
        "planner_data": {key: _path(key) for key in described},
        "storage_data": storage,
        "storage_meta": None,
        "version": "1.0.0",
    }
    pickled = PickleWriter()
    pickled.add(ObjectSpec(GlobalRef(_DCP, "Metadata"), state=fields))
    return pickled.finish()


class _Frozen(dict):
    """A dict used as a key; it must not change."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)
