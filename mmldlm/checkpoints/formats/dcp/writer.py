"""Write a torch.distributed.checkpoint folder of any world size, as FSDP2 and mmldlm's fsdp engine
save it.

Layout: see reader. Weights are cut along their first dimension, buffers are stored in rank 0's
file, and a tied weight's second name points to the bytes of the first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.formats.deepspeed_state import write_deepspeed_state
from mmldlm.checkpoints.formats.dtypes import numel
from mmldlm.checkpoints.formats.optimizer_metadata import (
    COPIED_KEYS,
    PLAIN_SCALER,
    OptimizerMetadata,
    plain_scaler,
)
from mmldlm.checkpoints.formats.torch_save.pickler import (
    GlobalRef,
    ObjectSpec,
    PickleWriter,
    TensorSpec,
    TorchSize,
)
from mmldlm.checkpoints.formats.torch_save.writer import TorchFileLayout, TorchFileWriter
from mmldlm.checkpoints.formats.weight_source import TensorInfo, WeightSource
from mmldlm.checkpoints.formats.write_plan import WEIGHT, WritePlan, WriteSegment
from mmldlm.checkpoints.layout import DCP_METADATA, TRAINABLE_FILE

_DCP = "torch.distributed.checkpoint.metadata"


def plan_dcp(
    source: WeightSource, optimizer: OptimizerMetadata | None, world_size: int, folder: Path
) -> tuple[WritePlan, bytes]:
    """Return the plan of the ranks' files in `folder`, and the bytes of its .metadata.

    Args:
        optimizer: None to write the weights alone, if the source does not record what was trained.
    """
    items: list[list[tuple[str, str, TensorSpec, int, tuple[int, ...]]]] = [
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
                items[rank].append((name, what, TensorSpec(dtype, sizes), rank, offsets))
    plan, places = WritePlan(), {}
    for rank, held in enumerate(items):
        layouts = [TorchFileLayout(tensor, "archive") for _, _, tensor, _, _ in held]
        if not layouts:
            continue
        file = TorchFileWriter(folder / f"__{rank}_0.distcp", layouts)
        plan.files.append(file)
        for (name, what, tensor, _, offsets), layout, base in zip(held, layouts, file.bases):
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
        "deepspeed": {
            **{key: optimizer.optimizer[key] for key in COPIED_KEYS if key in optimizer.optimizer},
            PLAIN_SCALER: plain_scaler(optimizer.optimizer["loss_scaler"]),
        },
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
        for number, (offsets, _) in enumerate(chunks):
            index = {"fqn": key, "offset": TorchSize(offsets), "index": number}
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
