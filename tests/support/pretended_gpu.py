"""Tensors that claim to lie on a GPU and hold real values on the host, for machines without one.

`PretendedGpu` is a mode in which whatever is made on, or moved to, `cuda` becomes such a tensor.
Everything runs and computes what it computes on the CPU; what a real GPU would refuse is an error:
an operation on tensors of both devices, `numpy()` of a GPU's tensor. The library of fake_cuda.cpp
has to be loaded before torch. No kernel, stream or memory of CUDA is in it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda", 0)
# Operations that take tensors of both devices on a real GPU.
_MIXING = ("_to_copy", "copy_", "index.Tensor", "index_put_", "_index_put_impl_", "set_")


class GpuTensor(torch.Tensor):
    """A tensor on `cuda:0`; `values` is where they are."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> GpuTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=GPU,
            requires_grad=values.requires_grad,
        )
        tensor.values = values
        return tensor

    def __repr__(self, **_: Any) -> str:
        return f"GpuTensor({self.values!r})"

    def tolist(self) -> Any:
        return self.values.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"numpy() of a tensor of {GPU}, at {_where()}")

    __array__ = numpy

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class PretendedGpu(TorchDispatchMode):
    """Enter it before a model is loaded or made."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given: list[torch.Tensor] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        given.append(x)
        return _inner(x)

    args, kwargs = _mapped(inner, args), {key: _mapped(inner, x) for key, x in kwargs.items()}
    on_gpu = [x for x in given if isinstance(x, GpuTensor)]
    on_cpu = [x for x in given if not isinstance(x, GpuTensor) and x.dim() > 0]
    name = str(func).removeprefix("aten.")
    if on_gpu and on_cpu and not name.startswith(_MIXING):
        raise RuntimeError(f"{name} on tensors of cuda:0 and cpu, at {_where()}")
    device = kwargs.get("device")
    is_gpu = bool(on_gpu) if device is None else torch.device(device).type == "cuda"
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    if device is not None:
        kwargs["device"] = torch.device("cpu")
    out = func(*args, **kwargs)
    if func._schema.is_mutable:
        # It returns what it changed in place.
        outer = {id(_inner(x)): x for x in given}
        return _mapped(lambda x: outer.get(id(x), x), out)
    return _mapped(GpuTensor, out) if is_gpu else out


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return arguments or results of an operation, which has tensors alone or in lists, with each
    tensor changed. The functions of torch.utils._pytree for any structure took two thirds of the
    time.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(change, entry) for entry in value])
    return value


def _inner(x: torch.Tensor) -> torch.Tensor:
    return x.values if isinstance(x, GpuTensor) else x


def _where() -> str:
    frames = [frame for frame in traceback.extract_stack() if "/mmldlm/" in frame.filename]
    if not frames:
        return "?"
    return f"{frames[-1].filename.split('/mmldlm/')[-1]}:{frames[-1].lineno}"
