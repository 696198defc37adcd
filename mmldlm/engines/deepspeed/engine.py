"""DeepSpeed ZeRO 0 to 3."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmldlm.config.schema import Config
from mmldlm.engines.base import Autocast, Engine, compute_dtype, pick_device, rank_environment, tied_names
from mmldlm.engines.deepspeed.config import CPU_BUCKET, GPU_BUCKET, merged_config, resolve_stage
from mmldlm.engines.deepspeed.overflow_override import OverflowOverride
from mmldlm.engines.deepspeed.zero_partitions import copy_masters_to_model, local_partition, master_shards
from mmldlm.engines.optimizer import build_optimizer, scale_gradients
from mmldlm.engines.parameter_plan import ParameterPlan
from mmldlm.engines.parameter_shards import ParameterShard, full_shard
from mmldlm.errors import UserError

MINIMUM_VERSION = (0, 19, 8)
TAG = "zero"


class DeepSpeedEngine(Engine):
    """The model under deepspeed.initialize, with our AdamW, our learning rate and our loss normalisation."""

    kind = "deepspeed"
    folders = (TAG,)

    def __init__(self, model: nn.Module, config: Config, plan: ParameterPlan):
        deepspeed = import_deepspeed()
        self.rank, local_rank, self.world_size = rank_environment()
        self.device = pick_device(local_rank)
        self.stage = resolve_stage(config)
        bucket = GPU_BUCKET if self.device.type == "cuda" else CPU_BUCKET
        ds_config = merged_config(config, self.world_size, bucket)
        if self.stage == 0:
            ds_config["gradient_clipping"] = 0.0  # apply() clips: DeepSpeed would forget the norm before clipping
        start_process_group(self.device, config.engine.timeout)
        deepspeed.init_distributed(dist_backend=backend_for(self.device), verbose=False)
        self.model = model
        self.saves_shards = self.stage > 0 or self.rank == 0
        optimizer = build_optimizer(model, config.optimizer, plan.no_decay)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        # DeepSpeed replaces the optimizer's parameters by its masters; ZeRO-0 saves those without their names.
        self._own_groups = [{"params": list(group["params"])} for group in optimizer.param_groups]
        dtype = compute_dtype(config.training.dtype)
        rounded = dtype != torch.float32 and self.stage > 0
        exact = {name: p.detach().clone() for name, p in model.named_parameters()} if rounded else {}
        if self.stage == 3:  # a block reads its layers' weights itself: they are gathered together, for the block
            for unit in plan.sharding_units:
                deepspeed.utils.set_z3_leaf_module(unit, True)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)
        self._init_masters_exactly(exact)
        # ZeRO-0 has no 16-bit optimizer with fp32 accumulation; fp32 weights under autocast are the same arithmetic.
        autocast = self.stage == 0 and dtype != torch.float32
        self.module = Autocast(self._engine, self.device.type, dtype) if autocast else self._engine
        self._clip = config.optimizer.grad_clip_norm
        self._own_parameters = [parameter for group in self._own_groups for parameter in group["params"]]
        self._gate = OverflowOverride(self._optimizer, self.stage) if self.stage > 0 else None
        # DeepSpeed averages over ranks and accumulated micro-batches; our losses are shares of a sum.
        self._undo_averaging = self.world_size * config.training.grad_accum_steps

    def _init_masters_exactly(self, exact: dict[str, Tensor]) -> None:
        """DeepSpeed makes its fp32 masters from weights already rounded to 16 bits: put the exact ones there, as every
        other engine starts from them."""
        for fragment in self.parameter_shards() if exact else ():
            values = exact[fragment.name].view(-1)[fragment.start : fragment.start + fragment.count]
            fragment.of(fragment.owner).copy_(values)

    def backward(self, loss: Tensor) -> None:
        if self._gate is not None:
            self._optimizer.loss_scale = self.loss_scale  # its backward multiplies by it, its step divides
            self._engine.backward(loss * self._undo_averaging)
        else:
            self._engine.backward(loss * (self._undo_averaging * self.loss_scale))
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()

    def grad_norm(self) -> Tensor:
        if self._gate is not None:
            return self._gate.grad_norm() / self.loss_scale
        return nn.utils.get_total_norm([p.grad for p in self._own_parameters if p.grad is not None]) / self.loss_scale

    def step(self, lr: float, grad_norm: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if self._gate is not None:
            self._gate.set_skip(False, grad_norm * self.loss_scale)
        else:
            scale_gradients(self._own_parameters, self._clip, grad_norm, self.loss_scale)
        self._engine.step()

    def discard_gradients(self) -> None:
        if self._gate is not None:
            self._gate.set_skip(True, math.inf)
            with _silence_logging():  # it would report the skip once more, in words of its own
                self._engine.step()
            return
        # ZeRO-0 runs the plain optimizer, which knows no refusal.
        plain_step, self._optimizer.step = self._optimizer.step, lambda *args, **kwargs: None
        try:
            self._engine.step()
        finally:
            self._optimizer.step = plain_step

    # -- what this rank holds ----------------------------------------------------------------------------------------

    def parameter_shards(self) -> list[ParameterShard]:
        if self.stage == 0:
            return [full_shard(self._names[id(p)], p) for group in self._own_groups for p in group["params"]]
        return master_shards(self._optimizer, self._engine.param_names, self.stage, self.rank)

    def frozen_fragments(self) -> list[ParameterShard]:
        frozen = [(name, p) for name, p in self.model.named_parameters() if not p.requires_grad]
        if self.stage < 3:
            return [full_shard(name, parameter) for name, parameter in frozen]
        return [local_partition(name, parameter, parameter.ds_tensor, 0, self.rank) for name, parameter in frozen]

    def optimizer_state(self) -> dict[Tensor, dict[str, Any]]:
        return self._optimizer.state if self.stage == 0 else self._optimizer.optimizer.state

    def sync_weights_from_masters(self) -> None:
        if self.stage > 0:
            copy_masters_to_model(self._optimizer, self.stage)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def snapshot_state(self, folder: Path, step: int) -> Any:
        """What DeepSpeed's own save_checkpoint would write: (file below folder, values).

        Its save is full of barriers, with folders made and files written in between; here nothing touches the disk
        until all ranks are through them, so a rank whose disk refuses cannot leave the others waiting.
        """
        writer, files = self._engine.checkpoint_engine, []
        writer.makedirs = lambda path, exist_ok=False: None
        writer.save = lambda state_dict, path: files.append((str(Path(path).relative_to(folder)), state_dict))
        # Scripts of DeepSpeed that rank 0 would copy beside the files; `mmldlm convert` reads them without.
        self._engine._copy_recovery_script = lambda save_path: None
        self._engine.global_steps = step
        try:
            groups = [[self._names[id(p)] for p in group["params"]] for group in self._own_groups]
            state = {"optimizer_param_names": groups, "aliases": tied_names(self.model)} if self.stage == 0 else {}
            self._engine.save_checkpoint(str(folder), tag=TAG, client_state=state, save_latest=False)
        finally:
            del writer.makedirs, writer.save, self._engine._copy_recovery_script
        return files

    def describe(self) -> str:
        return f"deepspeed ZeRO-{self.stage}"


@contextlib.contextmanager
def _silence_logging():
    from deepspeed.utils import logger

    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


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
    # torch renames collectives that DeepSpeed calls: nothing that a user of mmldlm could change.
    renamed = ".*(all_gather_into|reduce_scatter)_tensor.*deprecated"
    warnings.filterwarnings("ignore", message=renamed, category=FutureWarning)
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    from deepspeed.runtime import bf16_optimizer

    bf16_optimizer.see_memory_usage = lambda *args, **kwargs: None  # it prints, whatever the log level
    return deepspeed


def backend_for(device: torch.device) -> str:
    """NCCL on GPUs, gloo on CPUs."""
    return "nccl" if device.type == "cuda" else "gloo"


def start_process_group(device: torch.device, timeout: float) -> None:
    """init_process_group from the launcher's environment (or for this process alone), with our time limit."""
    if torch.distributed.is_initialized():
        return
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(_free_port()))
    torch.distributed.init_process_group(backend_for(device), timeout=timedelta(seconds=timeout))


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
