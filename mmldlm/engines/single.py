"""One process, plain PyTorch: the reference every other engine is compared with."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from mmldlm.config.schema import Config
from mmldlm.engines.base import Autocast, Engine, StepResult, pick_device, rank_environment
from mmldlm.engines.optimizer import build_optimizer
from mmldlm.errors import UserError


class SingleEngine(Engine):
    """fp32 weights, autocast to bf16 when asked."""

    kind = "single"

    def __init__(self, model: nn.Module, config: Config):
        self.rank, local_rank, self.world_size = rank_environment()
        if self.world_size != 1:
            raise UserError(
                "one process for engine.kind=single",
                f"WORLD_SIZE={self.world_size}",
                "use engine.kind=deepspeed, or one process",
            )
        self.device = pick_device(local_rank)
        self.model = model.to(self.device)
        self.module = Autocast(model, self.device.type) if config.training.dtype == "bf16" else model
        self.optimizer = build_optimizer(model, config.optimizer)
        self.clip = config.optimizer.grad_clip_norm

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, lr: float) -> StepResult:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(parameters, self.clip if self.clip is not None else math.inf)
        grad_norm = float(norm)
        applied = math.isfinite(grad_norm)
        if applied:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(grad_norm, applied)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.model.state_dict(), folder / "model.pt")
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")

    def load(self, folder: Path) -> None:
        self.model.load_state_dict(torch.load(folder / "model.pt", map_location=self.device, weights_only=True))
        self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", map_location=self.device, weights_only=True))
