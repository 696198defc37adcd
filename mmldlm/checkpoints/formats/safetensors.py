"""safetensors: one file, or a Hugging Face folder with model.safetensors or its shards and their
index. Weights alone.

Format (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian header length,
a JSON header, then the tensors without gaps. It has no checksums; the reader checks that the
tensors fill the file. The writer takes pieces of tensors in any order, in bounded memory;
safetensors' own save_file needs every tensor in memory at once.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from mmldlm.checkpoints.files.dtypes import DTYPES, nbytes, numel, row_major
from mmldlm.checkpoints.files.file_io import RangedCrc32, closed_on_error
from mmldlm.checkpoints.files.file_kinds import HEAD_BYTES, SAFETENSORS, kind_by_bytes
from mmldlm.checkpoints.files.tensor_writer import TensorFileWriter, TensorSpec
from mmldlm.checkpoints.files.torch_file import corrupt_file_error, open_for_reading, read_exactly
from mmldlm.checkpoints.files.unpickler import TensorRef
from mmldlm.checkpoints.formats.base import WEIGHT, WritePlan, WriteRequest
from mmldlm.checkpoints.formats.export_plan import PlannedTensor
from mmldlm.checkpoints.formats.part_files import (
    INDEX_SUFFIX,
    check_header,
    check_listed,
    read_shard_index,
)
from mmldlm.checkpoints.formats.weight_source import (
    OpenedCheckpoint,
    ReadOptions,
    TensorInfo,
    WeightSource,
    whole_tensor,
)
from mmldlm.checkpoints.manifest import SAFETENSORS_FILE, SAFETENSORS_INDEX
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some
from mmldlm.utils.paths import path_inside


class SafetensorsFormat:
    """A .safetensors file, an index of shards, or a Hugging Face folder with model.safetensors or
    its index.
    """

    name = "safetensors"
    targets: tuple[str, ...] = ("safetensors",)
    has_keys = False

    def detect(self, path: Path) -> Path | None:
        return path if find_safetensors(path) is not None else None

    def open(self, path: Path, options: ReadOptions) -> WeightSource:
        return SafetensorsModel.open(path, options)

    def can_resume(self, path: Path) -> bool:
        return False

    def read_optimizer_metadata(self, opened: OpenedCheckpoint) -> NoReturn:
        raise AssertionError("safetensors hold weights alone")

    def plan_write(self, request: WriteRequest) -> tuple[WritePlan, Callable[[Path], object]]:
        return plan_safetensors(request)


def find_safetensors(path: Path) -> Path | None:
    """Return the file or index of a model at `path`, a file or a folder; None if there is none."""
    if path.is_file():
        return path if path.name.endswith((".safetensors", ".safetensors.index.json")) else None
    return next(
        (path / name for name in (SAFETENSORS_FILE, SAFETENSORS_INDEX) if (path / name).is_file()),
        None,
    )


# -- Reading --------------------------------------------------------------------------------------

_BY_CODE = {dtype.safetensors: name for name, dtype in DTYPES.items() if dtype.safetensors}


class SafetensorsFile:
    """One file; implements TensorFile.

    Attributes:
        metadata: Strings in the header.
        tensors: Name -> (dtype, shape, first byte in the data).

    Raises (at construction):
        UserError: truncated, a header that is not JSON, tensors that overlap or leave gaps.
    """

    def __init__(self, path: Path):
        self.path = path
        self._fd = open_for_reading(path)
        with closed_on_error(self):
            self._read_header()

    def _read_header(self) -> None:
        size = os.fstat(self._fd).st_size
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            kind = kind_by_bytes(os.pread(self._fd, HEAD_BYTES, 0))
            if kind is not None and kind is not SAFETENSORS:
                raise UserError(f"a safetensors file at {self.path}", kind.found, kind.fix)
            raise corrupt_file_error(
                self.path,
                f"{size} bytes with a header of {length}: not a safetensors file, or truncated",
            )
        try:
            header = json.loads(os.pread(self._fd, length, 8))
            if not isinstance(header, dict):
                raise ValueError(f"a {type(header).__name__}")
            metadata = header.pop(METADATA_KEY, {})
        except (ValueError, RecursionError) as error:
            raise corrupt_file_error(
                self.path, f"a header that is not a JSON object ({str(error)[:80]})"
            ) from error
        metadata = metadata if isinstance(metadata, dict) else {}
        self.metadata = {key: value for key, value in metadata.items() if isinstance(value, str)}
        self._base = 8 + length
        # Name -> dtype, shape, first byte.
        self.tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
        spans = [self._add(name, entry) for name, entry in header.items()]
        end = 0
        for start, stop in sorted(spans):
            if start != end:
                raise corrupt_file_error(
                    self.path, f"tensors that overlap or leave a gap at byte {end} of the data"
                )
            end = stop
        if self._base + end != size:
            raise corrupt_file_error(
                self.path,
                f"{size} bytes instead of the {self._base + end} in its header: truncated or"
                " appended to",
            )

    def _add(self, name: str, entry: Any) -> tuple[int, int]:
        code = entry.get("dtype") if isinstance(entry, dict) else None
        if (
            isinstance(code, str)
            and code not in _BY_CODE
            and re.fullmatch(r"[A-Z]\d+[A-Z0-9_]*", code)
        ):
            fix = "convert it to another type with the program that wrote it"
            raise UserError(
                f"tensors of types that mmldlm reads in {self.path}", f"{name} of type {code}", fix
            )
        try:
            dtype, shape = _BY_CODE[entry["dtype"]], tuple(entry["shape"])
            start, stop = entry["data_offsets"]
            is_valid = all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, start, stop))
            is_valid = is_valid and stop - start == nbytes(shape, dtype)
        except (KeyError, TypeError, ValueError):
            is_valid = False
        if not is_valid:
            raise corrupt_file_error(self.path, f"{name} described as {str(entry)[:120]}")
        self.tensors[name] = (dtype, shape, start)
        return start, stop

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def position_of(self, ref: TensorRef, start: int = 0) -> int:
        """Return the position of element `start` of a tensor, in bytes from the start of
        the file.
        """
        return self._base + self.tensors[ref.key][2] + start * DTYPES[ref.dtype].itemsize

    def read_elements_into(self, ref: TensorRef, start: int, view: memoryview) -> None:
        """Fill `view` with the bytes of the elements from `start`."""
        read_exactly(self.path, self._fd, view, self.position_of(ref, start))

    def read_strided(self, ref: TensorRef, what: str) -> NoReturn:
        raise AssertionError("tensors are contiguous")

    def verify_read_records(self) -> None:
        """Do nothing: the format has no checksums."""


class SafetensorsModel(WeightSource):
    """An opened safetensors file or folder of shards; see WeightSource."""

    engine = "safetensors"

    def _read(self) -> None:
        """Read the headers of a file, an index, or a folder with one of them."""
        path = find_safetensors(self.path)
        assert path is not None, f"no safetensors at {self.path}"
        if path.name.endswith(INDEX_SUFFIX):
            self._read_shards(path)
        else:
            file = self._open(path)
            for name in file.tensors:
                self._add(file, name)
        self._read_metadata()

    def _open(self, path: Path) -> SafetensorsFile:
        file = SafetensorsFile(path)
        self.files.append(file)
        check_header(path, file.metadata)
        return file

    def _add(self, file: SafetensorsFile, name: str) -> None:
        dtype, shape, _ = file.tensors[name]
        ref = TensorRef(dtype, shape, row_major(shape), name, 0, numel(shape))
        self.tensors[name] = TensorInfo(name, dtype, shape, "parameter")
        self.parts[name] = whole_tensor(file, ref)

    def _read_shards(self, index: Path) -> None:
        shard_of = read_shard_index(index)
        files = {
            name: self._open(path_inside(index.parent, name))
            for name in sorted(set(shard_of.values()))
        }
        check_listed(index, shard_of, {name: set(file.tensors) for name, file in files.items()})
        for name, shard in shard_of.items():
            self._add(files[shard], name)

    def _read_metadata(self) -> None:
        """Read the second names of tied weights, and the step if mmldlm's converter wrote the
        file.

        safetensors.torch.save_model records {second name: name} among the metadata. A pair of any
        other program may look the same by chance, so both names must be of one parameter: their
        last parts are equal.
        """
        metadata = self.files[0].metadata if self.files else {}
        named = {alias: owner for alias, owner in metadata.items() if owner in self.tensors}
        is_tied = {
            alias: alias.rpartition(".")[2] == owner.rpartition(".")[2]
            for alias, owner in named.items()
        }
        aliases: Any = {alias: owner for alias, owner in named.items() if is_tied[alias]}
        others = [f"{alias!r} ({owner})" for alias, owner in named.items() if not is_tied[alias]]
        if others:
            self.notes.append(
                f"not taken as second names of tied weights: {join_some(others)} in the header"
            )
        if "mmldlm_version" in metadata:
            if str(metadata.get("step", "")).isdigit():
                self.step = int(metadata["step"])
            try:
                aliases = json.loads(metadata.get("aliases", "{}"))
            except (TypeError, ValueError, RecursionError):
                aliases = {}
        for alias, owner in aliases.items() if isinstance(aliases, dict) else ():
            if isinstance(owner, str) and owner in self.tensors and alias not in self.tensors:
                info = self.tensors[owner]
                self.tensors[alias] = TensorInfo(
                    alias, info.dtype, info.shape, "alias", info.alias_of or owner
                )


# -- Writing --------------------------------------------------------------------------------------

# Limit of the format itself.
MAX_HEADER_BYTES = 100_000_000
# The entry of the header that is not a tensor.
METADATA_KEY = "__metadata__"


def plan_safetensors(request: WriteRequest) -> tuple[WritePlan, Callable[[Path], None]]:
    """Return the plan of model.safetensors or its shards, and a function that writes the index of
    shards.
    """
    plan, weight_map = WritePlan(), {}
    shards = split_into_shards(request.required_export.tensors, request.shard_bytes)
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {planned.name: planned.spec for planned in shard.values()}
        path = request.folder / (SAFETENSORS_FILE if len(shards) == 1 else file_name)
        file = SafetensorsWriter(path, tensors, request.metadata, request.verify)
        plan.files.append(file)
        for name, planned in shard.items():
            plan.add_whole(name, WEIGHT, file, planned.spec)
            weight_map[planned.name] = path.name
    total = sum(file.tensor_bytes for file in plan.files)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}

    def write_index(folder: Path) -> None:
        if len(shards) > 1:
            (folder / SAFETENSORS_INDEX).write_text(json.dumps(index, indent=2) + "\n")

    return plan, write_index


def split_into_shards(
    tensors: dict[str, PlannedTensor], shard_bytes: int | None
) -> list[dict[str, PlannedTensor]]:
    """Return the tensors of every file, in the model's order, filled greedily."""
    shards: list[dict[str, PlannedTensor]] = [{}]
    size = 0
    for name, planned in tensors.items():
        if shard_bytes is not None and shards[-1] and size + planned.spec.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = planned
        size += planned.spec.nbytes
    return shards


