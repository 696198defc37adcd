"""Reader of torch.distributed.checkpoint folders (FSDP2), without torch and without unpickling anything.

Layout (torch 2.13, torch/distributed/checkpoint/{metadata,filesystem}.py): `.metadata` is a pickle that says, for every
name, its dtype and size, how it is cut into chunks, and in which file and bytes each chunk lies; `__{rank}_{k}.distcp`
files hold the chunks back to back, each a zip file of torch.save by itself. FSDP2 cuts along dimension 0, so a chunk is
a range of the flat tensor; a replicated tensor is one chunk, stored once.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.formats.adam_state import MOMENTS
from mmldlm.checkpoints.formats.deepspeed.files import join_some, numel
from mmldlm.checkpoints.formats.detect import METADATA
from mmldlm.checkpoints.formats.dtypes import DTYPES
from mmldlm.checkpoints.formats.torch_save.reader import (
    MAX_PICKLE_BYTES,
    TorchFile,
    corrupt_file_error,
    open_for_reading,
)
from mmldlm.checkpoints.formats.torch_save.unpickler import (
    OpaqueObject,
    RefusedPickle,
    TensorRef,
    dtype_name,
    read_pickle,
)
from mmldlm.checkpoints.formats.weight_source import FileRange, TensorInfo, WeightSource
from mmldlm.errors import UserError

TRAINABLE = "trainable.json"
_MODEL = "model."
_OPTIMIZER = ("optim.", "optimizer.", "optimizers.")


class DcpFile:
    """One .distcp file; its items share the descriptor."""

    def __init__(self, path: Path):
        self.path = path
        self.fd = open_for_reading(path)
        self.size = os.fstat(self.fd).st_size

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class DcpItem:
    """One chunk: opened only when it is read, because a rank needs few of a large checkpoint's chunks.

    Offers what a weights.Part needs of a TorchFile. `ref` is what .metadata says of the tensor; the item must agree.
    """

    def __init__(self, file: DcpFile, offset: int, length: int, ref: TensorRef, what: str, is_ranged: bool):
        self.path = file.path
        self._file, self._offset, self._length = file, offset, length
        self._what, self._is_ranged = what, is_ranged
        self.ref = ref
        self._zip: TorchFile | None = None
        self._stored = ref
        self._lock = threading.Lock()

    def _open(self) -> TorchFile:
        with self._lock:
            return self._opened()

    def _opened(self) -> TorchFile:
        if self._zip is None:
            window = (self._offset, self._length)
            item = TorchFile(self.path, self._is_ranged, window, self._file.fd)
            stored = item.load()
            if not isinstance(stored, TensorRef) or (stored.dtype, stored.shape) != (self.ref.dtype, self.ref.shape):
                found = f"{stored.dtype} {stored.shape}" if isinstance(stored, TensorRef) else type(stored).__name__
                expected = f"{self.ref.dtype} {self.ref.shape}"
                raise corrupt_file_error(self.path, f"{found} for a part of {self._what}, {METADATA} says {expected}")
            item.check_ref(stored, self._what)
            if not stored.is_contiguous:
                raise UserError(
                    f"chunks in row-major order in {self.path}",
                    f"a part of {self._what} with strides {stored.stride}",
                    "call .contiguous() on it before it is saved",
                )
            self._zip, self._stored = item, stored
        return self._zip

    def position_of(self, ref: TensorRef, start: int = 0) -> int:
        """Where element `start` lies, nearly: good enough to read in one sweep without opening."""
        return self._offset + start * DTYPES[ref.dtype].itemsize

    def read_elements_into(self, ref: TensorRef, start: int, view: memoryview) -> int | None:
        item = self._open()
        return item.read_elements_into(self._stored, start, view)

    def check_ref_crc(self, ref: TensorRef) -> None:
        self._open().check_ref_crc(self._stored)

    def check_touched(self) -> None:
        if self._zip is not None:
            self._zip.check_touched()

    def close(self) -> None:
        self._file.close()


class DcpCheckpoint(WeightSource):
    """A DCP folder opened for reading; see WeightSource.

    Of {"model": ..., "optim": {"exp_avg": ..., "exp_avg_sq": ...}}, as mmldlm saves it, the model's names are given
    without their prefix. Which weights were trained stands in `trainable.json` beside: {"trainable": [names]}, and
    optionally "buffers": [names] and "aliases": {second name: name}.
    """

    engine = "fsdp"

    @classmethod
    def open(
        cls, path: Path | str, allow_nonfinite: bool = False, with_moments: bool = False, is_ranged: bool = False
    ) -> DcpCheckpoint:
        """Opens a folder with a .metadata file.

        Raises:
            UserError: missing or cut files, a hostile or unknown .metadata, tensors that were cut along another
                dimension than the first, compressed ones, chunks that do not cover a tensor exactly.
        """
        source = cls(Path(path), allow_nonfinite, is_ranged)
        source._distcp: dict[str, DcpFile] = {}
        try:
            source._read(with_moments)
        except BaseException:
            source.close()
            raise
        return source

    def close(self) -> None:
        super().close()
        for file in self._distcp.values():
            file.close()

    def _read(self, with_moments: bool) -> None:
        metadata = read_metadata(self.path / METADATA)
        tensors = metadata["state_dict_metadata"]
        places = _places(self.path / METADATA, metadata["storage_data"])
        self._open_files(places)
        names = [name for name, entry in tensors.items() if _kind_of(entry) == "TensorStorageMetadata"]
        of_model = [name for name in names if not name.startswith(_OPTIMIZER)]
        prefix = _MODEL if of_model and all(name.startswith(_MODEL) for name in of_model) else ""
        others = len(tensors) - len(names)
        if others:
            self.notes.append(f"{others} entries of {METADATA} are no tensors and were left out")
        for name in of_model:
            dtype, shape, parts = self._tensor(name, tensors[name], places)
            bare = name.removeprefix(prefix)
            self.tensors[bare] = TensorInfo(bare, dtype, shape, "parameter")
            self._parts[bare] = parts
        facts = _read_trainable(self.path)
        if facts is None:
            if with_moments:
                found = f"no {TRAINABLE} that names them"
                fix = "resume from a checkpoint that mmldlm saved, or take the weights alone with training.init_from"
                raise UserError(f"the trained parameters of the checkpoint in {self.path}", found, fix)
        else:
            self._sort(facts)
        if with_moments:
            self._read_moments(names, tensors, places)
        self.files.sort(key=lambda item: (item.path.name, item._offset))

    def _open_files(self, places: dict) -> None:
        """Every file must hold all that .metadata puts into it, also what nobody will read."""
        ends: dict[str, int] = {}
        for relative, offset, length in places.values():
            ends[relative] = max(ends.get(relative, 0), offset + length)
        for relative, end in ends.items():
            file = self._distcp[relative] = DcpFile(self.path / relative)
            if file.size < end:
                raise corrupt_file_error(file.path, f"it ends at byte {file.size}, its last part at {end}: cut off")

    def _sort(self, facts: dict[str, Any]) -> None:
        path = self.path / TRAINABLE
        trained, buffers, aliases = facts["trainable"], facts.get("buffers", []), facts.get("aliases", {})
        unknown = [name for name in [*trained, *buffers, *aliases, *aliases.values()] if name not in self.tensors]
        if unknown:
            raise corrupt_file_error(path, f"it names {join_some(unknown)}, which {METADATA} does not have")
        self.set_kinds(set(trained), set(buffers))
        self.mark_aliases(aliases, path)

    def _read_moments(self, names: list[str], tensors: dict, places: dict) -> None:
        stepped = [name for name in names if name.startswith(tuple(f"optim.{key}." for key in MOMENTS))]
        if not stepped:
            return
        for name, info in self.tensors.items():
            if info.kind != "trainable":
                continue
            for key in MOMENTS:
                full = f"optim.{key}.{name}"
                if full not in tensors:
                    raise corrupt_file_error(self.path / METADATA, f"no {full}, while other weights have their moments")
                _, shape, parts = self._tensor(full, tensors[full], places)
                if shape != info.shape:
                    raise corrupt_file_error(self.path / METADATA, f"{full} has shape {shape}, the weight {info.shape}")
                self.moments.setdefault(key, {})[name] = parts

    def _tensor(self, name: str, entry: Any, places: dict) -> tuple[str, tuple[int, ...], list[FileRange]]:
        """dtype, shape and parts of one tensor, its chunks checked to follow each other without gap or overlap."""
        path = self.path / METADATA
        dtype, shape, chunks = _description(path, name, entry)
        parts, row = [], 0
        for offsets, sizes in sorted(chunks):
            if 0 in sizes:
                continue
            if len(offsets) != len(shape) or len(sizes) != len(shape) or sizes[1:] != shape[1:] or any(offsets[1:]):
                raise UserError(
                    f"tensors in {self.path} cut along their first dimension only",
                    f"a chunk of {sizes} at {offsets} of {name} {shape}",
                    "save without tensor parallelism",
                )
            if shape and offsets[0] != row:
                raise corrupt_file_error(path, f"rows of {name} {shape} from {row} on are in no chunk, or in two")
            row += sizes[0] if shape else 1
            parts.append(self._part(name, dtype, sizes, places.get((name, offsets))))
        if sum(part.count for part in parts) != numel(shape):
            raise corrupt_file_error(
                path, f"the chunks of {name} {shape} hold {sum(part.count for part in parts)} elements"
            )
        return dtype, shape, parts

    def _part(self, name: str, dtype: str, sizes: tuple[int, ...], place: tuple[str, int, int] | None) -> FileRange:
        if place is None:
            raise corrupt_file_error(self.path / METADATA, f"it does not say in which file a chunk of {name} lies")
        relative, offset, length = place
        file = self._distcp[relative]
        ref = TensorRef(dtype, sizes, _row_major(sizes), "", 0, numel(sizes))
        item = DcpItem(file, offset, length, ref, name, self.is_ranged)
        self.files.append(item)
        return FileRange(item, ref, 0, ref.numel)


# -- .metadata --------------------------------------------------------------------------------------------------------


def read_metadata(path: Path) -> dict[str, Any]:
    """The fields of a .metadata file.

    Raises:
        UserError: damaged, of an unknown form, or asking for code to be run; nothing was executed.
    """
    if path.stat().st_size > MAX_PICKLE_BYTES:
        raise corrupt_file_error(path, f"{path.stat().st_size} bytes, far too long for a description of tensors")
    try:
        value = read_pickle(path.read_bytes())
    except RefusedPickle as error:
        raise UserError(
            f"{path} to describe tensors only", f"{error}; nothing was executed", "use a checkpoint you trust"
        ) from error
    fields = value.state if isinstance(value, OpaqueObject) and _kind_of(value) == "Metadata" else None
    if not isinstance(fields, dict) or not all(
        isinstance(fields.get(key), dict) for key in ("state_dict_metadata", "storage_data")
    ):
        raise corrupt_file_error(path, "no Metadata of torch.distributed.checkpoint")
    if not all(isinstance(name, str) for name in fields["state_dict_metadata"]):
        raise corrupt_file_error(path, "names that are no text")
    return fields


def _kind_of(value: Any) -> str:
    return value.kind.rpartition(".")[2] if isinstance(value, OpaqueObject) else ""


def _fields(path: Path, value: Any, kind: str) -> dict[str, Any]:
    if _kind_of(value) != kind or not isinstance(value.state, dict):
        raise corrupt_file_error(path, f"{str(value)[:80]} where a {kind} should stand")
    return value.state


def _sizes(path: Path, value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(size) is int and size >= 0 for size in value):
        raise corrupt_file_error(path, f"{str(value)[:80]} where sizes should stand")
    return value


def _description(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], list[tuple[tuple, tuple]]]:
    """dtype, shape and [(offsets, sizes)] of a tensor."""
    fields = _fields(path, entry, "TensorStorageMetadata")
    properties = fields.get("properties")
    # TensorProperties pickles itself as the tuple (dtype, layout, requires_grad, memory format, pinned).
    state = properties.state if _kind_of(properties) == "TensorProperties" else None
    dtype = dtype_name(state[0]) if isinstance(state, tuple) and state else None
    chunks = fields.get("chunks")
    if dtype is None or not isinstance(chunks, list):
        raise corrupt_file_error(path, f"no dtype or no chunks of {name}")
    cut = []
    for chunk in chunks:
        held = _fields(path, chunk, "ChunkStorageMetadata")
        cut.append((_sizes(path, held.get("offsets")), _sizes(path, held.get("sizes"))))
    return dtype, _sizes(path, fields.get("size")), cut


def _places(path: Path, storage: dict) -> dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]:
    """(name, offsets) -> (file, first byte, number of bytes)."""
    places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
    inside: set[str] = set()
    for index, info in storage.items():
        key, held = _fields(path, index, "MetadataIndex"), _fields(path, info, "_StorageInfo")
        name, offsets = key.get("fqn"), key.get("offset")
        relative, offset, length = held.get("relative_path"), held.get("offset"), held.get("length")
        if offsets is None:  # an object that is no tensor
            continue
        if held.get("transform_descriptors"):
            found = f"{name} written through {held['transform_descriptors']}"
            raise UserError(f"chunks as they are in {path.parent}", found, "save without compression")
        if relative not in inside:
            is_inside = isinstance(relative, str) and relative and not Path(relative).is_absolute()
            if not is_inside or ".." in Path(relative).parts:
                raise corrupt_file_error(path, f"{name} lies in a file {str(relative)[:80]!r} outside the checkpoint")
            inside.add(relative)
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise corrupt_file_error(path, f"{name} lies at bytes {offset!r} + {length!r} of {relative}")
        places[name, _sizes(path, offsets)] = (relative, offset, length)
    return places


def _read_trainable(folder: Path) -> dict[str, Any] | None:
    path = folder / TRAINABLE
    if not path.is_file():
        return None
    try:
        facts = json.loads(path.read_text())
        lists = [facts["trainable"], facts.get("buffers", []), list(facts.get("aliases", {}).values())]
        if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists):
            raise ValueError("names that are no text")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise corrupt_file_error(path, f"no JSON object with a list `trainable` ({error!r})") from error
    return facts


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
