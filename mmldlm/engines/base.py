"""The seam between the training loop and the engines that run its steps."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from mmldlm.distributed.collectives import Ranks
from mmldlm.engines.shards import ParameterShard, PinnedSnapshot
from mmldlm.errors import UserError
from mmldlm.utils.moments import MOMENTS, MUON_MOMENTS, moment_keys


class StateReader(Protocol):
    """What `Engine.load` reads from: the weights and moments of a checkpoint, in slices."""

    def read(self, name: str, what: str, start: int, count: int) -> np.ndarray:
        """Return elements [start, start + count) of a parameter's weight or moment."""

    def moments_of(self, name: str) -> tuple[str, ...]:
        """Return the moments that are stored for a parameter."""


class Engine(Ranks, ABC):
    """Forward, backward, step, save and load on one or more ranks.

    The engine sums gradients over ranks and micro-batches instead of averaging them: a loss is the
    part of this micro-batch in the loss of the global batch. Master weights, accumulation and
    reduction are fp32.

    Attributes:
        kind: Name of the engine in the config.
        rank: Rank of this process.
        world_size: Number of ranks.
        device: Device of this rank's tensors.
        model: Bare model (its parameters may be sharded).
        module: Module to call for a forward pass.
        optimizer: torch's or Muon, or what DeepSpeed wraps around one of them.
        folders: Folders below a checkpoint's engine folder that `write` needs; they exist,
            writable on every rank, before `snapshot_state` is called.
        saves_shards: Whether this rank's shards are saved (False if another rank holds the same).
        steps_one_by_one: Whether the inner optimizer is stepped once per flat partition (ZeRO-1 to
            3) instead of once for all parameters.
        loss_scale: Factor of the loss in backward (fp16), to be set before the first backward of a
            step.
    """

    kind: str
    rank: int
    world_size: int
    device: torch.device
    model: nn.Module
    module: nn.Module
    optimizer: Any
    folders: tuple[str, ...] = ()
    saves_shards: bool = True
    steps_one_by_one: bool = False
    loss_scale: float = 1.0

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this micro-batch; call once per accumulated micro-batch, then
        `grad_norm`.
        """

    @abstractmethod
    def grad_norm(self) -> Tensor:
        """Global L2 norm of the accumulated gradients before clipping. Collective.

        0-d, on the device, the same on every rank; NaN or inf (which of them depends on the
        engine) if any element on any rank is not finite. Adds no host sync to the engine's own.
        Call it once, then `step` or `discard_gradients`.
        """

    @abstractmethod
    def step(self, lr: float, grad_norm: float) -> None:
        """Clip by this (finite) norm and update the weights with this learning rate.

        Collective.
        """

    @abstractmethod
    def discard_gradients(self) -> None:
        """Discard the accumulated gradients; weights and moments do not change. Collective."""

    # -- shards of this rank ----------------------------------------------------------------------

    @abstractmethod
    def parameter_shards(self) -> list[ParameterShard]:
        """Shards of the fp32 master weights that this rank updates; all ranks' cover every
        trainable parameter.
        """

    def gradient_shards(self) -> list[tuple[ParameterShard, Tensor | None]]:
        """`parameter_shards`, each with its gradient [count], summed over ranks and micro-batches
        and not clipped.

        Valid between `grad_norm` and `step` or `discard_gradients` only. Gradients are views where
        the engine stores the elements together, and None for parameters without a gradient (ZeRO-1
        to 3 store zeros there). Ranks that hold the same shards (`saves_shards`) get the same
        values. No collective, no host sync.
        """
        shards = self.parameter_shards()
        gradients = [shard.owner.grad for shard in shards]
        return [
            (shard, None if gradient is None else shard.slice_of(gradient))
            for shard, gradient in zip(shards, gradients, strict=True)
        ]

    @abstractmethod
    def frozen_shards(self) -> list[ParameterShard]:
        """Shards of the frozen weights that this rank holds, in the engine's dtype."""

    @abstractmethod
    def optimizer_state(self) -> dict[Tensor, dict[str, Any]]:
        """State of the inner optimizer by the tensor that it updates (ParameterShard.owner)."""

    @abstractmethod
    def optimizer_groups(self) -> dict[Tensor, dict[str, Any]]:
        """Group (lr, weight_decay, betas, ...) of every tensor that the inner optimizer
        updates.
        """

    def process_group(self) -> Any:
        """Ranks that shard or replicate the parameters between them; None: this process alone."""
        return torch.distributed.group.WORLD if self.world_size > 1 else None

    @abstractmethod
    def sync_weights_from_masters(self) -> None:
        """Copy changed masters to the weights that the model computes with. Collective."""

    # -- checkpoints ------------------------------------------------------------------------------

    @abstractmethod
    def snapshot_state(self, folder: Path, step: int) -> Any:
        """State that this rank must write below folder, for `write`; its tensors may be live.

        Collective.
        """

    def copy_to_host(self, state: Any) -> Any:
        """The state with its tensors copied to host memory, so that training continues while it is
        written.
        """
        if not hasattr(self, "_pinned_snapshot"):
            self._pinned_snapshot = PinnedSnapshot()
        return self._pinned_snapshot(state)

    def write(self, state: Any, folder: Path) -> list[Path]:
        """Write a copied snapshot; touches no live tensor, so it may run in a separate thread.

        Returns:
            The files that this rank wrote.
        """
        for name, values in state:
            # A missing folder is not created again: its files are lost.
            torch.save(values, folder / name)
        return [folder / name for name, _ in state]

    def complete_optimizer_state(self, applied_steps: int) -> None:
        """Give parameters that no step has had a gradient for the state of one without moments.

        torch's optimizers make a state at the first gradient; a checkpoint without one of them
        could not be loaded.
        """
        states, groups = self.optimizer_state(), self.optimizer_groups()
        missing = [owner for owner in groups if not states.get(owner)]
        # Before the first step there is none at all.
        for owner in missing if len(missing) < len(groups) else ():
            states[owner] = _fresh_state(owner, groups[owner], applied_steps)

    def reset_after_failed_save(self) -> None:
        """Prepare for the next checkpoint after one that a rank could not write. Collective."""
        return

    def load(self, reader: StateReader, applied_steps: int) -> None:
        """Load weights, moments and buffers from a checkpoint of any engine, stage and world size.

        Reads only this rank's shards; call `sync_weights_from_masters` on every rank when all
        ranks have read.

        Args:
            reader: Reader of the checkpoint.
            applied_steps: Step count of the optimizer.

        Raises:
            UserError: a corrupt file, or the state of another optimizer.kind.
        """
        shards = self.parameter_shards()
        with torch.no_grad():
            for shard in [*shards, *self.frozen_shards()]:
                values = reader.read(shard.name, "weight", shard.start, shard.count)
                shard.slice_of(shard.owner).copy_(torch.from_numpy(values))
            for name, buffer in persistent_buffers(self.model).items():
                values = reader.read(name, "weight", 0, buffer.numel())
                buffer.copy_(torch.from_numpy(values).view(buffer.shape))
            states, groups = self.optimizer_state(), self.optimizer_groups()
            for owner in {id(shard.owner): shard.owner for shard in shards}.values():
                states[owner] = {}
                if applied_steps:
                    states[owner] = _fresh_state(owner, groups[owner], applied_steps)
            # Before the first step the optimizer has no state.
            for shard in shards if applied_steps else ():
                _check_same_optimizer(reader, shard.name, groups[shard.owner])
                for key in moment_keys(groups[shard.owner]):
                    values = reader.read(shard.name, key, shard.start, shard.count)
                    shard.slice_of(states[shard.owner][key]).copy_(torch.from_numpy(values))

    # -- collectives ------------------------------------------------------------------------------

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum a small tensor over the ranks, in place."""
        if self.world_size > 1:
            torch.distributed.all_reduce(values)
        return values

    def sum_on_host(self, values: Tensor) -> list[float]:
        """Sum a small vector over the ranks and read it on the host.

        With NCCL, this is where a rank waits for late ones; `stack_dump.BLOCKING_CALLS` refers to
        it by name.
        """
        return self.all_reduce_sum(values).tolist()

    def to_device(self, numbers: Sequence[float]) -> Tensor:
        """Copy host numbers to a float64 vector on the device, without a host sync."""
        on_host = torch.tensor(numbers, dtype=torch.float64, pin_memory=self.device.type == "cuda")
        return on_host.to(self.device, non_blocking=True)

    def gather_messages(self, text: str | None) -> list[str]:
        """Return the texts of the ranks that pass one, each with its rank and host."""
        signed = None if text is None else f"rank {self.rank} on {socket.gethostname()}: {text}"
        return super().gather_messages(signed)

    def all_agree(self, ok: bool) -> bool:
        """Return whether `ok` is True on every rank. Collective."""
        return ok if self.world_size == 1 else self.sum_on_host(self.to_device([not ok])) == [0]

    def describe(self) -> str:
        """One phrase for the screen and the manifest."""
        return self.kind


def _check_same_optimizer(reader: StateReader, name: str, group: dict[str, Any]) -> None:
    # Checkpoints older than optimizer.kind do not record it.
    if reader.moments_of(name) != moment_keys(group):
        kinds = {MOMENTS: "adamw", MUON_MOMENTS: "muon"}
        raise UserError(
            f"the state of optimizer.kind={kinds[moment_keys(group)]}",
            f"{' and '.join(reader.moments_of(name)) or 'none'} of {name}",
            f"set optimizer.kind={kinds.get(reader.moments_of(name), 'adamw')}, or start a new run"
            " from the weights alone with training.init_from",
        )


def _fresh_state(owner: Tensor, group: dict[str, Any], applied_steps: int) -> dict[str, Tensor]:
    """State of one tensor, its moments zero; fused AdamW keeps its step count on the tensor's
    device.
    """
    step = torch.tensor(float(applied_steps), dtype=torch.float32, device=owner.device)
    return {"step": step, **{key: torch.zeros_like(owner) for key in moment_keys(group)}}


class Autocast(nn.Module):
    """Calls a module under torch.autocast: fp32 weights, matrix products in dtype, fp32
    gradients.
    """

    def __init__(self, module: nn.Module, device_type: str, dtype: torch.dtype):
        super().__init__()
        self.module, self.device_type, self.dtype = module, device_type, dtype

    def forward(self, *args, **kwargs):
        with torch.autocast(self.device_type, self.dtype):
            return self.module(*args, **kwargs)


def compute_dtype(name: str) -> torch.dtype:
    """The torch dtype of training.dtype."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that are saved in a checkpoint, by each of their names."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def tied_names(model: nn.Module) -> dict[str, str]:
    """Second name -> first name of parameters that several modules share."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {
        name: first[id(parameter)] for name, parameter in named if first[id(parameter)] != name
    }
