"""Numbers in environment variables, which launchers, schedulers and users set; standard library
only.
"""

from __future__ import annotations

import os
import sys

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


def platform_variables() -> str:
    """Return RANK and WORLD_SIZE in words where a platform has numbered nodes, not ranks; "" where
    it has not.

    Operators of Kubernetes do so (kubeflow/trainer#1790), and MM-LDLM's guide exported both by
    hand. Whatever starts ranks sets LOCAL_RANK, too.
    """
    if os.environ.get("LOCAL_RANK", "").strip() or not os.environ.get("RANK", "").strip():
        return ""
    size = int_from_env("WORLD_SIZE", 1)
    return f"RANK={os.environ['RANK']}, WORLD_SIZE={size}" if size > 1 else ""


def check_platform_variables() -> None:
    """Refuse to train in a shell of a platform, where one rank would wait for another one that
    nobody starts.

    Raises:
        UserError: `platform_variables`.
    """
    if found := platform_variables():
        raise UserError(
            "LOCAL_RANK beside RANK and WORLD_SIZE, as whatever starts ranks sets it",
            f"{found} without LOCAL_RANK, which a platform sets to number its nodes",
            "start the ranks of every node with bash launchers/multi_node.sh, which reads both;"
            " set LOCAL_RANK=0 if each node runs this one rank; or unset RANK WORLD_SIZE to train"
            " on this machine alone",
        )


def leave_platform(verb: str) -> None:
    """Forget the node's number for a command that runs on one machine, and say so."""
    if found := platform_variables():
        print(
            f"note: {found} without LOCAL_RANK number the nodes of a platform: mmldlm {verb} runs"
            " on this machine alone",
            file=sys.stderr,
        )
        del os.environ["RANK"], os.environ["WORLD_SIZE"]


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
