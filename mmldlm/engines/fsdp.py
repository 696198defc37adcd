"""PyTorch FSDP2 (fully_shard): weights, gradients and optimizer cut over the ranks, block by block."""

from __future__ import annotations

import json
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mmldlm.config.schema import Config
from mmldlm.engines.base import compute_dtype, persistent_buffers, pick_device, rank_environment, tied_names
from mmldlm.engines.deepspeed.engine import start_process_group
from mmldlm.engines.parameter_plan import ParameterPlan
from mmldlm.engines.parameter_shards import ParameterShard, dim0_shard
from mmldlm.engines.torch_engine import TorchEngine

TRAINABLE = "trainable.json"


class FsdpEngine(TorchEngine):
    """fp32 shards; each block's weights are gathered (in bf16 when asked) while it runs, gradients reduced in fp32.

    With engine.replicas = R, groups of world size / R ranks shard the model and R groups hold copies (HSDP).
    """

    kind = "fsdp"

    def __init__(self, model: nn.Module, config: Config, plan: ParameterPlan):
        self.rank, local_rank, self.world_size = rank_environment()
        self.device, self.replicas = pick_device(local_rank), config.engine.replicas
        start_process_group(self.device, config.engine.timeout)
        shards = self.world_size // self.replicas
        if self.replicas == 1:
            mesh = init_device_mesh(self.device.type, (shards,), mesh_dim_names=("shard",))
        else:
            mesh = init_device_mesh(self.device.type, (self.replicas, shards), mesh_dim_names=("replicate", "shard"))
        self.saves_shards = self.rank < shards
        # Timesteps come in fp32 and stay so until the model casts its sinusoids: inputs are not FSDP's to cast.
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        dtype = compute_dtype(config.training.dtype)
        if dtype != torch.float32:
            policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        # The model returns slices of larger tensors; nobody changes them in place.
        warnings.filterwarnings("ignore", message=".*returned a view tensor", category=UserWarning)
        model.to(self.device)
        for unit in plan.sharding_units:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self.module = model
        self._setup(model, config, plan)
        self._patience = timedelta(seconds=config.checkpoints.save_timeout)
        self.reset_after_failed_save()

    def reset_after_failed_save(self) -> None:
        # A checkpoint is written in a thread while training goes on: its collectives need a group of their own. One in
        # which a collective failed stays broken.
        self._writers = torch.distributed.new_group(backend="gloo", timeout=self._patience)

    def _sync_gradients(self, sync: bool) -> None:
        self.module.set_requires_gradient_sync(sync)
        self.module.set_is_last_backward(sync)

    @staticmethod
    def _fragment(name: str, parameter: Tensor) -> ParameterShard:
        return dim0_shard(name, parameter)

    def snapshot_state(self, folder: Path, step: int) -> Any:
        state = self.optimizer.state
        names = {self._names[id(p)]: p for p in self._parameters()}
        moments = {
            what: {name: state[p][what] for name, p in names.items() if state[p]} for what in ("exp_avg", "exp_avg_sq")
        }
        told = {
            "trainable": list(names),
            "buffers": list(persistent_buffers(self.model)),
            "aliases": tied_names(self.model),
            # For `mmldlm convert`: DeepSpeed wants the groups again, DCP keeps no order of them.
            "groups": [
                {
                    "names": [self._names[id(p)] for p in group["params"]],
                    "settings": {key: value for key, value in group.items() if key != "params"},
                }
                for group in self.optimizer.param_groups
            ],
        }
        return {"names": told, "tensors": {"model": dict(self.model.state_dict()), "optim": moments}}

    def write(self, state: Any, folder: Path) -> None:
        """A torch.distributed.checkpoint folder, and beside it which names are trainable, buffers, or tied."""
        # Nothing copied ahead: that loader waits for the present device's stream, and this may be a thread of its own.
        writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
        try:
            dcp.save(state["tensors"], storage_writer=writer, process_group=self._writers)
        except CheckpointException as error:  # a BaseException whose text hides what happened
            rank, (first, _) = next(iter(error.failures.items()))
            raise RuntimeError(f"rank {rank}: {type(first).__name__}: {first}") from error
        if self.rank == 0:  # after it: a rank that failed before would leave the others in its collectives
            (folder / TRAINABLE).write_text(json.dumps(state["names"]) + "\n")

    def describe(self) -> str:
        return "fsdp" if self.replicas == 1 else f"fsdp {self.replicas} replicas"
