"""Reader of safetensors: one file, or a Hugging Face folder with model.safetensors or its shards
and their index.

Format: see writer. It has no checksums; the reader checks that the tensors fill the file without
    gaps.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.formats.dtypes import DTYPES, nbytes, numel
from mmldlm.checkpoints.formats.rank_files import check_header
from mmldlm.checkpoints.formats.safetensors.format import find_safetensors
from mmldlm.checkpoints.formats.safetensors.writer import MAX_HEADER_BYTES, METADATA_KEY
from mmldlm.checkpoints.formats.shard_index import INDEX_SUFFIX, check_listed, read_shard_index
from mmldlm.checkpoints.formats.torch_save.reader import corrupt_file_error, open_for_reading
from mmldlm.checkpoints.formats.torch_save.unpickler import TensorRef
from mmldlm.checkpoints.formats.weight_source import FileRange, TensorInfo, WeightSource
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some
from mmldlm.utils.paths import path_inside

_BY_CODE = {dtype.safetensors: name for name, dtype in DTYPES.items()}


class SafetensorsFile:
    """One file; implements TensorFile.

    Attributes:
        metadata: strings in the header.
        tensors: name -> (dtype, shape, first byte in the data).

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
        self.tensors: dict[
            str, tuple[str, tuple[int, ...], int]
        ] = {}  # name -> dtype, shape, first byte
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
    def open(cls, path: Path | str, allow_nonfinite: bool = False) -> SafetensorsModel:
        """Open a file, an index, or a folder with one of them.

        Raises:
            UserError: damaged or missing files, or an index that disagrees with the shards.
        """
        source = cls(Path(path), allow_nonfinite)
        try:
            found = find_safetensors(source.path)
            assert found is not None, f"no safetensors at {path}"
            if found.name.endswith(INDEX_SUFFIX):
                source._read_shards(found)
            else:
                file = source._open(found)
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
