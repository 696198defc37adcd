"""Restricted unpickler for checkpoints: builds only plain values and descriptions of tensors.

torch.load(weights_only=False), which DeepSpeed's own tools use, executes any code that a checkpoint names. Here every
global of a pickle is looked up in the tables below only; no module is imported, and an unknown name is refused. The
pickle machine itself is the standard library's.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmldlm.checkpoints.formats.dtypes import DTYPES, numel


class RefusedPickle(ValueError):
    """The pickle names something that a checkpoint of tensors does not need, or is malformed."""


class _NoSetattr:
    """Refuse the BUILD opcode, with which a pickle could set attributes of any object that it can name."""

    def __setstate__(self, state: Any) -> None:
        raise RefusedPickle("it tries to modify the reader itself")


# Not dataclass(slots=True): with frozen it installs a __setstate__ of its own, and BUILD would work again.
@dataclass(frozen=True)
class StorageRef(_NoSetattr):
    """A storage: `key` names the zip record data/<key>; `num_elements` counts elements of `dtype`."""

    dtype: str
    key: str
    num_elements: int


@dataclass(frozen=True)
class TensorRef(_NoSetattr):
    """A tensor that was not loaded. `offset` and `stride` count elements of `dtype`."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    key: str
    offset: int
    storage_elements: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return numel(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are consecutive in row-major order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride)):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True

    @property
    def extent(self) -> int:
        """Number of elements from `offset` to one past the last element of the tensor."""
        if self.numel == 0:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride))


class OpaqueObject:
    """Placeholder for an object that is never used: it keeps its arguments and executes nothing."""

    __slots__ = ("kind", "args", "state")

    def __init__(self, kind: str, args: tuple = ()):
        self.kind, self.args, self.state = kind, args, None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    # A pickle may fill any object like a list or a dict; the content is dropped.
    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __repr__(self) -> str:
        return f"OpaqueObject({self.kind}{self.args})"


class _Dict(dict):
    """collections.OrderedDict without attributes: the `_metadata` of a state_dict is dropped."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


@dataclass(frozen=True)
class _StorageType(_NoSetattr):
    dtype: str


@dataclass(frozen=True)
class _DType(_NoSetattr):
    name: str


@dataclass(frozen=True)
class _AllowedCall(_NoSetattr):
    """A function that a pickle may call. Bare functions have attributes that BUILD could set."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, dtype: str | None = None) -> TensorRef:
    if not isinstance(storage, StorageRef):
        raise RefusedPickle("a tensor without a storage")
    shape, strides = tuple(size), tuple(stride)
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or not all(type(n) is int and n >= 0 for n in numbers):
        raise RefusedPickle(f"a tensor of shape {shape}, stride {strides}, offset {offset!r}")
    if dtype is None:
        return TensorRef(storage.dtype, shape, strides, storage.key, offset, storage.num_elements)
    elements = storage.num_elements * DTYPES[storage.dtype].itemsize // DTYPES[dtype].itemsize
    return TensorRef(dtype, shape, strides, storage.key, offset, elements)


def _rebuild_tensor_v2(storage, offset, size, stride, requires_grad=False, hooks=None, metadata=None):
    return _tensor(storage, offset, size, stride)


def _rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype, metadata=None):
    if not isinstance(dtype, _DType) or dtype.name not in DTYPES:
        raise RefusedPickle(f"a tensor of dtype {getattr(dtype, 'name', dtype)!r}")
    return _tensor(storage, offset, size, stride, dtype.name)


def _rebuild_parameter(data, requires_grad=False, hooks=None):
    return data


def _rebuild_from_type_v2(function, kind, args, state):
    allowed = (_rebuild_tensor_v2, _rebuild_tensor_v3, _rebuild_parameter)
    if not isinstance(function, _AllowedCall) or function.function not in allowed:
        raise RefusedPickle("a tensor subclass with its own rebuild function")
    return function(*args)


def _size(values=()):
    return tuple(values)


def _ordered_dict(items=()):
    return _Dict(items)


# Members of enums in ordinary checkpoints, with their values.
_ENUMS: dict[str, dict[str, Any]] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": {
        "disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3,
    },
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": {
        "TORCH_CONTIGUOUS_FORMAT": 0, "TORCH_CHANNELS_LAST": 1, "TORCH_PRESERVE_FORMAT": 2,
    },
    "torch.distributed.checkpoint.metadata.WriteItemType": {"TENSOR": 1, "SHARD": 2, "BYTE_IO": 3},
    "torch.distributed.checkpoint.metadata.LoadItemType": {"TENSOR": 1, "BYTE_IO": 2},
}  # fmt: skip


def _enum_member(kind, name):
    """Emulate getattr(enum, name), as which Python 3.11.2 (Debian 12) pickles a member, and nothing else."""
    if isinstance(kind, type) and issubclass(kind, OpaqueObject) and isinstance(name, str):
        members = _ENUMS.get(kind().kind, {})
        if name in members:
            return kind(members[name])
    raise RefusedPickle("it asks for builtins.getattr, which a checkpoint of tensors does not need")


STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool",
}  # fmt: skip

