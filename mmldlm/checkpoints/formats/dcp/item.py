"""The files of a DCP folder and the chunks in them, each a complete zip file of torch.save."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from mmldlm.checkpoints.formats.dtypes import DTYPES
from mmldlm.checkpoints.formats.file_kinds import FileKind
from mmldlm.checkpoints.formats.torch_save.reader import (
    TorchFile,
    corrupt_file_error,
    open_for_reading,
)
from mmldlm.checkpoints.formats.torch_save.unpickler import TensorRef
from mmldlm.checkpoints.layout import DCP_METADATA
from mmldlm.errors import UserError

_NEAR_BYTES = 4096  # head and tail of an item, which hold all descriptions of a small one


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


class _ItemFile(TorchFile):
    """The zip of one chunk inside a .distcp file.

    Its head and tail are read once: a file holds hundreds of small items, and system calls would
    dominate.
    """

    def __init__(self, file: DcpFile, offset: int, length: int, random_access: bool):
        self._near: list[tuple[int, bytes]] = []  # (first byte, bytes)
        super().__init__(file.path, random_access, file.fd, (offset, length))

    def _read_directory(self):
        self._near.append((0, self._pread(0, min(_NEAR_BYTES, self.file_size))))
        return super()._read_directory()

    def _check_kind(self, kind: FileKind | None) -> None:
        if kind is not None and kind.found.startswith("a safetensors file"):
            fix = (
                "save with FileSystemWriter(...,"
                " serialization_format=SerializationFormat.TORCH_SAVE), the default"
            )
            raise UserError(
                f"items written by torch.save in {self.path}", "safetensors items", fix
            )
        super()._check_kind(kind)

    def load(self) -> Any:
        try:
            return super().load()
        finally:
            self._near = []

    def _pread(self, position: int, count: int) -> bytes:
        data = self._find_near(position, count)
        if data is None:
            data = super()._pread(position, count)
            if position and count >= _NEAR_BYTES:
                self._near.append((position, data))
        return data

    def _pread_into(self, view: memoryview, position: int) -> None:
        data = self._find_near(position, len(view)) if self._near else None
        if data is None:
            super()._pread_into(view, position)
        else:
            view[:] = data

    def _find_near(self, position: int, count: int) -> bytes | None:
        for start, data in self._near:
            if start <= position and position + count <= start + len(data):
                return data[position - start : position - start + count]
        return None


class DcpObject(_ItemFile):
    """One pickled object, such as a setting of the optimizer or a dict that was not flattened."""

    def __init__(self, file: DcpFile, offset: int, length: int, what: str, random_access: bool):
        self.offset, self.what = offset, what
        super().__init__(file, offset, length, random_access)


class DcpItem:
    """One chunk, opened when it is read first: a rank needs few chunks of a large checkpoint.

    Implements TensorFile. `ref` is the tensor's description in .metadata, which the item must
    match.
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
        self.path = file.path
        self._file, self.offset, self._length = file, offset, length
        self._what, self._random_access = what, random_access
        self.ref = ref
        self._zip: TorchFile | None = None
        self._stored = ref
        self._lock = threading.Lock()

    def _open(self) -> TorchFile:
        with self._lock:
            return self._opened()

    def _opened(self) -> TorchFile:
        if self._zip is None:
            item = _ItemFile(self._file, self.offset, self._length, self._random_access)
            stored = item.load()
            if not isinstance(stored, TensorRef) or (stored.dtype, stored.shape) != (
                self.ref.dtype,
                self.ref.shape,
            ):
                found = (
                    f"{stored.dtype} {stored.shape}"
                    if isinstance(stored, TensorRef)
                    else type(stored).__name__
                )
                expected = f"{self.ref.dtype} {self.ref.shape}"
                raise corrupt_file_error(
                    self.path, f"{found} for a part of {self._what}, {expected} in {DCP_METADATA}"
                )
            item.check_ref(stored, self._what)
            if not stored.is_contiguous:
                found = (
                    f"a part of {self._what} with strides {stored.stride}"
                    + ", negated" * stored.negated
                )
                fix = "call .resolve_conj().resolve_neg().contiguous() on it before it is saved"
                raise UserError(f"chunks in row-major order in {self.path}", found, fix)
            self._zip, self._stored = item, stored
        return self._zip

    def position_of(self, ref: TensorRef, start: int = 0) -> int:
        """Return the approximate position of element `start`, to sort reads without opening the
        item.
        """
        return self.offset + start * DTYPES[ref.dtype].itemsize

    def read_elements_into(self, ref: TensorRef, start: int, view: memoryview) -> int | None:
        item = self._open()
        return item.read_elements_into(self._stored, start, view)

    def read_strided(self, ref: TensorRef, what: str):
        raise AssertionError("chunks are contiguous")

    def check_ref_crc(self, ref: TensorRef) -> None:
        self._open().check_ref_crc(self._stored)

    def verify_read_records(self) -> None:
        if self._zip is not None:
            self._zip.verify_read_records()

    def close(self) -> None:
        self._file.close()
