"""Environment of a rank started by mpirun: set what torchrun and deepspeed would set, from MPI."""

from __future__ import annotations

import os
import socket
import sys

from mmldlm.errors import UserError
from mmldlm.utils.network import free_port

# Set by Open MPI, by MPICH and Intel MPI (PMI), and by PMIx launchers.
_MPI_RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def set_env_from_mpi() -> None:
    """Set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from MPI when mpirun started
    this process.

    Does nothing under another launcher. Variables that are already set stay: DeepSpeed's own
    discovery would overwrite an exported MASTER_ADDR. mpi4py is imported here only, because it
    needs a libmpi.

    Raises:
        UserError: mpi4py, or the libmpi that it loads, is missing.
    """
    if "RANK" in os.environ or not any(name in os.environ for name in _MPI_RANK_NAMES):
        return
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            "mpi4py and the MPI library of mpirun",
            f"mpi4py cannot be loaded by {sys.executable}: {error}",
            "pip install mpi4py and install a libmpi (Debian: apt-get install libopenmpi3), or"
            " start with torchrun",
        ) from error
    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    address, port = world.bcast(
        (socket.gethostbyname(socket.gethostname()), free_port("")), root=0
    )
    variables = {
        "RANK": world.Get_rank(),
        "LOCAL_RANK": node.Get_rank(),
        "WORLD_SIZE": world.Get_size(),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    for name, value in variables.items():
        os.environ.setdefault(name, str(value))
