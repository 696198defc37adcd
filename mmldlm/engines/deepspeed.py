"""DeepSpeed ZeRO 0 to 3."""

from __future__ import annotations

import logging
import math
import os
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn

from mmldlm.config.schema import Config
from mmldlm.engines.base import Engine, StepResult, pick_device, rank_environment
from mmldlm.engines.deepspeed_config import merged_config, resolve_stage
from mmldlm.engines.optimizer import build_optimizer
from mmldlm.errors import UserError

MINIMUM_VERSION = (0, 19, 8)
TAG = "zero"


class DeepSpeedEngine(Engine):
    """The model under deepspeed.initialize, with our AdamW, our learning rate and our loss normalisation."""

    kind = "deepspeed"

    def __init__(self, model: nn.Module, config: Config):
        deepspeed = import_deepspeed()
        self.rank, local_rank, self.world_size = rank_environment()
        self.device = pick_device(local_rank)
        self.stage = resolve_stage(config)
        ds_config = merged_config(config, self.world_size)
        start_process_group(self.device, config.engine.timeout)
        deepspeed.init_distributed(dist_backend=backend_of(self.device), verbose=False)
        self.model = model
        self.module, self._optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=build_optimizer(model, config.optimizer), config=ds_config
        )
        # DeepSpeed averages over ranks and accumulated micro-batches; our losses are shares of a sum.
        self._undo_averaging = self.world_size * config.training.grad_accum_steps

    def backward(self, loss: Tensor) -> None:
        self.module.backward(loss * self._undo_averaging)
        if not self.module.is_gradient_accumulation_boundary():
            self.module.step()

    def step(self, lr: float) -> StepResult:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        skipped_before = self.module.skipped_steps
        self.module.step()
        norm = self.module.get_global_grad_norm()
        grad_norm = math.nan if norm is None else float(norm)
        return StepResult(grad_norm, self.module.skipped_steps == skipped_before)

    def save(self, folder: Path) -> None:
        self.module.save_checkpoint(str(folder), tag=TAG, client_state={}, save_latest=False)

    def load(self, folder: Path) -> None:
        path, _ = self.module.load_checkpoint(str(folder), tag=TAG)
        if path is None:
            raise UserError(f"a DeepSpeed checkpoint in {folder / TAG}", "DeepSpeed loaded nothing", "pass a whole checkpoint")

    def describe(self) -> str:
        return f"deepspeed ZeRO-{self.stage}"


def import_deepspeed():
    """DeepSpeed, recent enough and quiet, with the op left out that is compiled at start.

    The shared-memory op saves a little time in reductions between ranks of one CPU node; building it takes minutes, and a
    killed build leaves a lock on which every later start waits for ever. gloo does the same work without it.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "warning")
    import deepspeed

    found = tuple(int(part) for part in deepspeed.__version__.split("+")[0].split(".")[:3])
    if found < MINIMUM_VERSION:
        raise UserError(
            f"deepspeed >= {'.'.join(map(str, MINIMUM_VERSION))} (older ones step on NaN under ZeRO-1, 2 or 3)",
            f"deepspeed {deepspeed.__version__}",
            "pip install -c constraints.txt deepspeed",
        )
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    return deepspeed


def backend_of(device: torch.device) -> str:
    """NCCL on GPUs, gloo on CPUs."""
    return "nccl" if device.type == "cuda" else "gloo"


def start_process_group(device: torch.device, timeout: float) -> None:
    """init_process_group from the launcher's environment (or for this process alone), with our time limit."""
    if torch.distributed.is_initialized():
        return
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(_free_port()))
    torch.distributed.init_process_group(backend_of(device), timeout=timedelta(seconds=timeout))


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
