"""Engines that run torch's own optimizer on whole parameters: one process, and DDP.

`TorchEngine` is also the base of FSDP (fsdp.py).
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mmldlm.config.schema import Config
from mmldlm.distributed.environment import pick_device, rank_environment
from mmldlm.distributed.process_group import start_process_group
from mmldlm.engines.base import Autocast, Engine, compute_dtype, persistent_buffers, tied_names
from mmldlm.engines.optimizer import build_optimizer, clipped_step, set_learning_rate
from mmldlm.engines.parameter_plan import ParameterPlan
from mmldlm.engines.shards import ParameterShard, full_shard
from mmldlm.errors import UserError


class TorchEngine(Engine):
    """Compute the global norm, clip, step.

    Subclasses wrap the model and choose when gradients are reduced.
    """

    optimizer: torch.optim.AdamW

    def _setup(self, model: nn.Module, config: Config, plan: ParameterPlan) -> None:
        """Build the optimizer over the (wrapped) model's parameters."""
        self.model = model
        self.optimizer = build_optimizer(model, plan, config.optimizer)
        self.clip = config.optimizer.grad_clip_norm
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        # As they are now: FSDP2 puts whole ones in their place from a forward pass on, until the
        # next backward pass.
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._accum, self._micro = config.training.grad_accum_steps, 0
        self._sync_gradients(self._accum == 1)

    def _sync_gradients(self, sync: bool) -> None:
        """Choose whether the next backward pass reduces the gradients over the ranks."""

    def backward(self, loss: Tensor) -> None:
        # torch averages over the ranks, but losses are terms of a sum.
        (loss * (self.world_size * self.loss_scale)).backward()
        self._micro = (self._micro + 1) % self._accum
        if self._accum > 1:
            self._sync_gradients(self._micro == self._accum - 1)

    def _parameters(self) -> list[Tensor]:
        return [
            parameter for group in self.optimizer.param_groups for parameter in group["params"]
        ]

    def grad_norm(self) -> Tensor:
        norm = nn.utils.get_total_norm([p.grad for p in self._parameters() if p.grad is not None])
        # For sharded parameters this is a DTensor, whose local value is the norm of the shard.
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return norm / self.loss_scale

    def step(self, lr: float, grad_norm: float) -> None:
        set_learning_rate(self.optimizer, lr)
        clipped_step(self.optimizer, self.clip, grad_norm, self.loss_scale)
        self.discard_gradients()

    def discard_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def parameter_shards(self) -> list[ParameterShard]:
        return [
            self._shard(self._names[id(parameter)], parameter) for parameter in self._parameters()
        ]

    def frozen_shards(self) -> list[ParameterShard]:
        return [self._shard(name, parameter) for name, parameter in self._frozen]

    @staticmethod
    def _shard(name: str, parameter: Tensor) -> ParameterShard:
        return full_shard(name, parameter)

    def optimizer_state(self) -> dict[Tensor, dict[str, Any]]:
        return self.optimizer.state

    def optimizer_groups(self) -> dict[Tensor, dict[str, Any]]:
        return {
            parameter: group
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        }

    def sync_weights_from_masters(self) -> None:
        """The masters are the weights."""

    def snapshot_state(self, folder: Path, step: int) -> Any:
        if self.rank != 0:
            # Every rank holds the same state.
            return []
        names = [
            [self._names[id(p)] for p in group["params"]] for group in self.optimizer.param_groups
        ]
        # A host copy stores tied weights twice: the aliases record which are one tensor.
        metadata = {"param_names": names, "buffer_names": list(persistent_buffers(self.model))}
        optimizer = {**self.optimizer.state_dict(), **metadata, "aliases": tied_names(self.model)}
        return [("model.pt", dict(self.model.state_dict())), ("optimizer.pt", optimizer)]


class SingleEngine(TorchEngine):
    """fp32 weights, autocast to bf16 or fp16 when asked."""

    kind = "single"

    def __init__(self, model: nn.Module, config: Config, plan: ParameterPlan):
        self.rank, local_rank, self.world_size = rank_environment()
        if self.world_size != 1:
            raise UserError(
                "one process for engine.kind=single",
                f"WORLD_SIZE={self.world_size}",
                "use engine.kind=deepspeed, fsdp or ddp, or one process",
            )
        self.device = pick_device(local_rank)
        self._setup(model.to(self.device), config, plan)
        dtype = compute_dtype(config.training.dtype)
        self.module = model if dtype == torch.float32 else Autocast(model, self.device.type, dtype)


class DdpEngine(TorchEngine):
    """fp32 weights and gradients, autocast to bf16 or fp16; gradients are reduced once per
    optimizer step.
    """

    kind = "ddp"
    module: DistributedDataParallel

    def __init__(self, model: nn.Module, config: Config, plan: ParameterPlan):
        self.rank, local_rank, self.world_size = rank_environment()
        self.device = pick_device(local_rank)
        start_process_group(self.device, config.engine.collective_timeout)
        self.saves_shards = self.rank == 0
        model.to(self.device)
        dtype = compute_dtype(config.training.dtype)
        inner = model if dtype == torch.float32 else Autocast(model, self.device.type, dtype)
        # Buffers are constants (latent statistics), the same on every rank. torch 2.13 warns of
        # the argument's new name, which 2.6 does not have.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
        self.module = DistributedDataParallel(
            inner, broadcast_buffers=False, gradient_as_bucket_view=True
        )
        self._setup(model, config, plan)

    def _sync_gradients(self, sync: bool) -> None:
        # The attribute that DDP.no_sync sets: no `with` around the forward pass is needed.
        self.module.require_backward_grad_sync = sync
