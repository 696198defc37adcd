"""Per-layer statistics of gradients, updates and activations, under every engine and ZeRO stage.

Sharded gradients contribute sums over each rank's elements: one vector, one all-reduce and one
host sync on a measured step, nothing on any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmldlm.engines.base import Engine
from mmldlm.engines.shards import ParameterShard
from mmldlm.utils.moments import MOMENTS

STREAMS = ("text", "latent")
"""The halves of a block's parameters and outputs."""

DEAD_AFTER_REPORTS = 10
"""Measured steps before a parameter without any gradient is reported as dead. adaLN-Zero and
zero-initialized heads hide layers in the first steps, and a learned null has a gradient only in
some batches."""

# Sums per parameter over all ranks; update_sq is 0 if the step was not applied.
_SUMS = ("grad_sq", "num_zeros", "num_nonfinite", "weight_sq", "update_sq")


@dataclass(frozen=True)
class TensorStats:
    """Sums over the elements of one parameter or layer.

    Attributes:
        numel: Number of elements.
        grad_norm: L2 norm before clipping (non-finite if an element is).
        num_zeros: Number of zero elements of the gradient.
        num_nonfinite: Number of non-finite elements of the gradient.
        weight_norm: L2 norm after the step.
        update_norm: L2 norm of the weight change; None if the step was not applied.
        activation_rms: Root mean square of the layer's output over the global batch, padding
            included; None if it has no output of its own.
    """

    numel: int
    grad_norm: float
    num_zeros: int
    num_nonfinite: int
    weight_norm: float
    update_norm: float | None
    activation_rms: float | None = None

    @property
    def zero_share(self) -> float:
        """Fraction of gradient elements that are exactly zero (shows underflow under fp16)."""
        return self.num_zeros / max(self.numel, 1)

    @property
    def update_ratio(self) -> float | None:
        """Norm of the update divided by that of the weights; None without an update or if all
        weights are zero.
        """
        if self.update_norm is None or self.weight_norm == 0:
            return None
        return self.update_norm / self.weight_norm

    def record(self) -> dict[str, float | int | None]:
        """Return the log entry of a layer; for a frozen one, its output only."""
        if not self.numel:
            return {"activation_rms": self.activation_rms}
        return {
            "grad_norm": self.grad_norm,
            "zero_share": self.zero_share,
            "nonfinite": self.num_nonfinite,
            "update_ratio": self.update_ratio,
            "activation_rms": self.activation_rms,
        }


@dataclass(frozen=True)
class LayerStats:
    """Statistics of one step, equal on every rank.

    Attributes:
        step: 1-based.
        applied: Whether the step changed the weights.
        parameters: TensorStats by name; block parameters by stream,
            "blocks.0.to_out.weight[text]".
        layers: TensorStats by name.
        dead: Parameters found in this step, for the first time, to have never had a gradient.
        underflow_share: Under fp16, fraction of zeros among the gradient elements of the
            parameters (without embeddings) that have a gradient; else None.
    """

    step: int
    applied: bool
    parameters: dict[str, TensorStats]
    layers: dict[str, TensorStats]
    dead: list[str]
    underflow_share: float | None = None

    def record(self) -> dict:
        """Return one record of the log."""
        layers = {name: stats.record() for name, stats in self.layers.items()}
        underflow = (
            {} if self.underflow_share is None else {"underflow_share": self.underflow_share}
        )
        return {"step": self.step, "skipped": not self.applied, **underflow, "layers": layers}

    def flat_record(self) -> dict[str, float]:
        """Return the record without nesting, for trackers: "blocks.0.text/grad_norm"."""
        flat = {"step": self.step, "underflow_share": self.underflow_share}
        for layer, stats in self.layers.items():
            flat |= {f"{layer}/{key}": value for key, value in stats.record().items()}
        return {key: value for key, value in flat.items() if value is not None}


