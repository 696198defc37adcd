"""One process, plain PyTorch: the reference for every other engine."""

from __future__ import annotations

import torch
from torch import nn

from mmldlm.config.schema import Config
from mmldlm.distributed.environment import pick_device, rank_environment
from mmldlm.engines.base import Autocast, compute_dtype
from mmldlm.engines.parameter_plan import ParameterPlan
from mmldlm.engines.torch_engine import TorchEngine
from mmldlm.errors import UserError


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
