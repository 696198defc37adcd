"""The engine of DeepSpeed ZeRO 0 to 3."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmldlm.config.schema import Config
from mmldlm.distributed.collectives import gather_objects
from mmldlm.distributed.environment import pick_device, rank_environment
from mmldlm.distributed.process_group import backend_for, start_process_group
from mmldlm.engines.base import Autocast, Engine, StateReader, compute_dtype, tied_names
from mmldlm.engines.deepspeed_config import (
    CPU_BUCKET,
    GPU_BUCKET,
    check_fp16,
    merged_config,
    resolve_stage,
)
from mmldlm.engines.deepspeed_shards import (
    copy_masters_to_model,
    keep_until_reduced,
    local_partition,
    master_shards,
    zero_gradients,
)
from mmldlm.engines.deepspeed_step import StepControl
from mmldlm.engines.optimizer import build_optimizer, scale_gradients, set_learning_rate
from mmldlm.engines.parameter_plan import ParameterPlan
from mmldlm.engines.shards import ParameterShard, full_shard
from mmldlm.errors import UserError

MINIMUM_VERSION = (0, 19, 8)
TAG = "zero"


class DeepSpeedEngine(Engine):
    """The model under deepspeed.initialize, with our AdamW, learning rate and loss
    normalization.
    """

    kind = "deepspeed"
    folders = (TAG,)

    def __init__(self, model: nn.Module, config: Config, plan: ParameterPlan):
        deepspeed = import_deepspeed()
        self.rank, local_rank, self.world_size = rank_environment()
        self.device = pick_device(local_rank)
        self.stage = resolve_stage(config)
        check_fp16(config, deepspeed.accelerator.get_accelerator().is_fp16_supported() or False)
        bucket = GPU_BUCKET if self.device.type == "cuda" else CPU_BUCKET
        ds_config = merged_config(config, self.world_size, bucket)
        if self.stage == 0:
            # `step` clips the gradients: DeepSpeed would not report the norm before clipping.
            ds_config["gradient_clipping"] = 0.0
        start_process_group(self.device, config.engine.collective_timeout)
        deepspeed.init_distributed(dist_backend=backend_for(self.device), verbose=False)
        self.model = model
        self.saves_shards = self.stage > 0 or self.rank == 0
        self.steps_one_by_one = self.stage > 0
        optimizer = build_optimizer(model, plan, config.optimizer)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        # DeepSpeed replaces the optimizer's parameters by its masters, and ZeRO-0 saves those
        # without their names.
        self._own_groups = [{"params": list(group["params"])} for group in optimizer.param_groups]
        dtype = compute_dtype(config.training.dtype)
        is_rounded = dtype != torch.float32 and self.stage > 0
        exact = {}
        if is_rounded:
            exact = {name: p.detach().clone() for name, p in model.named_parameters()}
        # A unit reads the weights of its layers directly, so that they are gathered together, for
        # the unit.
        if self.stage == 3:
            for unit in plan.sharding_units:
                deepspeed.utils.set_z3_leaf_module(unit, True)
        if self.world_size > 1:
            check_same_hooks(model)
        self._engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=ds_config
        )
        self._init_masters_exactly(exact)
        if self.stage == 2:
            keep_until_reduced(self.optimizer)
        # ZeRO-0 has no 16-bit optimizer with fp32 accumulation; fp32 weights under autocast are
        # the same arithmetic.
        autocast = self.stage == 0 and dtype != torch.float32
        self.module = Autocast(self._engine, self.device.type, dtype) if autocast else self._engine
        self._clip = config.optimizer.grad_clip_norm
        self._own_parameters = [
            parameter for group in self._own_groups for parameter in group["params"]
        ]
        self._control = StepControl(self.optimizer, self.stage) if self.stage > 0 else None
        # DeepSpeed averages over ranks and accumulated micro-batches, but losses are terms of a
        # sum.
        self._undo_averaging = self.world_size * config.training.grad_accum_steps

    def _init_masters_exactly(self, exact: dict[str, Tensor]) -> None:
        """Overwrite DeepSpeed's fp32 masters, made from weights rounded to 16 bits, with the exact
        weights.

        Every other engine starts from the exact weights, too.
        """
        for shard in self.parameter_shards() if exact else ():
            values = exact[shard.name].view(-1)[shard.start : shard.start + shard.count]
            shard.slice_of(shard.owner).copy_(values)

    def backward(self, loss: Tensor) -> None:
        if self._control is not None:
            # DeepSpeed's backward multiplies by it, and its step divides by it.
            self.optimizer.loss_scale = self.loss_scale
            self._engine.backward(loss * self._undo_averaging)
        else:
            self._engine.backward(loss * (self._undo_averaging * self.loss_scale))
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()  # counts the micro-batch; updates nothing before the last one

    def grad_norm(self) -> Tensor:
        if self._control is not None:
            return self._control.grad_norm() / self.loss_scale
        return (
            nn.utils.get_total_norm([p.grad for p in self._own_parameters if p.grad is not None])
            / self.loss_scale
        )

    def step(self, lr: float, grad_norm: float) -> None:
        set_learning_rate(self.optimizer, lr)
        if self._control is not None:
            self._control.apply(grad_norm * self.loss_scale)
        else:
            scale_gradients(self._own_parameters, self._clip, grad_norm, self.loss_scale)
        self._engine.step()

    def discard_gradients(self) -> None:
        if self._control is not None:
            self._control.skip()
            with _silence_logging():
                # DeepSpeed would log the skip a second time.
                self._engine.step()
            return
        # ZeRO-0 runs the plain optimizer, which cannot skip a step.
        plain_step = self.optimizer.step
        self.optimizer.step = lambda *args, **kwargs: None
        try:
            self._engine.step()
        finally:
            self.optimizer.step = plain_step

    # -- shards of this rank ----------------------------------------------------------------------

    def parameter_shards(self) -> list[ParameterShard]:
        if self.stage == 0:
            return [
                full_shard(self._names[id(p)], p)
                for group in self._own_groups
                for p in group["params"]
            ]
        return master_shards(self.optimizer, self._engine.param_names, self.stage, self.rank)

    def frozen_shards(self) -> list[ParameterShard]:
        frozen: list[tuple[str, Any]] = [
            (name, p) for name, p in self.model.named_parameters() if not p.requires_grad
        ]
        if self.stage < 3:
            return [full_shard(name, parameter) for name, parameter in frozen]
        return [
            local_partition(name, parameter, parameter.ds_tensor, 0, self.rank)
            for name, parameter in frozen
        ]

    def gradient_shards(self) -> list[tuple[ParameterShard, Tensor | None]]:
        if self.stage == 0:
            return super().gradient_shards()
        flat_gradients = zero_gradients(self.optimizer, self.stage)
        return [
            (shard, flat_gradients[id(shard.owner)].slice(shard.offset, shard.count))
            for shard in self.parameter_shards()
        ]

    def optimizer_state(self) -> dict[Tensor, dict[str, Any]]:
        return self.optimizer.state if self.stage == 0 else self.optimizer.optimizer.state

    def optimizer_groups(self) -> dict[Tensor, dict[str, Any]]:
        if self.stage == 3:
            # An optimizer group holds its sub-groups one after another, and none between steps.
            group_of = self.optimizer.sub_group_to_group_id
            groups = self.optimizer.optimizer.param_groups
            masters = self.optimizer.fp32_partitioned_groups_flat
            return {flat: groups[group_of[index]] for index, flat in enumerate(masters)}
        inner = self.optimizer if self.stage == 0 else self.optimizer.optimizer
        return {owner: group for group in inner.param_groups for owner in group["params"]}

    def sync_weights_from_masters(self) -> None:
        if self.stage > 0:
            copy_masters_to_model(self.optimizer, self.stage)

    # -- checkpoints ------------------------------------------------------------------------------

    def load(self, reader: StateReader, applied_steps: int) -> None:
        # DeepSpeed makes views of the moments at the first step, and again only if told to: in a
        # rollback they would keep the old moments in memory beside the new ones.
        for parameter in self.model.parameters():
            if (mapping := getattr(parameter, "_hp_mapping", None)) is not None:
                mapping.optim_fragment = None
        self.optimizer._hp_optimizer_states_linked = False
        super().load(reader, applied_steps)

    def snapshot_state(self, folder: Path, step: int) -> Any:
        """What DeepSpeed's save_checkpoint would write: (file below folder, values).

        Its save has barriers between creating folders and writing files. Here all ranks pass them
        before any file is written, so a rank with a failing disk cannot leave the others waiting.
        """
        writer, files = self._engine.checkpoint_engine, []
        writer.makedirs = lambda path, exist_ok=False: None
        writer.save = lambda state_dict, path: files.append(
            (str(Path(path).relative_to(folder)), state_dict)
        )
        # Scripts that rank 0 would copy next to the files; `mmldlm convert` does not need them.
        self._engine._copy_recovery_script = lambda save_path: None
        # The training state counts skipped steps; DeepSpeed's own count is wrong after a rollback.
        self._engine.global_steps, self._engine.skipped_steps = step, 0
        try:
            state = {}
            if self.stage == 0:
                names = [[self._names[id(p)] for p in g["params"]] for g in self._own_groups]
                state = {"optimizer_param_names": names, "aliases": tied_names(self.model)}
            self._engine.save_checkpoint(
                str(folder), tag=TAG, client_state=state, save_latest=False
            )
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


def check_same_hooks(model: nn.Module) -> None:
    """Check that every rank has hooks on the same modules. Collective.

    A module with a hook is called where it would otherwise be fused with others, so that its
    gradients become ready in another order; ZeRO-1 and 2 reduce gradients in that order and would
    add those of different parameters.

    Raises:
        UserError: on every rank.
    """
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooked = [
        name or "the model"
        for name, module in model.named_modules()
        if any(getattr(module, k) for k in kinds)
    ]
    first, *others = gather_objects(hooked, torch.distributed.get_world_size())
    for rank, names in enumerate(others, 1):
        if names != first:
            name = min(set(names) ^ set(first))
            ranks = (0, rank) if name in first else (rank, 0)
            raise UserError(
                "module hooks on all ranks or on none",
                f"a hook of {name} on rank {ranks[0]}, none on rank {ranks[1]}",
                "register it on every rank, or use engine.kind=ddp or fsdp",
            )


def _is_not_about_muon(record: logging.LogRecord) -> bool:
    """Drop DeepSpeed's warning of an optimizer that it has not tested: mmldlm has."""
    return "untested optimizer" not in record.getMessage()


