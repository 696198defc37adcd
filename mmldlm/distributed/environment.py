"""Rank, world size and device of this process, from the launcher's environment."""

from __future__ import annotations

import os
import socket

import torch

from mmldlm.distributed.launcher_environment import local_world_size
from mmldlm.errors import UserError
from mmldlm.utils.environment import int_from_env


def rank_environment() -> tuple[int, int, int]:
    """Rank, local rank and world size set by the launcher (0, 0, 1 without one)."""
    return int_from_env("RANK", 0), int_from_env("LOCAL_RANK", 0), int_from_env("WORLD_SIZE", 1)


def hidden_gpu_note() -> str | None:
    """Return a warning if CUDA_VISIBLE_DEVICES names a GPU and none can be used: the run would
    train on the CPU.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if torch.cuda.is_available() or visible in ("", "-1", "NoDevFiles", "none", "void"):
        return None
    return (
        f"CUDA_VISIBLE_DEVICES={visible} names a GPU, and torch can use none (its number, the"
        " driver, or a torch for CPUs): training on the CPU"
    )


def pick_device(local_rank: int) -> torch.device:
    """This rank's GPU, or the CPU if there is none.

    Raises:
        UserError: on all ranks of a machine with fewer visible GPUs than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    num_ranks, num_gpus = local_world_size(local_rank), torch.cuda.device_count()
    if num_ranks > num_gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise UserError(
            f"a GPU for each of the {num_ranks} ranks on {socket.gethostname()}",
            f"{num_gpus} visible"
            f" GPU(s){'' if visible is None else f' (CUDA_VISIBLE_DEVICES={visible})'}",
            "start fewer ranks on this machine, or let every rank see all its GPUs (Slurm:"
            " --gpus-per-node, not --gpus-per-task)",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
