"""The seam between the training loop and what runs its steps."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmldlm.engines.parameter_shards import ParameterShard
from mmldlm.engines.pinned_copy import PinnedSnapshot
from mmldlm.errors import UserError

if TYPE_CHECKING:
    from mmldlm.checkpoints.resume_reader import ResumeReader


class Engine(ABC):
    """forward / backward / step / save / load over some ranks.

    The engine adds gradients up over ranks and micro-batches (it does not average them): a loss is this micro-batch's
    share of the global batch's loss. Master weights, accumulation and reduction are fp32.

    Attributes:
        kind: name in the config. rank, world_size: of this process. device: where its tensors live.
        model: the bare model (parameters may be sharded). module: what to call for a forward pass.
        folders: those below a checkpoint's engine folder that `write` needs; they are there, and every rank has
            written in them, before `state_to_save` is called.
        saves_shards: whether this rank's fragments belong into a checkpoint (False where another rank holds the same).
        loss_scale: what backward multiplies the loss by (fp16); set it before a step's first backward. grad_norm and
            apply take it out again.
    """

    kind: str
    rank: int
    world_size: int
    device: torch.device
    model: nn.Module
    module: nn.Module
    folders: tuple[str, ...] = ()
    saves_shards: bool = True
    loss_scale: float = 1.0

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this micro-batch; call once for each accumulated micro-batch, then `grad_norm`."""

    @abstractmethod
    def grad_norm(self) -> Tensor:
        """Global L2 norm of the accumulated gradients before clipping: 0-d, on the device, the same on every rank, not
        finite where any element is not. Adds no host sync to the engine's own. Collective; call once, then `apply`
        or `discard`."""

    @abstractmethod
    def step(self, lr: float, grad_norm: float) -> None:
        """Clip by this (finite) norm and update the weights with this learning rate. Collective."""

    @abstractmethod
    def discard_gradients(self) -> None:
        """Throw the accumulated gradients away; weights and moments stay as they are. Collective."""

    # -- what this rank holds ----------------------------------------------------------------------------------------

    @abstractmethod
    def parameter_shards(self) -> list[ParameterShard]:
        """The pieces of fp32 master weights that this rank updates; over all ranks they cover every trainable one."""

    @abstractmethod
    def frozen_fragments(self) -> list[ParameterShard]:
        """The pieces of frozen weights that this rank holds, in the dtype the engine keeps them."""

    @abstractmethod
    def optimizer_state(self) -> dict[Tensor, dict[str, Any]]:
        """The inner AdamW's state by the tensor that it updates (Fragment.owner)."""

    @abstractmethod
    def sync_weights_from_masters(self) -> None:
        """Bring the weights that the model computes with up to date with changed masters. Collective."""

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @abstractmethod
    def snapshot_state(self, folder: Path, step: int) -> Any:
        """What this rank must write below folder, for `write`; its tensors may be live ones. Collective."""

    def copy_to_host(self, state: Any) -> Any:
        """state with its tensors copied into host memory of our own, so that training can go on while it is written."""
        if not hasattr(self, "_host_copy"):
            self._host_copy = PinnedSnapshot()
        return self._host_copy(state)

    def write(self, state: Any, folder: Path) -> None:
        """Write what state_to_save gave; touches no live tensor, so it may run in a thread of its own."""
        for name, values in state:
            torch.save(values, folder / name)  # a folder that is gone is not made again: what lay in it is lost

    def reset_after_failed_save(self) -> None:
        """After a checkpoint that some rank could not write: be ready for the next. Collective."""
        return

    def load(self, reader: ResumeReader, applied_steps: int) -> None:
        """Take weights, moments and buffers from a checkpoint of any engine, stage and world size.

        Reads only what this rank holds; call masters_written() on every rank when all ranks have read.

        Args:
            reader: mmldlm.checkpoints.resume_reader.TrainingStateReader. applied_steps: AdamW's step count.

        Raises:
            UserError: a damaged file.
        """
        fragments = self.parameter_shards()
        with torch.no_grad():
            for fragment in [*fragments, *self.frozen_fragments()]:
                values = reader.read(fragment.name, "weight", fragment.start, fragment.count)
                fragment.of(fragment.owner).copy_(torch.from_numpy(values))
            for name, buffer in persistent_buffers(self.model).items():
                values = reader.read(name, "weight", 0, buffer.numel())
                buffer.copy_(torch.from_numpy(values).view(buffer.shape))
            states = self.optimizer_state()
            for owner in {id(fragment.owner): fragment.owner for fragment in fragments}.values():
                states[owner] = self._fresh_state(owner, applied_steps) if applied_steps else {}
            if applied_steps:
                for fragment in fragments:
                    for what in ("exp_avg", "exp_avg_sq"):
                        values = reader.read(fragment.name, what, fragment.start, fragment.count)
                        fragment.of(states[fragment.owner][what]).copy_(torch.from_numpy(values))

    @staticmethod
    def _fresh_state(owner: Tensor, applied_steps: int) -> dict[str, Tensor]:
        """AdamW's state of one tensor; fused AdamW keeps its step count beside the tensor."""
        step = torch.tensor(float(applied_steps), dtype=torch.float32, device=owner.device)
        return {"step": step, "exp_avg": torch.zeros_like(owner), "exp_avg_sq": torch.zeros_like(owner)}

    # -- agreement ---------------------------------------------------------------------------------------------------

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum a small tensor over the ranks, in place."""
        if self.world_size > 1:
            torch.distributed.all_reduce(values)
        return values

    def sum_on_host(self, values: Tensor) -> list[float]:
        """Sum a small vector over the ranks and read it. Makes the host wait: with NCCL this is where a rank stands
        while others are late, and last_words.standing_place knows it by its name."""
        return self.all_reduce_sum(values).tolist()

    def to_device(self, numbers: Sequence[float]) -> Tensor:
        """Numbers of the host as a float64 vector on the device, without waiting for the device."""
        on_host = torch.tensor(numbers, dtype=torch.float64, pin_memory=self.device.type == "cuda")
        return on_host.to(self.device, non_blocking=True)

    def gather_messages(self, text: str | None) -> list[str]:
        """What the ranks that have something to say say, with rank and host, on every rank. Collective."""
        found = [None if text is None else f"rank {self.rank} on {socket.gethostname()}: {text}"]
        if self.world_size > 1:
            own, found = found[0], [None] * self.world_size
            torch.distributed.all_gather_object(found, own)
        return [said for said in found if said is not None]

    def all_agree(self, ok: bool) -> bool:
        """True when every rank says True."""
        return ok if self.world_size == 1 else self.sum_on_host(self.to_device([not ok])) == [0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_agree(True)

    def describe(self) -> str:
        """One phrase for the screen and the manifest."""
        return self.kind


class Autocast(nn.Module):
    """Calls a module under torch.autocast: fp32 weights, matrix products in dtype, fp32 gradients."""

    def __init__(self, module: nn.Module, device_type: str, dtype: torch.dtype):
        super().__init__()
        self.module, self.device_type, self.dtype = module, device_type, dtype

    def forward(self, *args, **kwargs):
        with torch.autocast(self.device_type, self.dtype):
            return self.module(*args, **kwargs)


def compute_dtype(name: str) -> torch.dtype:
    """training.dtype as torch's."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong into a checkpoint, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def tied_names(model: nn.Module) -> dict[str, str]:
    """Second name -> first name of parameters that several modules share."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def rank_environment() -> tuple[int, int, int]:
    """rank, local rank and world size that the launcher put into the environment (0, 0, 1 without one)."""
    environ = os.environ
    return int(environ.get("RANK", 0)), int(environ.get("LOCAL_RANK", 0)), int(environ.get("WORLD_SIZE", 1))


def local_world_size(local_rank: int) -> int:
    """Ranks on this machine, as torchrun, DeepSpeed, Slurm or Open MPI tell; at least as many as this rank knows of."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    told = (os.environ.get(name, "") for name in names if "RANK" in os.environ)  # not of a shell in an allocation
    return max(next((int(number) for number in told if number.isdigit()), 1), local_rank + 1)


def pick_device(local_rank: int) -> torch.device:
    """This rank's GPU, or the CPU where there is none.

    Raises:
        UserError: on all ranks of a machine that shows its ranks fewer GPUs than they are.
    """
    if torch.cuda.is_available():
        ranks, found = local_world_size(local_rank), torch.cuda.device_count()
        if ranks > found:
            shown = os.environ.get("CUDA_VISIBLE_DEVICES")
            raise UserError(
                f"a GPU for each of the {ranks} ranks on {socket.gethostname()}",
                f"{found} GPU(s) that this rank may use{'' if shown is None else f' (CUDA_VISIBLE_DEVICES={shown})'}",
                "start fewer ranks on this machine, or let every rank see all its GPUs (Slurm: --gpus-per-node, not "
                "--gpus-per-task)",
            )
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")
