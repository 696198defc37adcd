"""DeepSpeed ZeRO 0 to 3."""

from __future__ import annotations

import logging
import math
import os
import warnings
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn

from mmldlm.config.schema import Config
from mmldlm.engines.base import Autocast, Engine, StepResult, pick_device, rank_environment
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
        optimizer = build_optimizer(model, config.optimizer)
        # DeepSpeed replaces the optimizer's parameters by its masters; ZeRO-0 saves those without their names.
        self._own_groups = [{"params": list(group["params"])} for group in optimizer.param_groups]
        self._engine, self._optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)
        # ZeRO-0 has no bf16 optimizer with fp32 accumulation; fp32 weights under autocast are the same arithmetic.
        autocast = self.stage == 0 and config.training.dtype == "bf16"
        self.module = Autocast(self._engine, self.device.type) if autocast else self._engine
        self._refused = False
        if self.stage == 0:
            self._guard_plain_step()
        # DeepSpeed averages over ranks and accumulated micro-batches; our losses are shares of a sum.
        self._undo_averaging = self.world_size * config.training.grad_accum_steps

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss * self._undo_averaging)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()

    def step(self, lr: float) -> StepResult:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        skipped_before, self._refused = self._engine.skipped_steps, False
        self._engine.step()
        norm = self._plain_norm if self.stage == 0 else float(self._engine.get_global_grad_norm())
        return StepResult(norm, self._engine.skipped_steps == skipped_before and not self._refused)

    def _guard_plain_step(self) -> None:
        """Under ZeRO-0 in fp32 DeepSpeed calls the plain optimizer and would let Inf into the weights.

        The gradients are already reduced, so every rank sees the same norm and takes the same branch.
        """
        plain_step = self._optimizer.step
        parameters = [parameter for group in self._own_groups for parameter in group["params"]]

        def step_if_finite(*args, **kwargs):
            norm = self._engine.get_global_grad_norm()
            if norm is None:  # DeepSpeed takes the norm only where it clips
                norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            self._plain_norm = float(norm)
            self._refused = not math.isfinite(self._plain_norm)
            if not self._refused:
                plain_step(*args, **kwargs)

        self._optimizer.step = step_if_finite

    def save(self, folder: Path) -> None:
        # DeepSpeed's save is full of barriers: a rank whose disk is full must go through all of them before it raises,
        # or its peers wait for it.
        writer, failures = self._engine.checkpoint_engine, []
        write = writer.save

        def write_or_remember(*args, **kwargs):
            try:
                return write(*args, **kwargs)
            except Exception as error:
                failures.append(error)

        writer.save = write_or_remember
        try:
            names = {id(parameter): name for name, parameter in self.model.named_parameters()}
            groups = [[names.get(id(p), "") for p in group["params"]] for group in self._own_groups]
            state = {"optimizer_param_names": groups} if self.stage == 0 else {}
            self._engine.save_checkpoint(str(folder), tag=TAG, client_state=state, save_latest=False)
        finally:
            del writer.save
        if failures:
            raise failures[0]

    def load(self, folder: Path) -> None:
        path, _ = self._engine.load_checkpoint(str(folder), tag=TAG)
        if path is None:
            raise UserError(
                f"a DeepSpeed checkpoint in {folder / TAG}", "DeepSpeed loaded nothing", "pass a whole checkpoint"
            )

    def describe(self) -> str:
        return f"deepspeed ZeRO-{self.stage}"


def import_deepspeed():
    """DeepSpeed, recent enough and quiet, with the op left out that is compiled at start.

    The shared-memory op saves a little time in reductions between ranks of one CPU node; building it takes minutes,
    and a killed build leaves a lock on which every later start waits for ever. gloo does the same work without it.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    found = tuple(int(part) for part in deepspeed.__version__.split("+")[0].split(".")[:3])
    if found < MINIMUM_VERSION:
        raise UserError(
            f"deepspeed >= {'.'.join(map(str, MINIMUM_VERSION))} (older ones step on NaN under ZeRO-1, 2 or 3)",
            f"deepspeed {deepspeed.__version__}",
            "pip install -c constraints.txt deepspeed",
        )
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # torch renames a collective that DeepSpeed calls: nothing that a user of mmldlm could change.
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*deprecated", category=FutureWarning)
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
