"""Reader of torch.distributed.checkpoint folders (FSDP2), without torch and without executing a pickle.

Layout (torch 2.13, torch/distributed/checkpoint/{metadata,filesystem}.py): `.metadata` is a pickle with the dtype, size
and chunks of every name, and the file and bytes of every chunk. `__{rank}_{k}.distcp` files hold the chunks back to
back, each a complete zip file of torch.save. FSDP2 cuts along dimension 0, so a chunk is a range of the flat tensor; a
replicated tensor is one chunk, stored once.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.formats.adam_state import check_no_other_moment
from mmldlm.checkpoints.formats.dcp.item import DcpFile, DcpItem
from mmldlm.checkpoints.formats.dtypes import DTYPES, numel
from mmldlm.checkpoints.formats.torch_save.reader import (
    MAX_PICKLE_BYTES,
    corrupt_file_error,
)
from mmldlm.checkpoints.formats.torch_save.unpickler import (
    OpaqueObject,
    RefusedPickle,
    TensorRef,
    dtype_name,
    read_pickle,
)
from mmldlm.checkpoints.formats.weight_source import FileRange, TensorInfo, WeightSource
from mmldlm.checkpoints.io.open_files import read_small_file
from mmldlm.checkpoints.layout import DCP_METADATA, TRAINABLE_FILE
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some
from mmldlm.utils.inside_paths import path_inside
from mmldlm.utils.moments import MOMENTS, moment_keys

_MODEL = "model."
_OPTIMIZER = ("optim.", "optimizer.", "optimizers.")


class DcpCheckpoint(WeightSource):
    """An opened DCP folder; see WeightSource.

    mmldlm saves {"model": ..., "optim": {"exp_avg": ..., "exp_avg_sq": ...}}; the model's names lose that prefix.
    `trainable.json` next to it lists the trained weights: {"trainable": [names]}, and optionally "buffers": [names],
    "aliases": {second name: name} and "groups": [{"names": [names], "settings": {...}}], which tell Muon's weights.
    """

    engine = "fsdp"

    @classmethod
    def open(
        cls, path: Path | str, allow_nonfinite: bool = False, with_moments: bool = False, random_access: bool = False
    ) -> DcpCheckpoint:
        """Open a folder with a .metadata file.

        Raises:
            UserError: missing or truncated files, a hostile or unknown .metadata, compressed tensors, tensors cut along
                another dimension than the first, chunks that do not cover a tensor exactly.
        """
        source = cls(Path(path), allow_nonfinite, random_access)
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
        metadata = read_metadata(self.path / DCP_METADATA)
        tensors = metadata["state_dict_metadata"]
        locations = _chunk_locations(self.path / DCP_METADATA, metadata["storage_data"])
        self._open_files(locations)
        names = [name for name, entry in tensors.items() if _kind_of(entry) == "TensorStorageMetadata"]
        of_model = [name for name in names if not name.startswith(_OPTIMIZER)]
        prefix = _MODEL if of_model and all(name.startswith(_MODEL) for name in of_model) else ""
        others = len(tensors) - len(names)
        if others:
            self.notes.append(f"{others} entries of {DCP_METADATA} are not tensors and were left out")
        for name in of_model:
            dtype, shape, parts = self._tensor(name, tensors[name], locations)
            bare = name.removeprefix(prefix)
            self.tensors[bare] = TensorInfo(bare, dtype, shape, "parameter")
            self.parts[bare] = parts
        names_file = _read_trainable(self.path)
        if names_file is None:
            if with_moments:
                found = f"no {TRAINABLE_FILE} that names them"
                fix = "resume from a checkpoint that mmldlm saved, or take the weights alone with training.init_from"
                raise UserError(f"the trained parameters of the checkpoint in {self.path}", found, fix)
        else:
            self._set_kinds(names_file)
        if with_moments:
            self._read_moments(names, tensors, locations, _moment_keys(self.path, names_file))
        self.files.sort(key=lambda item: (item.path.name, item._offset))

    def _open_files(self, locations: dict) -> None:
        """Open every file; each must be as long as .metadata requires, also where it will not be read."""
        ends: dict[str, int] = {}
        for relative, offset, length in locations.values():
            ends[relative] = max(ends.get(relative, 0), offset + length)
        for relative, end in ends.items():
            file = self._distcp[relative] = DcpFile(self.path / relative)
            if file.size < end:
                raise corrupt_file_error(file.path, f"it ends at byte {file.size}, its last part at {end}: truncated")

    def _set_kinds(self, names_file: dict[str, Any]) -> None:
        path = self.path / TRAINABLE_FILE
        trained, buffers = names_file["trainable"], names_file.get("buffers", [])
        aliases = names_file.get("aliases", {})
        unknown = [name for name in [*trained, *buffers, *aliases, *aliases.values()] if name not in self.tensors]
        if unknown:
            raise corrupt_file_error(path, f"names that {DCP_METADATA} does not have: {join_some(unknown)}")
        self.classify(set(trained), set(buffers))
        self.mark_tied(aliases, path)

    def _read_moments(
        self, names: list[str], tensors: dict, locations: dict, keys_of: dict[str, tuple[str, ...]]
    ) -> None:
        stepped = [name for name in names if name.startswith(tuple(f"optim.{key}." for key in MOMENTS))]
        if not stepped:
            return
        for name, info in self.tensors.items():
            if info.kind != "trainable":
                continue
            keys = keys_of.get(name, MOMENTS)
            saved = [key for key in MOMENTS if f"optim.{key}.{name}" in tensors]
            check_no_other_moment(self.path / DCP_METADATA, saved, keys, name)
            for key in keys:
                full = f"optim.{key}.{name}"
                if full not in tensors:
                    raise corrupt_file_error(
                        self.path / DCP_METADATA, f"no {full}, while other weights have their moments"
                    )
                _, shape, parts = self._tensor(full, tensors[full], locations)
                if shape != info.shape:
                    raise corrupt_file_error(
                        self.path / DCP_METADATA, f"{full} has shape {shape}, the weight {info.shape}"
                    )
                self.moments.setdefault(key, {})[name] = parts

    def _tensor(self, name: str, entry: Any, locations: dict) -> tuple[str, tuple[int, ...], list[FileRange]]:
        """Return dtype, shape and parts of one tensor, whose chunks must follow each other without gap or overlap."""
        path = self.path / DCP_METADATA
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
                raise corrupt_file_error(path, f"rows of {name} {shape} from {row} on in no chunk, or in two")
            row += sizes[0] if shape else 1
            parts.append(self._part(name, dtype, sizes, locations.get((name, offsets))))
        if sum(part.count for part in parts) != numel(shape):
            raise corrupt_file_error(
                path, f"chunks of {name} {shape} with {sum(part.count for part in parts)} elements"
            )
        return dtype, shape, parts

    def _part(self, name: str, dtype: str, sizes: tuple[int, ...], location: tuple[str, int, int] | None) -> FileRange:
        if location is None:
            raise corrupt_file_error(self.path / DCP_METADATA, f"no file for a chunk of {name}")
        relative, offset, length = location
        file = self._distcp[relative]
        needed = numel(sizes) * DTYPES[dtype].itemsize
        if needed > length:  # before memory or disk space is taken for it
            found = f"a chunk of {name} {sizes} in {dtype}, {needed} bytes, in {length} bytes of {relative}"
            raise corrupt_file_error(self.path / DCP_METADATA, found)
        ref = TensorRef(dtype, sizes, _row_major(sizes), "", 0, numel(sizes))
        item = DcpItem(file, offset, length, ref, name, self.random_access)
        self.files.append(item)
        return FileRange(item, ref, 0, ref.numel)


# -- .metadata --------------------------------------------------------------------------------------------------------


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the fields of a .metadata file.

    Raises:
        UserError: damaged, of an unknown form, or naming code; nothing was executed.
    """
    try:
        value = read_pickle(read_small_file(path, MAX_PICKLE_BYTES))
    except OSError as error:
        raise corrupt_file_error(path, f"it cannot be read: {error.strerror or error}") from error
    except RefusedPickle as error:
        raise UserError(
            f"only descriptions of tensors in {path}", f"{error}; nothing was executed", "use a checkpoint you trust"
        ) from error
    fields = value.state if isinstance(value, OpaqueObject) and _kind_of(value) == "Metadata" else None
    if not isinstance(fields, dict) or not all(
        isinstance(fields.get(key), dict) for key in ("state_dict_metadata", "storage_data")
    ):
        raise corrupt_file_error(path, "something other than the Metadata of torch.distributed.checkpoint")
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


