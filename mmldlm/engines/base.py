"""The seam between the training loop and what runs its steps."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn


@dataclass
class StepResult:
    """What an optimizer step did, the same on every rank.

    Attributes:
        grad_norm: global norm before clipping (float; inf or nan when the step was refused).
        applied: False when the step was skipped for a non-finite norm; weights and moments are then untouched.
    """

    grad_norm: float
    applied: bool


class Engine(ABC):
    """forward / backward / step / save / load over some ranks.

    The engine adds gradients up over ranks and micro-batches (it does not average them): a loss is this micro-batch's
    share of the global batch's loss. Master weights, accumulation and reduction are fp32.

    Attributes:
        kind: name in the config. rank, world_size: of this process. device: where its tensors live.
        model: the bare model (parameters may be sharded). module: what to call for a forward pass.
    """

    kind: str
    rank: int
    world_size: int
    device: torch.device
    model: nn.Module
    module: nn.Module

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this micro-batch; call once for each of the accumulated micro-batches, then `step`."""

    @abstractmethod
    def step(self, lr: float) -> StepResult:
        """Clip, and update the weights with this learning rate, or refuse a non-finite norm. Collective."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write this rank's files of the weights and optimizer state into folder. Collective."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read what `save` wrote on the same kind of engine, stage and world size. Collective."""

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum a small tensor over the ranks, in place."""
        if self.world_size > 1:
            torch.distributed.all_reduce(values)
        return values

    def all_ok(self, ok: bool) -> bool:
        """True when every rank says True."""
        if self.world_size == 1:
            return ok
        flag = torch.tensor([0.0 if ok else 1.0], device=self.device)
        return self.all_reduce_sum(flag).item() == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_ok(True)

    def describe(self) -> str:
        """One phrase for the screen and the manifest."""
        return self.kind


class Autocast(nn.Module):
    """Calls a module under torch.autocast to bf16: fp32 weights, bf16 matrix products, fp32 gradients."""

    def __init__(self, module: nn.Module, device_type: str):
        super().__init__()
        self.module, self.device_type = module, device_type

    def forward(self, *args, **kwargs):
        with torch.autocast(self.device_type, torch.bfloat16):
            return self.module(*args, **kwargs)


def rank_environment() -> tuple[int, int, int]:
    """rank, local rank and world size that the launcher put into the environment (0, 0, 1 without one)."""
    return tuple(
        int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
    )


def pick_device(local_rank: int) -> torch.device:
    """This rank's GPU, or the CPU where there is none."""
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")
