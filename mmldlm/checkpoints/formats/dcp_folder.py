"""A torch.distributed.checkpoint folder: its .metadata, and the tensors and pickled objects in its
files.

Layout (torch 2.13, torch/distributed/checkpoint/{metadata,filesystem}.py): `.metadata` is a pickle
with the dtype, size and chunks of every name, and the file and bytes of every chunk.
`__{rank}_{k}.distcp` files hold the chunks back to back, each a complete zip file of torch.save.
FSDP2 cuts along dimension 0, so a chunk is a range of the flat tensor; a replicated tensor is one
chunk, stored once. `planner_data` has the path of every name in the nested dict that was saved.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.checkpoints.files.dtypes import DTYPES, numel, row_major
from mmldlm.checkpoints.files.file_io import closed_on_error
from mmldlm.checkpoints.files.file_kinds import SAFETENSORS, FileKind
from mmldlm.checkpoints.files.torch_file import (
    MAX_PICKLE_BYTES,
    TorchFile,
    corrupt_file_error,
    open_for_reading,
)
from mmldlm.checkpoints.files.unpickler import (
    OpaqueObject,
    RefusedPickle,
    TensorRef,
    dtype_name,
    opaque_kind,
    read_pickle,
)
from mmldlm.checkpoints.formats.selection import (
    MODEL_KEYS,
    Keys,
    StoredTensor,
    StoredValue,
    tree_of,
)
from mmldlm.checkpoints.formats.weight_source import FileRange, RegularParts
from mmldlm.checkpoints.manifest import DCP_METADATA
from mmldlm.errors import UserError
from mmldlm.utils.formatting import describe_os_error
from mmldlm.utils.input_files import read_bytes
from mmldlm.utils.moments import MOMENTS
from mmldlm.utils.paths import path_inside

# File, first byte, number of bytes.
Location = tuple[str, int, int]
# Keys of pickled objects that may hold the model.
_MAY_HOLD_MODEL = (*MODEL_KEYS, "state", "app", "net", "network", "ema")
_FLAT_OPTIMIZERS = ("optim.", "optimizer.", "optimizers.")


class DcpTensor(StoredTensor):
    """One tensor of a folder."""

    def __init__(
        self, folder: DcpFolder, name: str, dtype: str, shape: tuple[int, ...], chunks: list
    ):
        self.folder, self.name, self.chunks = folder, name, chunks
        self.dtype, self.shape = dtype, shape

    def parts(self) -> DcpParts:
        # The chunks must follow each other without gap or overlap.
        path, name, shape = self.folder.metadata_path, self.name, self.shape
        chunks, row, count = [], 0, 0
        for offsets, sizes in sorted(self.chunks):
            if 0 in sizes:
                continue
            if (
                len(offsets) != len(shape)
                or len(sizes) != len(shape)
                or sizes[1:] != shape[1:]
                or any(offsets[1:])
            ):
                raise UserError(
                    f"tensors in {self.folder.path} cut along their first dimension only",
                    f"a chunk of {sizes} at {offsets} of {name} {shape}",
                    "save without tensor parallelism",
                )
            if shape and offsets[0] != row:
                raise corrupt_file_error(
                    path, f"rows of {name} {shape} from {row} on in no chunk, or in two"
                )
            location = self.folder.locate(name, self.dtype, sizes, offsets)
            chunks.append((count, sizes[0] if shape else 1, *location))
            row += sizes[0] if shape else 1
            count += numel(sizes)
        if count != numel(shape):
            raise corrupt_file_error(path, f"chunks of {name} {shape} with {count} elements")
        return DcpParts(self, chunks)


class DcpParts(RegularParts):
    """The chunks of a tensor.

    Args:
        tensor: The tensor.
        chunks: (first element, rows, index of the file, first byte, number of bytes) of each.
    """

    def __init__(self, tensor: DcpTensor, chunks: list[tuple[int, int, int, int, int]]):
        self._name, self._dtype, self._row = tensor.name, tensor.dtype, tensor.shape[1:]
        self._is_scalar, self._random_access = not tensor.shape, tensor.folder.random_access
        self._files = tensor.folder.files
        # A fourth of the memory of tuples of whole numbers.
        self._chunks = np.array(chunks, np.int64).reshape(-1, 5)

    @property
    def starts(self) -> np.ndarray:  # type: ignore[override]
        return self._chunks[:, 0]

    def __getitem__(self, index):
        _, rows, file, offset, length = self._chunks[index].tolist()
        sizes = () if self._is_scalar else (rows, *self._row)
        ref = TensorRef(self._dtype, sizes, row_major(sizes), "", 0, numel(sizes))
        item = self._files[file].item(offset, length, ref, self._name, self._random_access)
        return FileRange(item, ref, 0, ref.numel)


class DcpValue(StoredValue):
    """One pickled object of a folder."""

    def __init__(self, folder: DcpFolder, name: str):
        self.folder, self.name = folder, name

    def load(self) -> Any:
        item = self.folder.open_object(self.name)
        return tree_of(item, item.load())


class DcpFolder:
    """The names and files of a DCP folder; closing is the caller's.

    Attributes:
        path: Folder of the checkpoint.
        tree: Nested dict that was saved, with DcpTensor and DcpValue as leaves.
        values: Name -> pickled object.
        files: Files, by name.
        objects: Pickled objects that have been requested so far.
    """

    def __init__(self, path: Path, random_access: bool = False):
        """Read .metadata and open every file.

        Raises:
            UserError: missing or truncated files, a hostile or unknown .metadata, compressed
                tensors.
        """
        self.path, self.random_access = path, random_access
        self.metadata_path = path / DCP_METADATA
        self.objects: list[ItemFile] = []
        self.values: dict[str, DcpValue] = {}
        self.files: list[DcpFile] = []
        self._index_of: dict[str, int] = {}
        metadata = read_metadata(self.metadata_path)
        self._chunks, self._objects = _locations(self.metadata_path, metadata["storage_data"])
        self.tree = self._build_tree(metadata["state_dict_metadata"], metadata.get("planner_data"))
        with closed_on_error(self):
            self._open_files()
            if not metadata.get("planner_data"):
                self._load_dicts()

    def close(self) -> None:
        """Close the files."""
        for file in self.files:
            file.close()

    def _open_files(self) -> None:
        """Open every file; each must be as long as .metadata requires, also where it will not be
        read.
        """
        ends: dict[str, int] = {}
        for relative, offset, length in self._chunks.values():
            ends[relative] = max(ends.get(relative, 0), offset + length)
        for relative, end in sorted(ends.items()):
            file = self._file(relative)
            if file.size < end:
                raise corrupt_file_error(
                    file.path, f"it ends at byte {file.size}, its last part at {end}: truncated"
                )

    def _file(self, relative: str) -> DcpFile:
        if relative not in self._index_of:
            self.files.append(DcpFile(self.path / relative))
            self._index_of[relative] = len(self.files) - 1
        return self.files[self._index_of[relative]]

    def _build_tree(self, entries: dict[str, Any], planner_data: Any) -> dict[Any, Any]:
        tree: dict[Any, Any] = {}
        paths = _paths(self.metadata_path, entries, planner_data)
        for name, entry in entries.items():
            if _kind_of(entry) == "TensorStorageMetadata":
                leaf: Any = DcpTensor(self, name, *_description(self.metadata_path, name, entry))
            else:
                leaf = self.values[name] = DcpValue(self, name)
            node = tree
            for key in paths[name][:-1]:
                node = node.setdefault(key, {})
                if not isinstance(node, dict):
                    raise corrupt_file_error(self.metadata_path, f"{name} inside of another entry")
            if paths[name][-1] in node:
                raise corrupt_file_error(
                    self.metadata_path, f"{name} at the place of another entry"
                )
            node[paths[name][-1]] = leaf
        return tree

    def _load_dicts(self) -> None:
        """Replace the pickled dicts of a folder that was saved with flatten_state_dict=False by
        their content.

        Raises:
            UserError: one that may be the model cannot be read.
        """
        for name, value in self.values.items():
            if self.tree.get(name) is not value:
                continue
            try:
                self.tree[name] = value.load()
            except UserError:
                if name in _MAY_HOLD_MODEL:
                    raise

    def locate(
        self, name: str, dtype: str, sizes: tuple[int, ...], offsets: tuple[int, ...]
    ) -> tuple[int, int, int]:
        """Return (index of the file, first byte, number of bytes) of one chunk of a tensor."""
        location = self._chunks.get((name, offsets))
        if location is None:
            raise corrupt_file_error(self.metadata_path, f"no file for a chunk of {name}")
        relative, offset, length = location
        needed = numel(sizes) * DTYPES[dtype].itemsize
        # Checked before memory or disk space is taken for the chunk.
        if needed > length:
            found = (
                f"a chunk of {name} {sizes} in {dtype}, {needed} bytes, in {length} bytes of"
                f" {relative}"
            )
            raise corrupt_file_error(self.metadata_path, found)
        return self._index_of[relative], offset, length

    def open_object(self, name: str) -> ItemFile:
        """Open the file of a pickled object."""
        if name not in self._objects:
            raise corrupt_file_error(self.metadata_path, f"no file for {name}")
        relative, offset, length = self._objects[name]
        item = ItemFile(self._file(relative), offset, length, self.random_access)
        self.objects.append(item)
        return item


# -- .metadata ------------------------------------------------------------------------------------


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the fields of a .metadata file.

    Raises:
        UserError: damaged, of an unknown form, or naming code; nothing was executed.
    """
    try:
        value = read_pickle(read_bytes(path, MAX_PICKLE_BYTES))
    except OSError as error:
        raise corrupt_file_error(path, f"it cannot be read: {describe_os_error(error)}") from error
    except RefusedPickle as error:
        raise UserError(
            f"only descriptions of tensors in {path}",
            f"{error}; nothing was executed",
            "use a checkpoint you trust",
        ) from error
    fields = (
        value.state if isinstance(value, OpaqueObject) and _kind_of(value) == "Metadata" else None
    )
    if not isinstance(fields, dict) or not all(
        isinstance(fields.get(key), dict) for key in ("state_dict_metadata", "storage_data")
    ):
        raise corrupt_file_error(
            path, "something other than the Metadata of torch.distributed.checkpoint"
        )
    if not all(isinstance(name, str) for name in fields["state_dict_metadata"]):
        raise corrupt_file_error(path, "names that are not text")
    return fields


