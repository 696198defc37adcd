"""Models without values: shapes and names of parameters, at no memory and little time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def meta_device() -> Iterator[None]:
    """Build modules on torch's meta device, where parameters have shapes and no values.

    Random initializations are left out. There they would change nothing, but any arithmetic on
    this device loads torch's compiler, two seconds of CPU time (`random_parameter` avoids it as
    well).
    """
    with torch.device("meta"), _WithoutRandomInit():
        yield


class _WithoutRandomInit(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_init = getattr(func, "__module__", None) == "torch.nn.init"
        if is_init or func in (Tensor.normal_, Tensor.uniform_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
