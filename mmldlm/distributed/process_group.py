"""Start of the process group."""

from __future__ import annotations

import os
from datetime import timedelta

import torch

from mmldlm.utils.network import free_port


def backend_for(device: torch.device) -> str:
    """NCCL on GPUs, gloo on CPUs."""
    return "nccl" if device.type == "cuda" else "gloo"


def start_process_group(device: torch.device, timeout: float) -> None:
    """Call init_process_group from the launcher's environment (or for this process alone).

    Args:
        device: of this rank.
        timeout: time limit of a collective in seconds.
    """
    if torch.distributed.is_initialized():
        return
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(free_port()))
    torch.distributed.init_process_group(backend_for(device), timeout=timedelta(seconds=timeout))