_GLOBALS: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _AllowedCall(_enum_member),
    ("collections", "OrderedDict"): _AllowedCall(_ordered_dict),
    ("torch", "Size"): _AllowedCall(_size),
    ("torch._utils", "_rebuild_tensor_v2"): _AllowedCall(_rebuild_tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3"): _AllowedCall(_rebuild_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): _AllowedCall(_rebuild_parameter),
    ("torch._tensor", "_rebuild_from_type_v2"): _AllowedCall(_rebuild_from_type_v2),
    ("torch.storage", "UntypedStorage"): _StorageType("uint8"),
    ("torch", "UntypedStorage"): _StorageType("uint8"),
    **{("torch", name): _StorageType(dtype) for name, dtype in STORAGES.items()},
    **{("torch", name): _DType(name) for name in DTYPES},
}

# Present in ordinary checkpoints (DeepSpeed's own, or a user's client_state) and never needed for the weights.
_OPAQUE = {
    ("torch", "Tensor"), ("torch", "device"), ("torch.nn.parameter", "Parameter"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("argparse", "Namespace"), ("collections", "defaultdict"), ("collections", "Counter"), ("_codecs", "encode"),
    ("builtins", "set"), ("builtins", "frozenset"), ("builtins", "slice"), ("builtins", "complex"),
    ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("datetime", "datetime"), ("datetime", "timedelta"),
    ("numpy", "dtype"), ("numpy", "ndarray"),
    ("numpy.core.multiarray", "scalar"), ("numpy._core.multiarray", "scalar"),
    ("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"),
    # In the .metadata of torch.distributed.checkpoint too; Python 3.13 moved pathlib's classes.
    ("torch.serialization", "_get_layout"), ("pathlib._local", "PosixPath"),
    ("torch.torch_version", "TorchVersion"),
}  # fmt: skip


# Of the .metadata of torch.distributed.checkpoint (see dcp/folder); longer names first where one ends with another.
_DCP_METADATA = "torch.distributed.checkpoint.metadata"
_DCP_CLASSES = (
    "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "TensorProperties",
    "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING", "_StorageInfo",
    # Plans that Megatron-core keeps in it.
    "SavePlan", "LoadPlan", "WriteItem", "ReadItem", "WriteItemType", "LoadItemType", "TensorWriteData",
    "BytesIOWriteData",
)  # fmt: skip


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # Python 2 names that protocol 2 still writes for builtins.
        module = {"__builtin__": "builtins"}.get(module, module)
        known = _GLOBALS.get((module, name))
        if known is not None:
            return known
        # MM-LDLM's checkpoint.pt holds a TrainingState next to the weights; its module is the script that ran.
        if (module, name) in _OPAQUE or name == "TrainingState":
            return _opaque_class(f"{module}.{name}")
        raise RefusedPickle(f"it asks for {module}.{name}, which a checkpoint of tensors does not need")

    def persistent_load(self, pid: Any) -> StorageRef:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], _StorageType)):
            raise RefusedPickle(f"a storage reference of an unknown form: {str(pid)[:80]}")
        _, kind, key, _, num_elements = pid
        if not (isinstance(key, str) and type(num_elements) is int and num_elements >= 0):
            raise RefusedPickle(f"a storage reference of an unknown form: {str(pid)[:80]}")
        return StorageRef(kind.dtype, key, num_elements)


def dtype_name(value: Any) -> str | None:
    """Return the name of a torch.dtype that read_pickle returned; None for anything else."""
    return value.name if isinstance(value, _DType) else None


class _DcpMetadataReader(_Reader):
    """Takes any class *named* like one of DCP's own: other writers have copies of them, or subclasses.

    An object of it executes nothing, and what is needed of its fields is validated by dcp/folder.
    """

    def find_class(self, module: str, name: str) -> Any:
        if known := next((own for own in _DCP_CLASSES if name.lstrip("_").endswith(own.lstrip("_"))), None):
            return _opaque_class(f"{_DCP_METADATA}.{known}")
        return super().find_class(module, name)


def _opaque_class(kind: str) -> type:
    # A class, because the NEWOBJ opcode requires one; instances take any arguments.
    def new(cls, *args, **kwargs):
        instance = object.__new__(cls)
        OpaqueObject.__init__(instance, kind, args)
        return instance

    return type(
        "OpaqueObject", (OpaqueObject,), {"__slots__": (), "__new__": new, "__init__": lambda self, *a, **k: None}
    )


def read_dcp_metadata(data: bytes) -> Any:
    """Unpickle the .metadata of torch.distributed.checkpoint; see read_pickle."""
    return read_pickle(data, _DcpMetadataReader)


def read_pickle(data: bytes, reader: type[pickle.Unpickler] = _Reader) -> Any:
    """Unpickle `data` with tensors as TensorRef, sizes as tuples, OrderedDict as dict, other objects as OpaqueObject.

    Raises:
        RefusedPickle: an unknown global or a malformed stream; nothing was executed.
    """
    try:
        return reader(io.BytesIO(data), encoding="utf-8").load()
    except RefusedPickle:
        raise
    except RecursionError as error:
        raise RefusedPickle("it is nested too deeply") from error
    except Exception as error:  # the pickle machine raises nearly any type on a malformed stream
        raise RefusedPickle(f"its pickle is malformed ({type(error).__name__}: {str(error)[:120]})") from error
