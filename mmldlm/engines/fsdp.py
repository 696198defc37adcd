"""PyTorch FSDP2 (fully_shard): weights, gradients and optimizer sharded over the ranks, unit by
unit.
"""

from __future__ import annotations

import json
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mmldlm.config.schema import Config
from mmldlm.distributed.environment import pick_device, rank_environment
from mmldlm.distributed.process_group import WRITERS, start_process_group
from mmldlm.engines.base import compute_dtype, persistent_buffers, tied_names
from mmldlm.engines.parameter_plan import ParameterPlan
from mmldlm.engines.shards import ParameterShard, dim0_shard
from mmldlm.engines.torch_engines import TorchEngine
from mmldlm.utils.moments import MOMENTS

TRAINABLE = "trainable.json"


class FsdpEngine(TorchEngine):
    """fp32 shards; each unit's weights are gathered (in bf16 when asked) while it runs, gradients
    reduced in fp32.

    With engine.hsdp_replicas = R, groups of world size / R ranks shard the model and R groups hold
    copies (HSDP). Gradients of accumulated micro-batches are whole until the last of them, unless
    engine.shard_gradients is set.
    """

    kind = "fsdp"
    module: Any  # an nn.Module of which fully_shard has made an FSDPModule, too

    def __init__(self, model: nn.Module, config: Config, plan: ParameterPlan):
        self.rank, local_rank, self.world_size = rank_environment()
        self.device, self.replicas = pick_device(local_rank), config.engine.hsdp_replicas
        start_process_group(self.device, config.engine.collective_timeout)
        shards = self.world_size // self.replicas
        if self.replicas == 1:
            mesh = init_device_mesh(self.device.type, (shards,), mesh_dim_names=("shard",))
        else:
            mesh = init_device_mesh(
                self.device.type, (self.replicas, shards), mesh_dim_names=("replicate", "shard")
            )
        self._shards_gradients = config.engine.shard_gradients
        self._shard_group = mesh.get_group("shard")
        self.saves_shards = self.rank < shards
        # Timesteps are fp32 until the model casts its sinusoids: FSDP must not cast inputs.
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        dtype = compute_dtype(config.training.dtype)
        if dtype != torch.float32:
            policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        # The model returns slices of larger tensors, which are not changed in place.
        warnings.filterwarnings("ignore", message=".*returned a view tensor", category=UserWarning)
        # fully_shard moves each unit from the host: no GPU ever holds the whole model.
        for unit in plan.sharding_units:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self.module = model
        self._setup(model, config, plan)
        self._save_timeout = timedelta(seconds=config.checkpoints.save_timeout)
        self._writers = self._new_writers()

    def _new_writers(self) -> Any:
        # A checkpoint is written in a thread while training continues: its collectives need a
        # separate group.
        return torch.distributed.new_group(
            backend="gloo", timeout=self._save_timeout, group_desc=WRITERS
        )

    def reset_after_failed_save(self) -> None:
        # After a failed collective a group stays broken.
        broken, self._writers = self._writers, self._new_writers()
        torch.distributed.destroy_process_group(broken)

    def _sync_gradients(self, sync: bool) -> None:
        sync = sync or self._shards_gradients
        self.module.set_requires_gradient_sync(sync)
        self.module.set_is_last_backward(sync)

    @staticmethod
    def _shard(name: str, parameter: Any) -> ParameterShard:
        return dim0_shard(name, parameter)

    def process_group(self) -> Any:
        return self._shard_group if self._shard_group.size() > 1 else None

    def snapshot_state(self, folder: Path, step: int) -> Any:
        state = self.optimizer.state
        names = {self._names[id(p)]: p for p in self._parameters()}
        moments = {
            key: {name: state[p][key] for name, p in names.items() if key in state[p]}
            for key in MOMENTS
        }
        metadata = {
            "trainable": list(names),
            "buffers": list(persistent_buffers(self.model)),
            "aliases": tied_names(self.model),
            # `mmldlm convert` reads these: DeepSpeed needs the groups, and DCP does not keep their
            # order.
            "groups": [
                {
                    "names": [self._names[id(p)] for p in group["params"]],
                    "settings": {key: value for key, value in group.items() if key != "params"},
                }
                for group in self.optimizer.param_groups
            ],
        }
        return {
            "names": metadata,
            "tensors": {"model": dict(self.model.state_dict()), "optim": moments},
        }

    def write(self, state: Any, folder: Path) -> list[Path]:
        """Write a torch.distributed.checkpoint folder, and which names are trainable, buffers, or
        tied.
        """
        # No copies ahead: that loader waits for the current device's stream, and this may be a
        # separate thread.
        writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
        try:
            dcp.save(state["tensors"], storage_writer=writer, process_group=self._writers)
        except CheckpointException as error:
            # It is a BaseException whose text hides the cause.
            rank, (first, _) = next(iter(error.failures.items()))
            raise RuntimeError(f"rank {rank}: {type(first).__name__}: {first}") from error
        # This comes last, because a rank that failed here would leave the others in the
        # collectives above.
        if self.rank == 0:
            (folder / TRAINABLE).write_text(json.dumps(state["names"]) + "\n")
        # A rank without a row of any tensor writes none.
        own = folder / f"__{self.rank}_0.distcp"
        return [own] if own.exists() else []

    def describe(self) -> str:
        return "fsdp" if self.replicas == 1 else f"fsdp {self.replicas} replicas"