def _description(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], list[tuple[tuple, tuple]]]:
    """Return dtype, shape and [(offsets, sizes)] of a tensor."""
    fields = _fields(path, entry, "TensorStorageMetadata")
    properties = fields.get("properties")
    # TensorProperties pickles itself as the tuple (dtype, layout, requires_grad, memory format, pinned).
    state = properties.state if _kind_of(properties) == "TensorProperties" else None
    dtype = dtype_name(state[0]) if isinstance(state, tuple) and state else None
    chunks = fields.get("chunks")
    if dtype is None or not isinstance(chunks, list):
        raise corrupt_file_error(path, f"no dtype or no chunks of {name}")
    offsets_and_sizes = []
    for chunk in chunks:
        entry = _fields(path, chunk, "ChunkStorageMetadata")
        offsets_and_sizes.append((_sizes(path, entry.get("offsets")), _sizes(path, entry.get("sizes"))))
    return dtype, _sizes(path, fields.get("size")), offsets_and_sizes


def _chunk_locations(path: Path, storage: dict) -> dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]:
    """Return (name, offsets) -> (file, first byte, number of bytes)."""
    locations: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
    inside: set[str] = set()
    for index, info in storage.items():
        key, location = _fields(path, index, "MetadataIndex"), _fields(path, info, "_StorageInfo")
        name, offsets = key.get("fqn"), key.get("offset")
        relative, offset, length = location.get("relative_path"), location.get("offset"), location.get("length")
        if offsets is None:  # an object other than a tensor
            continue
        if location.get("transform_descriptors"):
            found = f"{name} written through {location['transform_descriptors']}"
            raise UserError(f"uncompressed chunks in {path.parent}", found, "save without compression")
        if relative not in inside:
            try:
                path_inside(path.parent, relative)
            except ValueError as error:
                raise corrupt_file_error(path, f"{name} in a file of {error}") from error
            inside.add(relative)
        if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise corrupt_file_error(path, f"{name} at bytes {offset!r} + {length!r} of {relative}")
        locations[name, _sizes(path, offsets)] = (relative, offset, length)
    return locations


def _read_trainable(folder: Path) -> dict[str, Any] | None:
    path = folder / TRAINABLE_FILE
    if not os.path.lexists(path):
        return None
    try:
        content = json.loads(read_small_file(path))
        lists = [content["trainable"], content.get("buffers", []), list(content.get("aliases", {}).values())]
        if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists):
            raise ValueError("names that are not text")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise corrupt_file_error(
            path, f"something other than a JSON object with a list `trainable` ({error!r})"
        ) from error
    return content


def _moment_keys(folder: Path, content: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return name -> which moments it has, for the names of all groups; files of an older mmldlm name no groups."""
    try:
        return {name: moment_keys(group["settings"]) for group in content.get("groups", []) for name in group["names"]}
    except (TypeError, AttributeError, KeyError) as error:
        found = f"groups that are not a list of names and settings ({error!r})"
        raise corrupt_file_error(folder / TRAINABLE_FILE, found) from error


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
