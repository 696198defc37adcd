"""Restricted unpickler for checkpoints: builds only plain values and descriptions of tensors.

torch.load(weights_only=False), which DeepSpeed's own tools use, executes any code that a
checkpoint names. Here every global of a pickle is looked up in the tables below only; no module is
imported, and any other name becomes an inert OpaqueObject, because trainers save objects of their
own classes next to the weights. A pickle that names a way to run programs is refused nevertheless:
its other content should not be trusted either. The pickle machine is the standard library's.

That machine reserves memory for a length or a memo index before it looks for the bytes:
`LONG_BINPUT 2**31` alone, five bytes, fills 32 GiB. So check_lengths compares every length in a
pickle with its size before anything is built from it.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from array import array
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from mmldlm.checkpoints.files.dtypes import COMPLEX, DTYPES, WIDE_FLOATS, numel


class RefusedPickle(ValueError):
    """The pickle names something that a checkpoint of tensors does not need, or is malformed."""


class _NoSetattr:
    """Refuse the BUILD opcode, with which a pickle could set attributes of any object that it can
    name.
    """

    def __setstate__(self, state: Any) -> None:
        raise RefusedPickle("it tries to modify the reader itself")


# Not dataclass(slots=True): together with frozen it installs a __setstate__ of its own, and BUILD
# would work again.
@dataclass(frozen=True)
class StorageRef(_NoSetattr):
    """A storage: `key` names the zip record data/<key>, `num_elements` counts elements of
    `dtype`.
    """

    dtype: str
    key: str
    num_elements: int


@dataclass(frozen=True)
class TensorRef(_NoSetattr):
    """A tensor that was not loaded. `offset` and `stride` count elements of `dtype`.

    Of a negative view (of the imaginary part of a conjugate, for example) torch saves the storage
    as it is: the tensor's elements are those of the storage, `negated`. Likewise `conjugated`, of
    complex tensors.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    key: str
    offset: int
    storage_elements: int
    negated: bool = False
    conjugated: bool = False

    def __reduce__(self):
        # Rank 0 shares what it found in a checkpoint; there is no __setstate__ to restore it by.
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return numel(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are stored as they are, consecutive in row-major order."""
        if self.negated or self.conjugated:
            return self.numel == 0
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
    """Placeholder for an object that is never built: it keeps its arguments and executes nothing.

    Attributes:
        kind: Module and name of its class or function.
        args: Arguments of the call.
        state: State that the pickle gives it.
        content: Items that a pickle puts into it, as into a list, set or dict.
    """

    __slots__ = ("kind", "args", "state", "content")

    def __init__(self, kind: str, args: tuple = ()):
        self.kind, self.args = kind, args
        self.state: Any = None
        self.content: list[Any] = []

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.content.append(item)

    def add(self, item: Any) -> None:
        self.content.append(item)

    def extend(self, items: Any) -> None:
        self.content.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.content.append((key, value))

    @property
    def may_be_tensor(self) -> bool:
        """Whether it may stand for a tensor: of a subclass, sparse, quantized, sharded, or on no
        device.
        """
        name = self.kind.rpartition(".")[2]
        return (
            name.startswith("_rebuild")
            or name.endswith(("Tensor", "Parameter", "Storage"))
            or _holds_tensor(self)
        )

    def __repr__(self) -> str:
        return f"OpaqueObject({self.kind}{self.args})"


def _holds_tensor(value: Any, depth: int = 8) -> bool:
    if isinstance(value, TensorRef | StorageRef):
        return True
    if depth == 0:
        return False
    inner: Any = ()
    if isinstance(value, OpaqueObject):
        inner = (value.args, value.state, value.content)
    elif isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    return any(_holds_tensor(item, depth - 1) for item in inner)


class _Dict(dict):
    """collections.OrderedDict. Of its attributes it keeps the names in `_metadata`, which a
    state_dict has.

    Attributes:
        module_names: Dotted names of all modules of the model, "" for the model itself; None if it
            is no state_dict.
    """

    __slots__ = ("module_names",)

    def __init__(self, items: Any = ()):
        super().__init__(items)
        self.module_names: frozenset[str] | None = None

    def __setstate__(self, state: Any) -> None:
        metadata = state.get("_metadata") if isinstance(state, dict) else None
        if isinstance(metadata, dict):
            self.module_names = frozenset(name for name in metadata if isinstance(name, str))


def module_names_of(state: Any) -> frozenset[str] | None:
    """Return the names of all modules of the model whose state_dict this is; None if that was not
    saved.
    """
    return state.module_names if isinstance(state, _Dict) else None


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


def _tensor(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    dtype: str | None = None,
    metadata: Any = None,
) -> TensorRef | OpaqueObject:
    if isinstance(storage, OpaqueObject):
        return OpaqueObject(storage.kind, (storage,))
    if not isinstance(storage, StorageRef):
        raise RefusedPickle("a tensor without a storage")
    shape, strides = tuple(size), tuple(stride)
    numbers = (offset, *shape, *strides)
    if len(shape) != len(strides) or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
        raise RefusedPickle(f"a tensor of shape {shape}, stride {strides}, offset {offset!r}")
    negated, conjugated = _signs(metadata)
    if dtype is None:
        dtype, elements = storage.dtype, storage.num_elements
    else:
        elements = storage.num_elements * DTYPES[storage.dtype].itemsize // DTYPES[dtype].itemsize
    if conjugated and dtype not in COMPLEX or negated and dtype not in (*WIDE_FLOATS, *COMPLEX):
        raise RefusedPickle(f"a negative or conjugate view of {dtype}")
    return TensorRef(dtype, shape, strides, storage.key, offset, elements, negated, conjugated)


def _signs(metadata: Any) -> tuple[bool, bool]:
    """Return (negative, conjugate) of what torch.Tensor.__reduce_ex__ saves of a view.

    Raises:
        RefusedPickle: anything else, which would change the values in an unknown way.
    """
    if not metadata:
        return False, False
    if not isinstance(metadata, dict) or set(metadata) - {"neg", "conj"}:
        raise RefusedPickle(
            f"a tensor with metadata {str(metadata)[:80]}, whose meaning is not known"
        )
    return bool(metadata.get("neg")), bool(metadata.get("conj"))


def _rebuild_tensor_v2(
    storage, offset, size, stride, requires_grad=False, hooks=None, metadata=None
):
    return _tensor(storage, offset, size, stride, None, metadata)


def _rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype, metadata=None):
    if (kind := opaque_kind(dtype)) is not None:
        return OpaqueObject(kind, (storage,))
    if not isinstance(dtype, _DType) or dtype.name not in DTYPES:
        raise RefusedPickle(f"a tensor of dtype {getattr(dtype, 'name', dtype)!r}")
    return _tensor(storage, offset, size, stride, dtype.name, metadata)


def _rebuild_parameter(data, requires_grad=False, hooks=None, state=None):
    """Return the tensor.

    `state`, attributes that a program gave to a parameter, changes no value.
    """
    return data


def _rebuild_from_type_v2(function, kind, args, state):
    """Return a tensor that has attributes; of a tensor subclass, whose values may mean another
    thing, a placeholder.
    """
    allowed = (_rebuild_tensor_v2, _rebuild_tensor_v3, _rebuild_parameter)
    name = opaque_kind(kind)
    is_known = isinstance(function, _AllowedCall) and function.function in allowed
    if is_known and name in _TENSOR_CLASSES:
        return function(*args)
    return OpaqueObject(f"{name or 'a tensor subclass'}.Tensor", (function, args, state))


_TENSOR_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


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


def _enum_member(kind: Any, name: Any) -> Any:
    """Emulate getattr(enum, name), as which Python 3.11.2 (Debian 12) pickles a member, and
    nothing else.
    """
    enum = opaque_kind(kind)
    if enum is not None and isinstance(name, str):
        return kind(_ENUMS.get(enum, {}).get(name, name))
    raise RefusedPickle(
        "it asks for builtins.getattr, which a checkpoint of tensors does not need"
    )


STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}

_GLOBALS: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _AllowedCall(_enum_member),
    ("collections", "OrderedDict"): _AllowedCall(_Dict),
    ("torch", "Size"): _AllowedCall(tuple),
    ("torch._utils", "_rebuild_tensor_v2"): _AllowedCall(_rebuild_tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3"): _AllowedCall(_rebuild_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): _AllowedCall(_rebuild_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): _AllowedCall(_rebuild_parameter),
    ("torch._tensor", "_rebuild_from_type_v2"): _AllowedCall(_rebuild_from_type_v2),
    ("torch.storage", "UntypedStorage"): _StorageType("uint8"),
    ("torch", "UntypedStorage"): _StorageType("uint8"),
    **{("torch", name): _StorageType(dtype) for name, dtype in STORAGES.items()},
    **{("torch", name): _DType(name) for name in DTYPES},
}

# Classes in ordinary checkpoints (DeepSpeed's own, or a user's client_state) that the weights
# never need.
_OPAQUE = {
    ("torch", "Tensor"),
    ("torch", "device"),
    ("torch.nn.parameter", "Parameter"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("argparse", "Namespace"),
    ("collections", "defaultdict"),
    ("collections", "Counter"),
    ("_codecs", "encode"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("builtins", "slice"),
    ("builtins", "complex"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("datetime", "datetime"),
    ("datetime", "timedelta"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    # In the .metadata of torch.distributed.checkpoint too; Python 3.13 moved pathlib's classes.
    ("torch.serialization", "_get_layout"),
    ("pathlib._local", "PosixPath"),
    ("torch.torch_version", "TorchVersion"),
}


_HOSTILE_MODULES = {
    "os",
    "posix",
    "nt",
    "sys",
    "subprocess",
    "importlib",
    "runpy",
    "pty",
    "socket",
    "shutil",
    "ctypes",
    "webbrowser",
    "pdb",
    "timeit",
}
_HOSTILE_BUILTINS = {
    "eval",
    "exec",
    "execfile",
    "compile",
    "open",
    "input",
    "breakpoint",
    "__import__",
    "setattr",
    "delattr",
    "globals",
    "locals",
    "vars",
    "apply",
}


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, foreign: set[str]):
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._foreign = foreign

    def find_class(self, module: str, name: str) -> Any:
        # Protocol 2 still writes the name that Python 2 had for builtins.
        module = {"__builtin__": "builtins"}.get(module, module)
        target = _GLOBALS.get((module, name))
        if target is not None:
            return target
        if module.partition(".")[0] in _HOSTILE_MODULES or (
            module == "builtins" and name in _HOSTILE_BUILTINS
        ):
            raise RefusedPickle(
                f"it asks for {module}.{name}, which a checkpoint of tensors does not need"
            )
        if (module, name) not in _OPAQUE:
            self._foreign.add(f"{module}.{name}")
        return _opaque_class(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> StorageRef | OpaqueObject:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"):
            raise RefusedPickle(f"a storage reference of an unknown form: {str(pid)[:80]}")
        _, kind, key, _, num_elements = pid
        if isinstance(kind, type) and issubclass(kind, OpaqueObject):
            return kind(key)
        if not (
            isinstance(kind, _StorageType) and isinstance(key, str) and type(num_elements) is int
        ):
            raise RefusedPickle(f"a storage reference of an unknown form: {str(pid)[:80]}")
        if num_elements < 0:
            raise RefusedPickle(f"a storage of {num_elements} elements")
        return StorageRef(kind.dtype, key, num_elements)


def dtype_name(value: Any) -> str | None:
    """Return the name of a torch.dtype that read_pickle returned; None for anything else."""
    return value.name if isinstance(value, _DType) else None


def opaque_kind(value: Any) -> str | None:
    """Return the name of a class or function that read_pickle left unread; None for anything
    else.
    """
    is_class = isinstance(value, type) and issubclass(value, OpaqueObject)
    return value().kind if is_class else None


# A pickle may name a class a million times.
@lru_cache(maxsize=1024)
def _opaque_class(kind: str) -> type:
    # A class, because the NEWOBJ opcode requires one; instances take any arguments.
    def new(cls, *args, **kwargs):
        instance = object.__new__(cls)
        OpaqueObject.__init__(instance, kind, args)
        return instance

    return type(
        "OpaqueObject",
        (OpaqueObject,),
        {"__slots__": (), "__new__": new, "__init__": lambda self, *a, **k: None},
    )


def read_pickle(data: bytes, foreign: set[str] | None = None) -> Any:
    """Unpickle `data` with tensors as TensorRef, sizes as tuples, OrderedDict as dict, other
    objects as OpaqueObject.

    Args:
        data: Bytes of the pickle.
        foreign: Receiver of the names of the classes and functions that are not in the tables
            above; nothing of them was run.

    Raises:
        RefusedPickle: a malformed stream, or one that calls what it must not; nothing was
            executed.
    """
    try:
        check_lengths(data)
        return _Reader(data, set() if foreign is None else foreign).load()
    except RefusedPickle:
        raise
    except RecursionError as error:
        raise RefusedPickle("it is nested too deeply") from error
    except Exception as error:
        # The pickle machine raises nearly any type on a malformed stream.
        raise RefusedPickle(
            f"its pickle is malformed ({type(error).__name__}: {str(error)[:120]})"
        ) from error


# -- Lengths --------------------------------------------------------------------------------------

# Picklers number their memo 0, 1, 2, ...
_MAX_MEMO_GAP = 1024
# In this order: an argument up to the end of a line, two of them, no such opcode.
_LINE, _LINES, _UNKNOWN = -1, -2, -3
# The number of bytes of the length that precedes an argument.
_PREFIX = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


def _tables() -> tuple[array, bytes]:
    """Return, per opcode, the bytes of its argument, and the bytes of the length before it."""
    sizes, prefixes = array("b", [_UNKNOWN] * 256), bytearray(256)
    for opcode in pickletools.opcodes:
        code, argument = ord(opcode.code), opcode.arg
        if argument is None:
            sizes[code] = 0
        elif argument.n >= 0:
            sizes[code] = argument.n
        elif argument.n == pickletools.UP_TO_NEWLINE:
            sizes[code] = _LINES if argument.name == "stringnl_noescape_pair" else _LINE
        else:
            sizes[code], prefixes[code] = 0, _PREFIX[argument.n]
    return sizes, bytes(prefixes)


_SIZES, _PREFIXES = _tables()
_STOP, _PUT, _BINPUT, _LONG_BINPUT, _MEMOIZE = b".pqr\x94"


def check_lengths(data: bytes) -> None:
    """Check that every argument of the opcodes lies in `data`, and that the memo has no gaps.

    Raises:
        ValueError: it does not; the pickle is damaged or hostile.
    """
    position, end, num_memos = 0, len(data), 0
    sizes, prefixes = _SIZES, _PREFIXES
    while position < end:
        code = data[position]
        size = sizes[code]
        start = position + 1
        if prefix := prefixes[code]:
            position = start + prefix + int.from_bytes(data[start : start + prefix], "little")
        elif size >= 0:
            position = start + size
        elif size == _UNKNOWN:
            raise ValueError(f"no opcode {code:#x} at byte {position}")
        else:
            for _ in range(-size):
                start = data.find(b"\n", start) + 1 or end + 1
            position = start
        if position > end:
            raise ValueError(f"an argument up to byte {position} of {end}")
        if code == _BINPUT or code == _MEMOIZE:
            num_memos += 1
        elif code == _LONG_BINPUT or code == _PUT:
            num_memos += 1
            argument = data[position - 4 : position] if code == _LONG_BINPUT else b""
            index = int.from_bytes(argument, "little") if argument else _decimal(data, position)
            if index > num_memos + _MAX_MEMO_GAP:
                raise ValueError(f"entry {index} of a memo of {num_memos}")
        elif code == _STOP:
            return
    raise ValueError("no end")


def _decimal(data: bytes, end: int) -> int:
    """Return the number in the line that ends before `end`, the argument of PUT."""
    text = data[max(0, end - 21) : end - 1].rpartition(b"p")[2]
    if not text.isdigit():
        raise ValueError(f"a memo index {text!r}")
    return int(text)