def _kind_of(value: Any) -> str:
    return value.kind.rpartition(".")[2] if isinstance(value, OpaqueObject) else ""


def _fields(path: Path, value: Any, kind: str) -> dict[str, Any]:
    if _kind_of(value) != kind or not isinstance(value.state, dict):
        raise corrupt_file_error(path, f"{str(value)[:80]} instead of a {kind}")
    return value.state


def _sizes(path: Path, value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(size) is int and size >= 0 for size in value):
        raise corrupt_file_error(path, f"{str(value)[:80]} instead of sizes")
    return value


def _description(
    path: Path, name: str, entry: Any
) -> tuple[str, tuple[int, ...], list[tuple[tuple, tuple]]]:
    """Return dtype, shape and [(offsets, sizes)] of the chunks of a tensor."""
    fields = _fields(path, entry, "TensorStorageMetadata")
    properties: Any = fields.get("properties")
    # TensorProperties pickles itself as the tuple (dtype, layout, requires_grad, memory format,
    # pinned).
    state = properties.state if _kind_of(properties) == "TensorProperties" else None
    dtype = dtype_name(state[0]) if isinstance(state, tuple) and state else None
    chunks = fields.get("chunks")
    if dtype is None and isinstance(state, tuple) and state and (kind := opaque_kind(state[0])):
        fix = "convert it to another type before it is saved"
        raise UserError(f"tensors of types that mmldlm reads in {path}", f"{name} of {kind}", fix)
    if dtype is None or not isinstance(chunks, list):
        raise corrupt_file_error(path, f"no dtype or no chunks of {name}")
    offsets_and_sizes = []
    for chunk in chunks:
        entry = _fields(path, chunk, "ChunkStorageMetadata")
        offsets_and_sizes.append(
            (_sizes(path, entry.get("offsets")), _sizes(path, entry.get("sizes")))
        )
    return dtype, _sizes(path, fields.get("size")), offsets_and_sizes


