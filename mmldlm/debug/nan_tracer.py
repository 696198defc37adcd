"""Find the first operation, forward or backward, that produced a non-finite value from finite
inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.module_tracker import ModuleTracker

_aten = torch.ops.aten
# Uninitialized memory may hold anything.
_UNINITIALIZED_OPS = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}
# Operations that write infinities on purpose (masks).
ALLOWED_INF_OPS = {
    _aten.fill,
    _aten.fill_,
    _aten.full,
    _aten.full_like,
    _aten.new_full,
    _aten.masked_fill,
    _aten.masked_fill_,
    _aten.scalar_tensor,
    _aten.lift_fresh,
    _aten.lift_fresh_copy,
    _aten.constant_pad_nd,
}


@dataclass(frozen=True)
class NanOrigin:
    """The first occurrence of a non-finite value.

    Attributes:
        phase: "weights" (the dtype cannot represent them), "input", "forward" or "backward".
        kind: "NaN" or "Inf".
        module: Name of the innermost running module, "" outside the model.
        operation: Name of the aten operation.
        parameters: Names of the parameters that the operation read.
    """

    phase: str
    kind: str
    module: str
    operation: str = ""
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        read = f", reading {', '.join(self.parameters)}" if self.parameters else ""
        where = self.module or "the objective"
        if self.phase in ("weights", "input"):
            return f"{self.kind} in the {self.phase}: {where}"
        return f"{self.kind} first in the {self.phase} of {where} ({self.operation}{read})"


class NanTracer(TorchDispatchMode):
    """Context manager around forward and backward that finds the first non-finite result of each.

    It reads every result of every operation: meant for one batch, not for training.

    Attributes:
        forward: First origin in the forward pass, or None.
        backward: First origin in the backward pass, or None.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.forward: NanOrigin | None = None
        self.backward: NanOrigin | None = None
        self._roots = (type(model).__name__, "Autocast.module", "Autocast")
        self._tracker = ModuleTracker()
        self._names = {
            p.untyped_storage().data_ptr(): name
            for name, p in model.named_parameters()
            if p.numel()
        }

    def __enter__(self) -> NanTracer:
        self._tracker.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._tracker.__exit__(*args)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        backward = self._tracker.is_bw
        packet = function.overloadpacket
        origin = self.backward if backward else self.forward
        if origin is not None or packet in _UNINITIALIZED_OPS or packet in ALLOWED_INF_OPS:
            return function(*args, **kwargs)
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        # An in-place operation overwrites its inputs.
        before = [nonfinite_kind(leaf) for leaf in inputs] if function._schema.is_mutable else None
        result = function(*args, **kwargs)
        after = {
            nonfinite_kind(leaf) for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)
        } - {""}
        if after:
            inherited = set(
                before if before is not None else [nonfinite_kind(leaf) for leaf in inputs]
            ) - {""}
            created = after - inherited
            if created - ({"Inf"} if "NaN" in inherited else set()):
                self._record(backward, "NaN" if "NaN" in created else "Inf", packet, inputs)
        return result

    def _record(self, backward: bool, kind: str, packet: Any, inputs: list[Tensor]) -> None:
        module = max(
            (name for name in self._tracker.parents if name != "Global"), key=len, default=""
        )
        root = next(
            (root for root in self._roots if module == root or module.startswith(f"{root}.")), ""
        )
        module = module.removeprefix(root).removeprefix(".")
        read = dict.fromkeys(
            self._names.get(leaf.untyped_storage().data_ptr(), "") for leaf in inputs
        )
        origin = NanOrigin(
            "backward" if backward else "forward",
            kind,
            module,
            str(packet),
            tuple(name for name in read if name),
        )
        if backward:
            self.backward = origin
        else:
            self.forward = origin


def nonfinite_kind(tensor: Tensor) -> str:
    """Return "NaN" or "Inf" if a floating-point tensor holds one (NaN takes precedence),
    else "".
    """
    if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta:
        return ""
    if bool(torch.isnan(tensor).any()):
        return "NaN"
    return "Inf" if bool(torch.isinf(tensor).any()) else ""


def nonfinite_weights(model: nn.Module) -> list[NanOrigin]:
    """Return the parameters and buffers with a non-finite element in the model's current dtype."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        NanOrigin("weights", kind, name)
        for name, tensor in tensors
        if (kind := nonfinite_kind(tensor.detach()))
    ]


def nonfinite_inputs(tensors: Mapping[str, Tensor]) -> list[NanOrigin]:
    """Return the tensors of a batch with a non-finite element."""
    return [
        NanOrigin("input", kind, name)
        for name, tensor in tensors.items()
        if (kind := nonfinite_kind(tensor))
    ]
