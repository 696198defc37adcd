"""Record the root mean square of layer outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

STREAMS = ("text", "latent")
"""The halves of a block's parameters and outputs."""


def layer_modules(model: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Return the layers that statistics name: the modules of every numbered stack, and the parts
    next to the stacks.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_children():
        if isinstance(module, nn.ModuleList):
            found |= {f"{prefix}{name}.{number}": block for number, block in enumerate(module)}
        elif any(isinstance(child, nn.ModuleList) for child in module.modules()):
            found |= layer_modules(module, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = module
    return found


class ActivationRecorder:
    """Accumulate the sum of squares of layer outputs between `start` and `collect`.

    A block has one entry per stream, another module one for all floating-point tensors it returns.
    A block that is recomputed in the backward pass (gradient checkpointing) counts twice with the
    same values, so means do not change.
    """

    def __init__(self, model: nn.Module):
        self._names: dict[nn.Module, list[str]] = {}
        for name, module in layer_modules(model).items():
            if hasattr(module, "split_streams"):
                self._names[module] = [f"{name}.{stream}" for stream in STREAMS]
            elif name != "text_head":  # it returns losses
                self._names[module] = [name]
        self._rows = {
            name: row
            for row, name in enumerate(n for names in self._names.values() for n in names)
        }
        self._sums: list[list[Tensor]] = []
        self._counts: list[int] = []
        self._undo: list[Callable[[], object]] = []

    def start(self) -> None:
        """Start recording; `collect` stops it."""
        self._stop()
        self._sums, self._counts = [[] for _ in self._rows], [0] * len(self._rows)
        for module in self._names:
            compiled = module._compiled_call_impl
            if compiled is None:
                self._undo.append(
                    module.register_forward_hook(
                        lambda m, inputs, out: self._record(m, out, inputs)
                    ).remove
                )
            else:  # a hook would be compiled into the block permanently
                module._compiled_call_impl = self._wrap(module, compiled)
                self._undo.append(
                    lambda module=module, call=compiled: setattr(
                        module, "_compiled_call_impl", call
                    )
                )

    def _wrap(self, module: nn.Module, call):
        def wrapped(*args, **kwargs):
            output = call(*args, **kwargs)
            self._record(module, output, args)
            return output

        return wrapped

    @torch.no_grad()
    def _record(self, module: nn.Module, output, inputs: tuple) -> None:
        if hasattr(
            module, "split_streams"
        ):  # a block returns its two streams as rows of one tensor
            output = module.split_streams(output, *inputs)
        tensors, names = list(_float_tensors(output)), self._names[module]
        if len(names) != len(tensors):
            names = names[:1] * len(tensors)
        for name, tensor in zip(names, tensors, strict=True):
            row, dtype = self._rows[name], torch.promote_types(tensor.dtype, torch.float32)
            self._sums[row].append(
                torch.linalg.vector_norm(tensor.detach(), dtype=dtype).double().square()
            )
            self._counts[row] += tensor.numel()

    def collect(self, device: torch.device) -> Tensor:
        """Stop recording; return [layers, 2] fp64 sums of squares and counts of this rank."""
        self._stop()
        zero = torch.zeros((), dtype=torch.float64, device=device)
        sums = torch.stack([torch.stack([zero, *parts]).sum() for parts in self._sums])
        counts = torch.tensor(
            [float(count) for count in self._counts], dtype=torch.float64, device=device
        )
        return torch.stack([sums, counts], dim=1)

    def rms(self, total: list[float]) -> dict[str, float]:
        """Return layer -> RMS from the sums over all ranks."""
        pairs = {name: (total[2 * row], total[2 * row + 1]) for name, row in self._rows.items()}
        return {
            name: math.sqrt(square / count) for name, (square, count) in pairs.items() if count
        }

    def _stop(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []


def _float_tensors(output) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from _float_tensors(part)