def _paths(path: Path, names: dict[str, Any], planner_data: Any) -> dict[str, Keys]:
    """Return the path of every name in the nested dict that was saved.

    Without `planner_data` nothing was flattened, or another program wrote the folder: names are
    then taken as they are, unless an optimizer's names show that {"model", "optim"} was flattened.
    """
    saved = planner_data if isinstance(planner_data, dict) else {}
    paths: dict[str, Keys] = {}
    for name in names:
        keys = saved.get(name)
        if keys is None:
            continue
        if (
            not isinstance(keys, tuple)
            or not keys
            or not all(isinstance(key, str | int) for key in keys)
        ):
            raise corrupt_file_error(path, f"{str(keys)[:80]} instead of the path of {name}")
        paths[name] = keys
    is_flattened = not paths and any(name.startswith(_FLAT_OPTIMIZERS) for name in names)
    for name in names:
        if name not in paths:
            first, _, rest = name.partition(".")
            is_prefix = (
                is_flattened and rest and (first == "model" or name.startswith(_FLAT_OPTIMIZERS))
            )
            moment, _, owner = rest.partition(".")
            if is_prefix and first != "model" and moment in MOMENTS:
                # mmldlm's own names of moments.
                paths[name] = (first, moment, owner)
            else:
                paths[name] = (first, rest) if is_prefix else (name,)
    return paths


