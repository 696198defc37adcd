"""How gradients, updates and activations look, layer by layer, under every engine and stage.

Figures of sharded gradients are sums over what each rank holds: one vector, one all-reduce and one host sync on a step
that is looked at, nothing on any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmldlm.engines.base import Engine
from mmldlm.engines.gradient_shards import gradient_fragments, optimizer_groups

DEAD_AFTER_REPORTS = 10
"""Looks before a parameter whose gradient was zero in all of them is called dead: adaLN-Zero and zero-initialised heads
hide whole layers in the first steps, and a learned null waits for a sample that uses it."""

STREAMS = ("text", "latent")
"""Halves of a block's parameters and outputs."""

# Of each parameter, over all ranks. update_sq is not finite where the step was not applied.
_FIGURES = ("grad_sq", "num_zeros", "num_nonfinite", "weight_sq", "update_sq")


@dataclass(frozen=True)
class TensorStats:
    """Sums over the elements of one parameter or layer.

    Attributes:
        numel: elements. grad_norm: L2 norm before clipping (not finite where an element is not). num_zeros,
            num_nonfinite: of the gradient. weight_norm: after the step. update_norm: of the step's change of the
            weights, None when the step was not applied. activation_rms: root mean square of the layer's output over
            the global batch, padding included; None where it has none of its own.
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
        """Share of gradient elements that are exactly zero (under fp16 this is where underflow shows)."""
        return self.num_zeros / max(self.numel, 1)

    @property
    def update_ratio(self) -> float | None:
        """Norm of the update over that of the weights; None where there was no update or all weights are zero."""
        if self.update_norm is None or self.weight_norm == 0:
            return None
        return self.update_norm / self.weight_norm

    def record(self) -> dict[str, float | int | None]:
        """What the log holds of a layer; of one that is not trained its output alone."""
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
    """What one step showed, the same on every rank.

    Attributes:
        step: 1-based. applied: whether the step moved the weights. parameters, layers: name -> Figures; a block's
            parameters by streams, "blocks.0.to_out.weight[text]". dead: those named now, and only now, as never having
            had a gradient. underflow_share: under fp16, share of zeros among the gradient elements of the parameters
            (but embeddings) that have a gradient; else None.
    """

    step: int
    applied: bool
    parameters: dict[str, TensorStats]
    layers: dict[str, TensorStats]
    dead: list[str]
    underflow_share: float | None = None

    def record(self) -> dict:
        """One line of the log."""
        layers = {name: figures.record() for name, figures in self.layers.items()}
        underflow = {} if self.underflow_share is None else {"underflow_share": self.underflow_share}
        return {"step": self.step, "skipped": not self.applied, **underflow, "layers": layers}

    def flat_record(self) -> dict[str, float]:
        """The same without nesting, for wandb: "blocks.0.text/grad_norm"."""
        flat = {f"{layer}/{key}": v for layer, figures in self.layers.items() for key, v in figures.record().items()}
        flat["underflow_share"] = self.underflow_share
        return {"step": self.step, **{key: value for key, value in flat.items() if value is not None}}


class LayerStatsCollector:
    """Looks at every `interval`-th step; call in this order on every rank: before_forward, (forward, backward,
    grad_norm), before_step, (apply or discard), after_step.

    Args:
        engine: the engine. interval: logging.grad_log_interval; 0 never looks. dtype: training.dtype.
    """

    def __init__(self, engine: Engine, interval: int, dtype: str = "fp32"):
        self.engine, self.interval, self._scales = engine, interval, dtype == "fp16"
        self._numel: dict[str, int] = {}
        self._rows: dict[str, list[int]] = {}  # of a parameter's parts in the sums
        self._activations = _Activations(engine.model) if interval else None
        self._sums: Tensor | None = None  # of the step being looked at
        self._step = 0
        self._num_looks, self._has_gradient, self._dead = 0, set(), set()
        if interval:
            whole = {fragment.name: math.prod(fragment.shape) for fragment in engine.parameter_shards()}
            # Every rank needs every name, also those of which it holds nothing.
            trainable = [name for name, parameter in engine.model.named_parameters() if parameter.requires_grad]
            # A block's parameters hold text's half, then the latents'; each has a row of its own.
            inside = [f"{name}." for name, module in engine.model.named_modules() if hasattr(module, "split_streams")]
            count = 0
            for name in trainable:
                rows = len(STREAMS) if name.startswith(tuple(inside)) else 1
                self._rows[name] = list(range(count, count + rows))
                count += rows
            self._num_rows = count
            sizes = torch.tensor([float(whole.get(name, 0)) for name in trainable], dtype=torch.float64)
            sizes = sizes.to(engine.device)
            if engine.world_size > 1:
                torch.distributed.all_reduce(sizes, op=torch.distributed.ReduceOp.MAX)
            self._numel = dict(zip(trainable, map(int, sizes.tolist()), strict=True))

    @property
    def names(self) -> list[str]:
        """The parameters that were trainable when this was made ([] with interval 0)."""
        return list(self._numel)

    @property
    def parts(self) -> dict[str, str]:
        """What Look.parameters names -> the parameter that it is, or is a stream's half of."""
        return {part: name for name, rows in self._rows.items() for part in parts_of(name, len(rows))}

    def before_forward(self, step: int) -> None:
        """Whether this (1-based) step is looked at is decided here, alike on every rank."""
        if self.interval and step % self.interval == 0:
            self._step = step
            self._activations.watch()

    def before_step(self) -> None:
        """Sum the gradients up; after engine.grad_norm(), before apply or discard. No collective, no host sync."""
        if not self._step:
            return
        self._sums = torch.zeros(self._num_rows, len(_FIGURES), dtype=torch.float64, device=self.engine.device)
        if not self.engine.saves_shards:  # another rank counts the same elements
            return
        for fragment, gradient in gradient_fragments(self.engine):
            if not fragment.count:
                continue
            for row, part in self._parts(self._sums, fragment):
                if gradient is None:
                    row[1] += part.stop - part.start
                    continue
                piece = gradient[part]
                norm = torch.linalg.vector_norm(piece, dtype=torch.float64) / self.engine.loss_scale
                row[0] += norm.square().to(row.device)
                row[1] += (piece.numel() - torch.count_nonzero(piece)).to(row.device)
                row[2] += (~torch.isfinite(piece)).sum().to(row.device)

    def _parts(self, sums: Tensor, fragment) -> list[tuple[Tensor, slice]]:
        """The rows that a fragment's elements count into, each with the elements it counts."""
        rows = self._rows[fragment.name]
        size = self._numel[fragment.name] // len(rows)
        # Where each row's elements begin, as seen from the fragment.
        cuts = [min(max(place * size - fragment.start, 0), fragment.count) for place in range(len(rows))]
        parts = zip(rows, cuts, [*cuts[1:], fragment.count])
        return [(sums[row], slice(begin, end)) for row, begin, end in parts if begin < end]

    def after_step(self, lr: float, applied: bool) -> LayerStats | None:
        """What the step showed, or None where it is not looked at. Collective on a step that is.

        Args:
            lr: learning rate of the step. applied: False when its gradients were thrown away.
        """
        if not self._step:
            return None
        sums, step = self._sums, self._step
        self._sums, self._step = None, 0
        if self.engine.saves_shards:
            self._add_updates(sums, lr, applied)
        activations = self._activations.take(self.engine.device)
        total = self.engine.sum_on_host(torch.cat([sums.flatten(), activations.flatten()]))
        return self._report(step, applied, total)

    def _add_updates(self, sums: Tensor, lr: float, applied: bool) -> None:
        states, groups = self.engine.optimizer_state(), optimizer_groups(self.engine)
        for fragment in self.engine.parameter_shards():
            if not fragment.count:
                continue
            state = states.get(fragment.owner)
            for row, part in self._parts(sums, fragment):
                weight = fragment.of(fragment.owner)[part]
                row[3] += torch.linalg.vector_norm(weight, dtype=torch.float64).square().to(row.device)
                if applied and state:  # torch's AdamW passes over a parameter that never had a gradient
                    moments = [fragment.of(state[key])[part] for key in ("exp_avg", "exp_avg_sq")]
                    update = adamw_update(weight, *moments, state["step"], lr, groups[fragment.owner])
                    row[4] += torch.linalg.vector_norm(update, dtype=torch.float64).square().to(row.device)

    def _report(self, step: int, applied: bool, total: list[float]) -> LayerStats:
        width = len(_FIGURES)
        sizes = {name: self._numel[name] // len(rows) for name, rows in self._rows.items()}
        parts: dict[str, tuple[int, list[float]]] = {}  # part of a parameter -> elements, sums
        own: dict[str, list] = {}  # layer -> those of its parts
        for name, rows in self._rows.items():
            for part, layer, row in zip(parts_of(name, len(rows)), layers_of(name, len(rows)), rows, strict=True):
                parts[part] = sizes[name], total[width * row : width * (row + 1)]
                own.setdefault(layer, []).append(parts[part])
        rms = self._activations.rms(total[width * self._num_rows :])
        self._num_looks += 1
        self._has_gradient |= {part for part, (size, sums) in parts.items() if sums[1] < size}
        dead = []
        if self._num_looks >= DEAD_AFTER_REPORTS:
            dead = [part for part in parts if part not in self._has_gradient and part not in self._dead]
            self._dead |= set(dead)
        parameters = {part: _figures(size, sums, applied) for part, (size, sums) in parts.items()}
        layers = {}
        for layer in dict.fromkeys([*own, *rms]):
            summed = [math.fsum(values) for values in zip(*(part for _, part in own.get(layer, [])))] or [0.0] * width
            layers[layer] = _figures(sum(n for n, _ in own.get(layer, [])), summed, applied, rms.get(layer))
        # Rows of an embedding that a batch does not use are zero without any underflow.
        dense = (figures for name, figures in parameters.items() if "embedding" not in name)
        used = [figures for figures in dense if 0 < figures.grad_norm] if self._scales else []
        underflow = sum(f.num_zeros for f in used) / max(sum(f.numel for f in used), 1) if self._scales else None
        return LayerStats(step, applied, parameters, layers, dead, underflow)


def parts_of(name: str, parts: int) -> list[str]:
    """What the parts of a parameter are called: its own name, or with each stream's after it."""
    return [name] if parts == 1 else [f"{name}[{stream}]" for stream in STREAMS]


def layers_of(name: str, parts: int) -> list[str]:
    """The layers a parameter of so many parts belongs to: the streams of a block ("blocks.3.text", "blocks.3.latent"),
    or a part of the model."""
    if parts == 1:
        return [name.split(".")[0]]
    return [".".join([*name.split(".")[:2], stream]) for stream in STREAMS]


def adamw_update(weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step, lr: float, group: dict) -> Tensor:
    """How AdamW's last step changed `weight` (its value after the step), from the moments it left: no copy is kept.

    Loshchilov and Hutter, arXiv 1711.05101, as torch.optim.AdamW computes it. step: its count, 0-d tensor or number.
    """
    (beta1, beta2), decay = group["betas"], lr * group["weight_decay"]
    # In this order no more than two temporaries of the weight's size live at once.
    denominator = (exp_avg_sq / (1 - beta2**step)).sqrt_().add_(group["eps"])
    moved = (exp_avg / (1 - beta1**step)).div_(denominator).mul_(lr)
    del denominator
    before = (weight + moved).div_(1 - decay)
    return before.sub_(weight)


def _figures(numel: int, row: list[float], applied: bool, rms: float | None = None) -> TensorStats:
    grad_sq, zeros, nonfinite, weight_sq, update_sq = row
    update = math.sqrt(update_sq) if applied else None
    return TensorStats(numel, math.sqrt(grad_sq), int(zeros), int(nonfinite), math.sqrt(weight_sq), update, rms)


class _Activations:
    """Sums of squares of what the layers put out, while watched.

    Of a block its two streams, of other modules all floating-point tensors they return together. A block that is
    recomputed in the backward pass (gradient checkpointing) counts twice with the same values, which changes no mean.
    """

    def __init__(self, model: nn.Module):
        self._names: dict[nn.Module, list[str]] = {}
        for name, module in model.named_children():
            if isinstance(module, nn.ModuleList):
                for number, block in enumerate(module):
                    block_name = f"{name}.{number}"
                    streams = [f"{block_name}.{stream}" for stream in STREAMS]
                    self._names[block] = streams if hasattr(block, "split_streams") else [block_name]
            elif name != "text_head":  # it returns losses
                self._names[module] = [name]
        self._rows = {name: row for row, name in enumerate(n for names in self._names.values() for n in names)}
        self._sums: list[list[Tensor]] = []
        self._counts: list[int] = []
        self._undo: list = []

    def watch(self) -> None:
        """Begin to record; take() ends it."""
        self._stop()
        self._sums, self._counts = [[] for _ in self._rows], [0] * len(self._rows)
        for module in self._names:
            compiled = module._compiled_call_impl
            if compiled is None:
                self._undo.append(
                    module.register_forward_hook(lambda m, given, out: self._record(m, out, given)).remove
                )
            else:  # a hook would be compiled into the block, and never leave it
                module._compiled_call_impl = self._recording(module, compiled)
                self._undo.append(lambda module=module, call=compiled: setattr(module, "_compiled_call_impl", call))

    def _recording(self, module: nn.Module, call):
        def called(*args, **kwargs):
            output = call(*args, **kwargs)
            self._record(module, output, args)
            return output

        return called

    @torch.no_grad()
    def _record(self, module: nn.Module, output, given: tuple) -> None:
        if hasattr(module, "split_streams"):  # a block puts its two streams out as the rows of one tensor
            output = module.split_streams(output, *given)
        tensors, names = list(_float_tensors(output)), self._names[module]
        if len(names) != len(tensors):
            names = names[:1] * len(tensors)
        for name, tensor in zip(names, tensors, strict=True):
            row, dtype = self._rows[name], torch.promote_types(tensor.dtype, torch.float32)
            self._sums[row].append(torch.linalg.vector_norm(tensor.detach(), dtype=dtype).double().square())
            self._counts[row] += tensor.numel()

    def take(self, device: torch.device) -> Tensor:
        """[layers, 2] fp64 sums of squares and counts of this rank; stops recording."""
        self._stop()
        zero = torch.zeros((), dtype=torch.float64, device=device)
        sums = torch.stack([torch.stack([zero, *parts]).sum() for parts in self._sums])
        counts = torch.tensor([float(count) for count in self._counts], dtype=torch.float64, device=device)
        return torch.stack([sums, counts], dim=1)

    def rms(self, total: list[float]) -> dict[str, float]:
        """layer -> RMS, of the sums over all ranks."""
        pairs = {name: (total[2 * row], total[2 * row + 1]) for name, row in self._rows.items()}
        return {name: math.sqrt(square / count) for name, (square, count) in pairs.items() if count}

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
