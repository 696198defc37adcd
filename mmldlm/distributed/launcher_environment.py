"""Numbers of a rank as its launcher states them: RANK, LOCAL_RANK, WORLD_SIZE, the address of rank
0. Without torch.
"""

from __future__ import annotations

import os
import re

from mmldlm.distributed.mpi_environment import set_env_from_mpi
from mmldlm.errors import UserError
from mmldlm.utils.environment import check_rank_variables, int_from_env

# (rank, number of ranks) of launchers that set neither RANK nor an address of rank 0.
_OTHER_LAUNCHERS = (
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),  # LSF's jsrun
    ("PALS_RANKID", "PALS_NRANKS"),
    ("ALPS_APP_PE", "ALPS_APP_SIZE"),  # Cray's aprun
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# Slurm's numbers of the steps that srun did not start: the batch script, an allocation
_FIRST_PSEUDO_STEP = 0xFFFFFFF0
_PORTS = range(20000, 32000)  # below the ports that systems hand out to clients


def set_rank_environment() -> None:
    """Set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT if MPI or srun started this
    process.

    Does nothing if RANK is set. Each of several processes would otherwise train as if it were
    alone.

    Raises:
        UserError: a variable is not a valid number, or another launcher started several processes
            without RANK.
    """
    if "RANK" not in os.environ:
        if _started_by_srun():
            _set_env_from_slurm()
        elif not _is_single_task_of_srun():  # which may have variables of PMI
            set_env_from_mpi()
    check_rank_environment()


def check_rank_environment() -> None:
    """Check what the launcher states.

    Raises:
        UserError: a variable is not a valid number, or several processes were started without
            RANK.
    """
    check_rank_variables()
    if os.environ.get("RANK", "").strip():
        return
    size = int_from_env("WORLD_SIZE", 1)
    found: list[tuple[str, object]] = [("WORLD_SIZE", size)] if size > 1 else []
    for rank_name, size_name in _OTHER_LAUNCHERS:
        number, total = (os.environ.get(name, "") for name in (rank_name, size_name))
        if rank_name == "SLURM_PROCID" and not _started_by_srun():
            continue  # a batch script or a shell in an allocation
        if number.isdigit() and (int(number) > 0 or (total.isdigit() and int(total) > 1)):
            found.append((rank_name, f"{number} of {total or 'unknown'}"))
    if found:
        listed = ", ".join(f"{name}={value}" for name, value in found)
        raise UserError(
            "RANK for each of several processes",
            f"{listed} without RANK",
            "set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process"
            " (launchers/slurm.sh shows how), or start with torchrun, mpirun or mmldlm launch",
        )


def check_single_process(command: str) -> None:
    """Refuse a command that starts ranks itself, in each of several processes that srun started.

    Raises:
        UserError: srun started several processes.
    """
    if "RANK" not in os.environ and _started_by_srun():
        raise UserError(
            f"one process of `{command}`, which starts the ranks of a machine itself",
            f"task {os.environ['SLURM_PROCID']} of {_slurm_size()}, started by srun",
            f"srun -n 1 {command} ..., or one rank per task: sbatch launchers/slurm.sh, or srun"
            " python mmldlm/train.py",
        )


def local_world_size(local_rank: int) -> int:
    """Number of ranks on this machine, set by torchrun, DeepSpeed, Slurm or Open MPI; at least
    local_rank + 1.
    """
    names = (
        "LOCAL_WORLD_SIZE",
        "LOCAL_SIZE",
        "SLURM_NTASKS_PER_NODE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )
    values = (
        os.environ.get(name, "") for name in names if "RANK" in os.environ
    )  # not of a shell in an allocation
    return max(next((int(value) for value in values if value.isdigit()), 1), local_rank + 1)


# -- Slurm
# -------------------------------------------------------------------------------------------------


def _slurm_size() -> int:
    sizes = (
        os.environ.get(name, "")
        for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    )
    return next((int(size) for size in sizes if size.isdigit()), 1)


def _started_by_srun() -> bool:
    """Return whether srun started this process as one of several."""
    # A batch script has SLURM_PROCID=0 and SLURM_NTASKS too, and no step.
    return _is_task_of_srun() and (
        os.environ["SLURM_PROCID"] != "0" or (_step().isdigit() and _slurm_size() > 1)
    )


def _is_single_task_of_srun() -> bool:
    return _is_task_of_srun() and _step().isdigit() and _slurm_size() == 1


def _is_task_of_srun() -> bool:
    """Return whether this may be a task of srun; not a process of mpirun, whose daemons srun
    starts.
    """
    rank = os.environ.get("SLURM_PROCID", "")
    if not rank.isdigit() or (_step().isdigit() and int(_step()) >= _FIRST_PSEUDO_STEP):
        return False
    return "OMPI_COMM_WORLD_RANK" not in os.environ and os.environ.get("PMI_RANK", rank) == rank


def _step() -> str:
    return os.environ.get("SLURM_STEP_ID", os.environ.get("SLURM_STEPID", ""))


def _set_env_from_slurm() -> None:
    environment = os.environ
    local_rank = environment.get("SLURM_LOCALID", "")
    if not local_rank.isdigit():
        return  # check_rank_environment refuses
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    num_nodes = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or ""
    if num_nodes != "1" and not nodes:
        return
    if num_nodes == "1":
        environment.setdefault("LOCAL_WORLD_SIZE", str(_slurm_size()))
    address = "127.0.0.1" if num_nodes == "1" else first_host(nodes)
    job, step = (
        int(re.sub(r"\D", "", environment.get(f"SLURM_{name}_ID", "")) or 0)
        for name in ("JOB", "STEP")
    )
    environment.setdefault("MASTER_ADDR", address)
    environment.setdefault("MASTER_PORT", str(_PORTS[(job * 31 + step) % len(_PORTS)]))
    environment.update(
        RANK=environment["SLURM_PROCID"], LOCAL_RANK=local_rank, WORLD_SIZE=str(_slurm_size())
    )


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list, for example n007 of "n[007-012,20],m1"."""
    name, depth = "", 0
    for letter in nodes:
        if letter == "," and depth == 0:
            break
        depth += (letter == "[") - (letter == "]")
        name += letter
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", name)