def import_deepspeed():
    """Import DeepSpeed: recent enough, quiet, and without the op that is compiled at start.

    The shared-memory op saves little time in reductions between ranks of one CPU node. Building it
    takes minutes, and a killed build leaves a lock on which every later start waits forever. gloo
    does the same work without it.

    Raises:
        UserError: an older DeepSpeed.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    version = tuple(int(part) for part in deepspeed.__version__.split("+")[0].split(".")[:3])
    if version < MINIMUM_VERSION:
        raise UserError(
            f"deepspeed >= {'.'.join(map(str, MINIMUM_VERSION))} (older ones step on NaN under"
            " ZeRO-1, 2 or 3)",
            f"deepspeed {deepspeed.__version__}",
            "pip install -c constraints.txt deepspeed",
        )
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # torch renames collectives that DeepSpeed calls; a user cannot change that.
    renamed = ".*(all_gather_into|reduce_scatter)_tensor.*deprecated"
    warnings.filterwarnings("ignore", message=renamed, category=FutureWarning)
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    logger.addFilter(_is_not_about_muon)
    from deepspeed.runtime import bf16_optimizer, compiler

    # It prints at every log level.
    bf16_optimizer.see_memory_usage = lambda *args, **kwargs: None
    # DeepSpeed asks whether an optimizer is its own Muon, and would load torch's compiler for it.
    compiler.compile = lambda: compiler.dummy_decorator
    return deepspeed