def _locations(
    path: Path, storage: dict
) -> tuple[dict[tuple[str, tuple[int, ...]], Location], dict[str, Location]]:
    """Return (name, offsets) -> place of every chunk, and name -> place of every pickled
    object.
    """
    chunks: dict[tuple[str, tuple[int, ...]], Location] = {}
    objects: dict[str, Location] = {}
    inside: set[str] = set()
    for index, info in storage.items():
        key, location = _fields(path, index, "MetadataIndex"), _fields(path, info, "_StorageInfo")
        name: Any = key.get("fqn")
        relative: Any = location.get("relative_path")
        offsets = key.get("offset")
        offset, length = location.get("offset"), location.get("length")
        if location.get("transform_descriptors"):
            if offsets is None:
                # It is refused when it is requested.
                continue
            found = f"{name} written through {location['transform_descriptors']}"
            raise UserError(
                f"uncompressed chunks in {path.parent}", found, "save without compression"
            )
        if relative not in inside:
            try:
                path_inside(path.parent, relative)
            except ValueError as error:
                raise corrupt_file_error(path, f"{name} in a file of {error}") from error
            inside.add(relative)
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise corrupt_file_error(
                path, f"{name} at bytes {offset!r} + {length!r} of {relative}"
            )
        if offsets is None:
            objects[name] = (relative, offset, length)
        else:
            chunks[name, _sizes(path, offsets)] = (relative, offset, length)
    return chunks, objects


# -- Items ----------------------------------------------------------------------------------------


class DcpFile:
    """One .distcp file; its items share the descriptor. Pickled, it is its path alone."""

    def __init__(self, path: Path):
        self.path, self._fd = path, -1
        # By first byte, dtype and shape.
        self._items: dict[tuple[int, str, tuple[int, ...]], DcpItem] = {}
        self.size = os.fstat(self.fd).st_size

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_fd": -1, "_items": {}}

    @property
    def fd(self) -> int:
        """Descriptor, opened where it is needed first."""
        if self._fd < 0:
            self._fd = open_for_reading(self.path)
        return self._fd

    def item(
        self, offset: int, length: int, ref: TensorRef, what: str, random_access: bool
    ) -> DcpItem:
        """Return the chunk in these bytes, the same one for every request."""
        key = (offset, ref.dtype, ref.shape)
        return self._items.setdefault(key, DcpItem(self, offset, length, ref, what, random_access))

    def verify_read_records(self) -> None:
        for item in self._items.values():
            item.verify_read_records()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ItemFile(TorchFile):
    """The zip of one pickled object, or of one chunk, inside a .distcp file."""

    def __init__(self, file: DcpFile, offset: int, length: int, random_access: bool):
        super().__init__(file.path, random_access, (offset, length))
        self._file = file

    def _descriptor(self) -> int:
        return self._file.fd

    def _check_kind(self, kind: FileKind | None) -> None:
        if kind is SAFETENSORS:
            fix = (
                "save with FileSystemWriter(...,"
                " serialization_format=SerializationFormat.TORCH_SAVE), the default"
            )
            raise UserError(
                f"items written by torch.save in {self.path}", "safetensors items", fix
            )
        super()._check_kind(kind)


class DcpItem(ItemFile):
    """One chunk, opened when it is read first: a rank needs few chunks of a large checkpoint.

    `ref` is the tensor's description in .metadata, which the item must match.
    """

    def __init__(
        self,
        file: DcpFile,
        offset: int,
        length: int,
        ref: TensorRef,
        what: str,
        random_access: bool,
    ):
        super().__init__(file, offset, length, random_access)
        self.ref, self._what = ref, what
        self._stored: TensorRef | None = None
        self._lock = threading.Lock()

    def _tensor(self) -> TensorRef:
        """Return what the item holds, the tensor that .metadata describes.

        Raises:
            UserError: something else.
        """
        with self._lock:
            if self._stored is None:
                self._stored = self._check(self.load())
            return self._stored

    def _check(self, stored: Any) -> TensorRef:
        is_tensor = isinstance(stored, TensorRef)
        if not is_tensor or (stored.dtype, stored.shape) != (self.ref.dtype, self.ref.shape):
            found = f"{stored.dtype} {stored.shape}" if is_tensor else type(stored).__name__
            raise corrupt_file_error(
                self.path,
                f"{found} for a part of {self._what}, {self.ref.dtype} {self.ref.shape} in"
                f" {DCP_METADATA}",
            )
        self.check_ref(stored, self._what)
        if not stored.is_contiguous:
            negated = ", negated" * stored.negated
            raise UserError(
                f"chunks in row-major order in {self.path}",
                f"a part of {self._what} with strides {stored.stride}{negated}",
                "call .resolve_conj().resolve_neg().contiguous() on it before it is saved",
            )
        return stored

    def position_of(self, ref: TensorRef, start: int = 0) -> int:
        """Return the approximate position of element `start`, to sort reads without opening the
        item.
        """
        return self._base + start * DTYPES[ref.dtype].itemsize

    def read_elements_into(self, ref: TensorRef, start: int, view: memoryview) -> int | None:
        return super().read_elements_into(self._tensor(), start, view)