class SafetensorsWriter(TensorFileWriter):
    """A new file; see TensorFileWriter.

    Args:
        path: New file.
        tensors: Name -> tensor. Wide elements are laid out first, so that every tensor starts at a
            multiple of its element size, as readers that map the file expect; otherwise in this
            order.
        metadata: Strings for the header's `__metadata__`.
        verify: Whether to keep the checksums of what is written.

    Attributes:
        crcs: Name -> CRC-32 of what was written; empty without `verify`.

    Raises:
        UserError: a name that the format reserves, or a type that it does not have.
    """

    def __init__(
        self,
        path: Path,
        tensors: dict[str, TensorSpec],
        metadata: dict[str, str],
        verify: bool = False,
    ):
        header: dict[str, object] = {METADATA_KEY: metadata}
        self._start_of: dict[TensorSpec, int] = {}
        self.crcs = {name: RangedCrc32() for name in tensors} if verify else {}
        position = 0
        for name, tensor in sorted(
            tensors.items(), key=lambda item: -DTYPES[item[1].dtype].itemsize
        ):
            if name == METADATA_KEY:
                found = f"a tensor named {name!r}, which the format uses for something else"
                raise UserError(
                    f"names that safetensors can hold in {path.name}",
                    found,
                    "convert with --to model.pt",
                )
            if not DTYPES[tensor.dtype].safetensors:
                raise UserError(
                    f"types that safetensors can hold in {path.name}",
                    f"{name} of type {tensor.dtype}",
                    "convert with --to model.pt, or leave it out with --only",
                )
            header[name] = {
                "dtype": DTYPES[tensor.dtype].safetensors,
                "shape": list(tensor.shape),
                "data_offsets": [position, position + tensor.nbytes],
            }
            self._start_of[tensor] = position
            position += tensor.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_HEADER_BYTES:
            raise ValueError(
                f"a header of {len(text)} bytes, safetensors allows {MAX_HEADER_BYTES}"
            )
        self._head = len(text).to_bytes(8, "little") + text
        self._crc_of = {tensors[name]: crc for name, crc in self.crcs.items()}
        super().__init__(path, len(self._head) + position, position)

    def _write_head(self) -> None:
        self._file.write(self._head, 0)

    def _put(self, tensor: TensorSpec, offset: int, data: memoryview, crc: int | None) -> None:
        assert offset + len(data) <= tensor.nbytes, f"bytes {offset}.. of {tensor}"
        if self._crc_of:
            self._crc_of[tensor].add(offset, data, crc)
        self._file.write(data, len(self._head) + self._start_of[tensor] + offset)
