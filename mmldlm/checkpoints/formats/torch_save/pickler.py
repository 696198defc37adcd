"""Write a pickle of protocol 2 for torch.load; the counterpart of unpickler.

Plain values and tensors satisfy weights_only=True. The few objects of classes that DeepSpeed or
torch require are written by name; no class is imported.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmldlm.checkpoints.formats.dtypes import nbytes, numel
from mmldlm.checkpoints.formats.torch_save.unpickler import STORAGES

_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items()}


@dataclass(frozen=True, eq=False)
class TensorSpec:
    """A tensor to write. One that occurs in several places is stored once, and torch.load ties
    them.

    Attributes:
        dtype: its torch name.
        shape: its shape.
        chunks: its elements in order, flat, as DTYPES[dtype].raw; None if they are written later
            (write_plan).
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: Iterable[np.ndarray] | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return numel(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return nbytes(self.shape, self.dtype)


def scalar(value: float) -> TensorSpec:
    """Return a 0-d float32 tensor, as torch's AdamW keeps its step count."""
    return TensorSpec("float32", (), [np.array([value], np.float32)])


class TorchSize(tuple):
    """A torch.Size."""


@dataclass(frozen=True)
class GlobalRef:
    """A global by its name: torch.float32, a class."""

    module: str
    name: str


@dataclass(frozen=True)
class ObjectSpec:
    """An object of a class.

    Attributes:
        type: the class.
        args: arguments of class(*args); None for an instance that is not initialized.
        state: its state, set after that.
    """

    type: GlobalRef
    args: tuple | None = None
    state: Any = None


class PickleWriter:
    """Build one pickle.

    Attributes:
        tensors: the tensors in it, in the order of their record numbers 0, 1, 2, ...
    """

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self.tensors: list[TensorSpec] = []
        self._keys: dict[int, int] = {}

    def finish(self) -> bytes:
        """Return the pickle."""
        return bytes(self.out + b".")

    def add(self, value: Any) -> None:
        """Append a value.

        Raises:
            TypeError: a value of an unsupported type.
        """
        if isinstance(value, TensorSpec):
            self._tensor(value)
        elif value is None or isinstance(value, bool):
            self.out += {None: b"N", True: b"\x88", False: b"\x89"}[value]
        elif isinstance(value, int):
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.out += b"\x8a" + bytes([len(data)]) + data
        elif isinstance(value, float):
            self.out += b"G" + struct.pack(">d", value)
        elif isinstance(value, str):
            self.out += b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        elif isinstance(value, dict):
            self.out += b"}("
            for key, item in value.items():
                self.add(key)
                self.add(item)
            self.out += b"u"
        elif isinstance(value, list):
            self._items(b"](", value, b"e")
        elif isinstance(value, TorchSize):
            self._global(GlobalRef("torch", "Size"))
            self._items(b"((", value, b"ttR")
        elif isinstance(value, tuple):
            self._items(b"(", value, b"t")
        elif isinstance(value, GlobalRef):
            self._global(value)
        elif isinstance(value, ObjectSpec):
            self._object(value)
        else:
            raise TypeError(f"a {type(value).__name__} in a file for torch")

    def _items(self, before: bytes, items: Iterable[Any], after: bytes) -> None:
        self.out += before
        for item in items:
            self.add(item)
        self.out += after

    def _global(self, value: GlobalRef) -> None:
        self.out += f"c{value.module}\n{value.name}\n".encode()

    def _object(self, value: ObjectSpec) -> None:
        self._global(value.type)
        if value.args is None:
            self.out += b")\x81"
        else:
            self._items(b"(", value.args, b"tR")
        if value.state is not None:
            self.add(value.state)
            self.out += b"b"

    def _tensor(self, tensor: TensorSpec) -> None:
        """Append _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks).

        Types without a storage class of their own are bytes in an UntypedStorage:
        _rebuild_tensor_v3(..., dtype).
        """
        key = self._keys.setdefault(id(tensor), len(self.tensors))
        if key == len(self.tensors):
            self.tensors.append(tensor)
        stride = tuple(
            max(numel(tensor.shape[axis + 1 :]), 1) for axis in range(len(tensor.shape))
        )
        is_typed = tensor.dtype in _STORAGE_OF
        self._global(
            GlobalRef("torch._utils", "_rebuild_tensor_v2" if is_typed else "_rebuild_tensor_v3")
        )
        self.out += b"(("
        self.add("storage")
        untyped = GlobalRef("torch.storage", "UntypedStorage")
        self._global(GlobalRef("torch", _STORAGE_OF[tensor.dtype]) if is_typed else untyped)
        count = tensor.numel if is_typed else nbytes(tensor.shape, tensor.dtype)
        for item in (str(key), "cpu", count):
            self.add(item)
        self.out += b"tQ"
        for item in (0, tensor.shape, stride, False):
            self.add(item)
        self._global(GlobalRef("collections", "OrderedDict"))
        self.out += b")R"
        if not is_typed:
            self._global(GlobalRef("torch", tensor.dtype))
        self.out += b"tR"
