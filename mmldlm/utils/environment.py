"""Numbers in environment variables, which launchers, schedulers and users set; standard library
only.
"""

from __future__ import annotations

import os

from mmldlm.errors import UserError

# What mmldlm, torch and DeepSpeed parse when a rank starts: name -> (least, largest value).
_OF_A_RANK = {
    "WORLD_SIZE": (1, 1 << 30),
    "RANK": (0, 1 << 30),
    "LOCAL_RANK": (0, 1 << 20),
    "LOCAL_WORLD_SIZE": (1, 1 << 20),
    "GROUP_RANK": (0, 1 << 20),
    "MASTER_PORT": (0, 65_535),
    "SLURM_RESTART_COUNT": (0, 1 << 30),
    "DEEPSPEED_TIMEOUT": (1, 1 << 20),
}


def int_from_env(name: str, default: int) -> int:
    """Return the whole number in an environment variable; `default` where it is not set or empty.

    Raises:
        UserError: it holds something else; the error names the variable.
    """
    low, high = _OF_A_RANK.get(name, (0, 1 << 62))
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20 and low <= int(text) <= high):
        raise UserError(
            f"a whole number from {low} to {high} in the environment variable {name}",
            f"{name}={os.environ[name]}",
            f"unset {name}, or start the ranks with a launcher that sets it (mmldlm train,"
            " torchrun, deepspeed)",
        )
    return int(text)


def check_rank_variables() -> None:
    """Check every variable that is parsed when a rank starts, also those that torch and DeepSpeed
    read.

    Raises:
        UserError: one of them holds no such number, or a rank is not below the number of ranks.
    """
    for name in _OF_A_RANK:
        int_from_env(name, 0)
    for name, size_name in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        # torchrun and mpirun set all of them; DeepSpeed sets no LOCAL_WORLD_SIZE.
        rank, size = (
            int_from_env(name, 0),
            int_from_env(size_name, 1 if name == "RANK" else 1 << 30),
        )
        if rank >= size:
            raise UserError(
                f"{name} below {size_name}={size}",
                f"{name}={rank}",
                "unset both, or start the ranks with a launcher that sets them (mmldlm train,"
                " torchrun, deepspeed)",
            )