class LayerStatsCollector:
    """Measure every `interval`-th step.

    Call on every rank, in this order: before_forward, (forward, backward, grad_norm), before_step,
    (apply or discard), after_step.

    Args:
        interval: Steps between two statistics (logging.layer_stats_freq); 0 disables them.
        dtype: Compute dtype (training.dtype).
    """

    def __init__(self, engine: Engine, interval: int, dtype: str = "fp32"):
        self.engine, self.interval, self._scales = engine, interval, dtype == "fp16"
        self._numel: dict[str, int] = {}
        self._rows: dict[str, list[int]] = {}  # rows of a parameter's parts in the sums
        self._num_rows = 0
        self._activations = ActivationRecorder(engine.model) if interval else None
        self._sums: Tensor | None = None  # sums of the step being measured
        self._muon_weights: dict[tuple[str, int], Tensor] = {}  # weights before that step
        self._step = 0
        self._num_reports = 0
        self._not_dead: set[str] = set()  # parts that had a gradient, or were reported
        if not interval:
            return
        self._layers = layer_modules(engine.model)
        # A block's parameters hold the text half, then the latent half; each half has a row.
        inside = tuple(
            f"{name}."
            for name, module in engine.model.named_modules()
            if hasattr(module, "split_streams")
        )
        for name, parameter in engine.model.named_parameters():
            if parameter.requires_grad:
                # Under ZeRO-3 a parameter itself is empty.
                self._numel[name] = math.prod(getattr(parameter, "ds_shape", parameter.shape))
                count = len(STREAMS) if name.startswith(inside) else 1
                self._rows[name] = list(range(self._num_rows, self._num_rows + count))
                self._num_rows += count

    @property
    def names(self) -> list[str]:
        """Names of the trainable parameters ([] with interval 0)."""
        return list(self._numel)

    @property
    def parts(self) -> dict[str, str]:
        """Part (key of LayerStats.parameters) -> the parameter that it belongs to."""
        return {
            part: name for name, rows in self._rows.items() for part in parts_of(name, len(rows))
        }

    def before_forward(self, step: int) -> None:
        """Start measuring, if this 1-based step is due (the same decision on every rank)."""
        if self._activations is not None and step % self.interval == 0:
            self._step = step
            self._activations.start()

    def before_step(self) -> None:
        """Sum the gradients; after engine.grad_norm(), before apply or discard.

        Not collective, no host sync.
        """
        if not self._step:
            return
        shape = self._num_rows, len(_SUMS)
        self._sums = sums = torch.zeros(shape, dtype=torch.float64, device=self.engine.device)
        # Another rank counts the same elements.
        if not self.engine.saves_shards:
            return
        groups = self.engine.optimizer_groups()
        # The update of Muon cannot be reconstructed from a shard of the momentum.
        self._muon_weights = {
            (shard.name, shard.start): shard.slice_of(shard.owner).clone()
            for shard in self.engine.parameter_shards()
            if shard.count and groups[shard.owner].get("muon")
        }
        for fragment, gradient in self.engine.gradient_shards():
            if not fragment.count:
                continue
            for row, part in self._parts(sums, fragment):
                if gradient is None:
                    row[1] += part.stop - part.start
                    continue
                piece = gradient[part]
                norm = (
                    torch.linalg.vector_norm(piece, dtype=torch.float64) / self.engine.loss_scale
                )
                row[0] += norm.square().to(row.device)
                row[1] += (piece.numel() - torch.count_nonzero(piece)).to(row.device)
                row[2] += (~torch.isfinite(piece)).sum().to(row.device)

    def _parts(self, sums: Tensor, fragment: ParameterShard) -> list[tuple[Tensor, slice]]:
        """Return the rows of a fragment's elements, each with the slice of elements that it
        counts.
        """
        rows = self._rows[fragment.name]
        size = self._numel[fragment.name] // len(rows)
        # Start of each row's elements, relative to the fragment.
        cuts = [
            min(max(part * size - fragment.start, 0), fragment.count) for part in range(len(rows))
        ]
        parts = zip(rows, cuts, [*cuts[1:], fragment.count])
        return [(sums[row], slice(begin, end)) for row, begin, end in parts if begin < end]

    def after_step(self, lr: float, applied: bool) -> LayerStats | None:
        """Return the statistics of a measured step, else None. Collective on a measured step.

        Args:
            lr: Learning rate of the step.
            applied: False if its gradients were discarded.
        """
        sums, step, recorder = self._sums, self._step, self._activations
        if sums is None or recorder is None:
            return None
        self._sums, self._step = None, 0
        if self.engine.saves_shards:
            self._add_updates(sums, lr, applied)
            self._muon_weights = {}
        activations = recorder.collect(self.engine.device)
        total = self.engine.sum_on_host(torch.cat([sums.flatten(), activations.flatten()]))
        return self._report(step, applied, total, recorder.rms(total[sums.numel() :]))

    def _add_updates(self, sums: Tensor, lr: float, applied: bool) -> None:
        states, groups = self.engine.optimizer_state(), self.engine.optimizer_groups()
        for fragment in self.engine.parameter_shards():
            if not fragment.count:
                continue
            state = states.get(fragment.owner)
            for row, part in self._parts(sums, fragment):
                weight = fragment.slice_of(fragment.owner)[part]
                row[3] += (
                    torch.linalg.vector_norm(weight, dtype=torch.float64).square().to(row.device)
                )
                # AdamW of torch has no state for a parameter that never had a gradient.
                if applied and state:
                    group = groups[fragment.owner]
                    if group.get("muon"):
                        update = weight - self._muon_weights[fragment.name, fragment.start][part]
                    else:
                        mean, square = (fragment.slice_of(state[key])[part] for key in MOMENTS)
                        update = adamw_update(weight, mean, square, state["step"], lr, group)
                    row[4] += (
                        torch.linalg.vector_norm(update, dtype=torch.float64)
                        .square()
                        .to(row.device)
                    )

    def _report(
        self, step: int, applied: bool, total: list[float], rms: dict[str, float]
    ) -> LayerStats:
        width = len(_SUMS)
        parameters: dict[str, TensorStats] = {}
        by_layer: dict[str, list[tuple[int, list[float]]]] = {}  # elements and sums of its parts
        for name, rows in self._rows.items():
            size = self._numel[name] // len(rows)
            names = layers_of(name, len(rows), self._layers)
            for part, layer, row in zip(parts_of(name, len(rows)), names, rows, strict=True):
                sums = total[width * row : width * (row + 1)]
                parameters[part] = _tensor_stats(size, sums, applied)
                by_layer.setdefault(layer, []).append((size, sums))
                if parameters[part].num_zeros < size:
                    self._not_dead.add(part)
        self._num_reports += 1
        dead: list[str] = []
        if self._num_reports >= DEAD_AFTER_REPORTS:
            dead = [part for part in parameters if part not in self._not_dead]
            self._not_dead |= set(dead)
        layers: dict[str, TensorStats] = {}
        for layer in dict.fromkeys([*by_layer, *rms]):
            parts = by_layer.get(layer, [])
            summed = [math.fsum(values) for values in zip(*(sums for _, sums in parts))]
            size = sum(size for size, _ in parts)
            layers[layer] = _tensor_stats(size, summed or [0.0] * width, applied, rms.get(layer))
        underflow = None
        if self._scales:
            # Unused rows of an embedding are zero without underflow.
            used = [
                stats
                for name, stats in parameters.items()
                if "embedding" not in name and stats.grad_norm > 0
            ]
            num_zeros = sum(stats.num_zeros for stats in used)
            underflow = num_zeros / max(sum(stats.numel for stats in used), 1)
        return LayerStats(step, applied, parameters, layers, dead, underflow)


