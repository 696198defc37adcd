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
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.files.dtypes import DTYPES, nbytes, numel
from mmldlm.checkpoints.files.file_io import OutputFile
from mmldlm.checkpoints.files.file_kinds import HEAD_BYTES, SAFETENSORS, kind_by_bytes
from mmldlm.checkpoints.files.torch_file import corrupt_file_error, open_for_reading
from mmldlm.checkpoints.files.unpickler import TensorRef
from mmldlm.checkpoints.formats.base import WriteRequest
from mmldlm.checkpoints.formats.part_files import (
    INDEX_SUFFIX,
    check_header,
    check_listed,
    read_shard_index,
)
from mmldlm.checkpoints.formats.weight_source import (
    READ_DEFAULTS,
    FileRange,
    OpenedCheckpoint,
    ReadOptions,
    TensorInfo,
    WeightSource,
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
    targets: tuple[str, ...] = ()
    has_keys = False

    def detect(self, path: Path) -> Path | None:
        if path.is_file():
            return find_safetensors(path)
        return path if find_safetensors(path) is not None else None

    def open(self, path: Path, options: ReadOptions):
        return SafetensorsModel.open(path, options)

    def can_resume(self, path: Path) -> bool:
        return False

    def read_optimizer_metadata(self, opened: OpenedCheckpoint):
        raise AssertionError("safetensors hold weights alone")

    def plan_write(self, request: WriteRequest):
        raise AssertionError("safetensors are written by checkpoints/convert")


def find_safetensors(path: Path) -> Path | None:
    """Return the file or index of a model at `path`, a file or a folder; None if there is none."""
    if path.is_file():
        return path if path.name.endswith((".safetensors", ".safetensors.index.json")) else None
    return next(
        (path / name for name in (SAFETENSORS_FILE, SAFETENSORS_INDEX) if (path / name).is_file()),
        None,
    )


# -- Reading
# -------------------------------------------------------------------------------------------------

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
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

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
        position = self.position_of(ref, start)
        while view:
            got = os.preadv(self._fd, [view], position)
            if got == 0:
                raise corrupt_file_error(
                    self.path, f"the file ends at byte {position} while it is being read"
                )
            view, position = view[got:], position + got

    def read_strided(self, ref: TensorRef, what: str):
        raise AssertionError("tensors are contiguous")

    def check_ref_crc(self, ref: TensorRef) -> None:
        """Do nothing: the format has no checksums."""

    def verify_read_records(self) -> None:
        """Do nothing: the format has no checksums."""


class SafetensorsModel(WeightSource):
    """An opened safetensors file or folder of shards; see WeightSource."""

    engine = "safetensors"

    @classmethod
    def open(cls, path: Path | str, options: ReadOptions = READ_DEFAULTS) -> SafetensorsModel:
        """Open a file, an index, or a folder with one of them.

        Raises:
            UserError: damaged or missing files, or an index that disagrees with the shards.
        """
        source = cls(Path(path), options)
        try:
            file_path = find_safetensors(source.path)
            assert file_path is not None, f"no safetensors at {path}"
            if file_path.name.endswith(INDEX_SUFFIX):
                source._read_shards(file_path)
            else:
                file = source._open(file_path)
                for name in file.tensors:
                    source._add(file, name)
            source._read_metadata()
        except BaseException:
            source.close()
            raise
        return source

    def _open(self, path: Path) -> SafetensorsFile:
        file = SafetensorsFile(path)
        self.files.append(file)
        check_header(path, file.metadata)
        return file

    def _add(self, file: SafetensorsFile, name: str) -> None:
        dtype, shape, _ = file.tensors[name]
        stride = tuple(numel(shape[axis + 1 :]) for axis in range(len(shape)))
        ref = TensorRef(dtype, shape, stride, name, 0, numel(shape))
        self.tensors[name] = TensorInfo(name, dtype, shape, "parameter")
        self.parts[name] = [FileRange(file, ref, 0, ref.numel)] if ref.numel else []

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


# -- Writing
# -------------------------------------------------------------------------------------------------

# Limit of the format itself.
MAX_HEADER_BYTES = 100_000_000
# The entry of the header that is not a tensor.
METADATA_KEY = "__metadata__"


class SafetensorsWriter:
    """Write a new file, in any order.

    Args:
        path: File to create; it must not exist.
        tensors: (name, dtype name, shape) of every tensor. Wide elements are laid out first, so
            that every tensor starts at a multiple of its element size, as readers that map the
            file expect; otherwise in this order.
        metadata: Strings for the header's `__metadata__`.
        fsync: Whether finish() flushes the file to the disk.

    Raises:
        UserError: a name that the format reserves, or a type that it does not have. OSError: no
            space for the complete file, or a failed write.
    """

    def __init__(
        self,
        path: Path,
        tensors: Iterable[tuple[str, str, tuple[int, ...]]],
        metadata: dict[str, str],
        fsync: bool = True,
    ):
        self.path = path
        header: dict[str, object] = {METADATA_KEY: metadata}
        # Name -> first byte and end.
        self._spans: dict[str, tuple[int, int]] = {}
        self._missing: dict[str, int] = {}
        self._lock = threading.Lock()
        position = 0
        for name, dtype, shape in sorted(tensors, key=lambda item: -DTYPES[item[1]].itemsize):
            if name == METADATA_KEY:
                found = f"a tensor named {name!r}, which the format uses for something else"
                raise UserError(
                    f"names that safetensors can hold in {path.name}",
                    found,
                    "convert with --to model.pt",
                )
            if not DTYPES[dtype].safetensors:
                raise UserError(
                    f"types that safetensors can hold in {path.name}",
                    f"{name} of type {dtype}",
                    "convert with --to model.pt, or leave it out with --only",
                )
            count = nbytes(shape, dtype)
            header[name] = {
                "dtype": DTYPES[dtype].safetensors,
                "shape": list(shape),
                "data_offsets": [position, position + count],
            }
            self._spans[name], self._missing[name] = (position, position + count), count
            position += count
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_HEADER_BYTES:
            raise ValueError(
                f"a header of {len(text)} bytes, safetensors allows {MAX_HEADER_BYTES}"
            )
        self._base = 8 + len(text)
        self.total_bytes = self._base + position
        self._file = OutputFile(path, self.total_bytes, fsync)
        try:
            self._file.write(len(text).to_bytes(8, "little") + text, 0)
        except BaseException:
            self.close()
            raise

    def write(self, name: str, position: int, view: memoryview) -> None:
        """Write bytes of tensor `name` from its byte `position` on. Thread-safe."""
        first, end = self._spans[name]
        assert first + position + len(view) <= end, f"more bytes for {name} than its shape holds"
        self._file.write(view, self._base + first + position)
        with self._lock:
            self._missing[name] -= len(view)

    def finish(self) -> None:
        """Flush to the disk, if requested, and close. Every tensor must be complete."""
        short = [name for name, count in self._missing.items() if count]
        assert not short, f"unfinished tensors: {short[:3]}"
        self._file.finish()

    def close(self) -> None:
        """Close the file, complete or not."""
        self._file.close()
