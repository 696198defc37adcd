"""Base of the engines that run torch's AdamW on the model's parameters: single, ddp, fsdp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mmldlm.config.schema import Config
from mmldlm.engines.base import Engine, persistent_buffers, tied_names
from mmldlm.engines.optimizer import build_optimizer, clipped_step, set_learning_rate
from mmldlm.engines.parameter_plan import ParameterPlan
from mmldlm.engines.parameter_shards import ParameterShard, full_shard


class TorchEngine(Engine):
    """Compute the global norm, clip, step.

    Subclasses wrap the model and choose when gradients are reduced.
    """

    def _setup(self, model: nn.Module, config: Config, plan: ParameterPlan) -> None:
        """Build the optimizer over the (wrapped) model's parameters."""
        self.model = model
        self.optimizer = build_optimizer(model, plan, config.optimizer)
        self.clip = config.optimizer.grad_clip_norm
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._accum, self._micro = config.training.grad_accum_steps, 0
        self._sync_gradients(self._accum == 1)

    def _sync_gradients(self, sync: bool) -> None:
        """Choose whether the next backward pass reduces the gradients over the ranks."""

    def backward(self, loss: Tensor) -> None:
        # torch averages over the ranks; losses are shares of a sum.
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
        norm = (
            norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        )  # the norm of this shard only
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
        frozen = [(name, p) for name, p in self.model.named_parameters() if not p.requires_grad]
        return [self._shard(name, parameter) for name, parameter in frozen]

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
        if self.rank != 0:  # every rank holds the same state
            return []
        names = [
            [self._names[id(p)] for p in group["params"]] for group in self.optimizer.param_groups
        ]
        # A host copy stores tied weights twice: the aliases record which are one tensor.
        metadata = {"param_names": names, "buffer_names": list(persistent_buffers(self.model))}
        optimizer = {**self.optimizer.state_dict(), **metadata, "aliases": tied_names(self.model)}
        return [("model.pt", dict(self.model.state_dict())), ("optimizer.pt", optimizer)]
