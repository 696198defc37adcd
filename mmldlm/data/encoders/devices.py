"""The device of a rank that encodes."""

from __future__ import annotations

import os

from mmldlm.utils.environment import int_from_env
from mmldlm.utils.resources import threads_per_rank


def device_of_rank(local_rank: int) -> str | None:
    """Return the GPU of a rank of this machine; without GPUs None, and the cores are shared among
    the ranks.
    """
    import torch

    if torch.cuda.is_available():
        return f"cuda:{local_rank % torch.cuda.device_count()}"
    if "OMP_NUM_THREADS" not in os.environ:
        local_world_size = int_from_env("LOCAL_WORLD_SIZE", 1)
        torch.set_num_threads(threads_per_rank(local_world_size))
    return None
