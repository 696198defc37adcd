"""DistributedDataParallel: every rank holds the complete model and optimizer."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmldlm.config.schema import Config
from mmldlm.distributed.environment import pick_device, rank_environment
from mmldlm.distributed.process_group import start_process_group
from mmldlm.engines.base import Autocast, compute_dtype
from mmldlm.engines.parameter_plan import ParameterPlan
from mmldlm.engines.torch_engine import TorchEngine


class DdpEngine(TorchEngine):
    """fp32 weights and gradients, autocast to bf16 or fp16; gradients are reduced once per
    optimizer step.
    """

    kind = "ddp"

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

    def describe(self) -> str:
        return "ddp"