def parts_of(name: str, parts: int) -> list[str]:
    """Return the names of a parameter's parts: its own name, or one per stream."""
    return [name] if parts == 1 else [f"{name}[{stream}]" for stream in STREAMS]


def layers_of(name: str, parts: int, layers: Collection[str] = ()) -> list[str]:
    """Return the layer of each part: a stream of a block ("blocks.3.text"), or the layer that
    holds the parameter.

    Args:
        layers: Names of all layers; a parameter outside them counts for the first part of its
            name.
    """
    if parts == 1:
        words = name.split(".")
        prefixes = (".".join(words[:count]) for count in range(len(words), 0, -1))
        return [next((prefix for prefix in prefixes if prefix in layers), words[0])]
    return [".".join([*name.split(".")[:2], stream]) for stream in STREAMS]


def adamw_update(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor | float,
    lr: float,
    group: dict,
) -> Tensor:
    """Return the weight change of AdamW's last step, reconstructed from its moments without a copy
    of the weights.

    Loshchilov and Hutter, arXiv 1711.05101, as in torch.optim.AdamW.

    Args:
        weight: Value after the step.
        step: AdamW's step count, 0-d tensor or number.
    """
    (beta1, beta2), decay = group["betas"], lr * group["weight_decay"]
    # This order needs at most two temporaries of the weight's size.
    denominator = (exp_avg_sq / (1 - beta2**step)).sqrt_().add_(group["eps"])
    scaled = (exp_avg / (1 - beta1**step)).div_(denominator).mul_(lr)
    del denominator
    before = (weight + scaled).div_(1 - decay)
    return before.sub_(weight)


def _tensor_stats(
    numel: int, row: list[float], applied: bool, rms: float | None = None
) -> TensorStats:
    grad_sq, zeros, nonfinite, weight_sq, update_sq = row
    update = math.sqrt(update_sq) if applied else None
    return TensorStats(
        numel, math.sqrt(grad_sq), int(zeros), int(nonfinite), math.sqrt(weight_sq), update, rms
    )


def layer_modules(model: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Return the layers that statistics name: the modules of every numbered stack, and the parts
    next to the stacks.
    """
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_children():
        if isinstance(module, nn.ModuleList):
            layers |= {f"{prefix}{name}.{index}": block for index, block in enumerate(module)}
        elif any(isinstance(child, nn.ModuleList) for child in module.modules()):
            layers |= layer_modules(module, f"{prefix}{name}.")
        else:
            layers[f"{prefix}{name}"] = module
    return layers


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
            # The text head returns losses.
            elif name != "text_head":
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
                hook = module.register_forward_hook(
                    lambda m, args, out: self._record(m, out, args)
                )
                self._undo.append(hook.remove)
            else:
                # A hook would be compiled into the block permanently.
                module._compiled_call_impl = self._wrap(module, compiled)
                self._undo.append(partial(setattr, module, "_compiled_call_impl", compiled))

    def _wrap(self, module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            output = call(*args, **kwargs)
            self._record(module, output, args)
            return output

        return wrapped

    @torch.no_grad()
    def _record(self, module: nn.Module, output: Any, inputs: tuple) -> None:
        # A block returns its two streams as rows of one tensor.
        split_streams: Callable[..., Any] | None = getattr(module, "split_streams", None)
        if split_streams is not None:
            output = split_streams(output, *inputs)
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


def _float_tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from _float_tensors(part)
