"""Started by mpirun: ranks and master from MPI, put where torchrun and deepspeed would have put them."""

from __future__ import annotations

import os
import socket
import sys

from mmldlm.errors import UserError

# Set by Open MPI, by MPICH and Intel MPI (PMI), and by PMIx launchers.
_MPI_RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def set_env_from_mpi() -> None:
    """Set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from MPI when mpirun started this process.

    Does nothing under another launcher. What is already set stays: DeepSpeed's own discovery would overwrite a
    MASTER_ADDR that the user exported. mpi4py is imported here and nowhere else, because it needs a libmpi.

    Raises:
        UserError: mpi4py or the libmpi that it loads is missing.
    """
    if "RANK" in os.environ or not any(name in os.environ for name in _MPI_RANK_NAMES):
        return
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            "mpi4py and the MPI library that mpirun belongs to",
            f"mpi4py cannot be loaded by {sys.executable}: {error}",
            "pip install mpi4py and install a libmpi (Debian: apt-get install libopenmpi3), or start with torchrun",
        ) from error
    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    address, port = world.bcast((socket.gethostbyname(socket.gethostname()), _free_port()), root=0)
    found = {
        "RANK": world.Get_rank(),
        "LOCAL_RANK": node.Get_rank(),
        "WORLD_SIZE": world.Get_size(),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    for name, value in found.items():
        os.environ.setdefault(name, str(value))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
