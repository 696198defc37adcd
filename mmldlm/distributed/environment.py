"""Rank, world size, address and device of this process, from the environment of its launcher:
torchrun, DeepSpeed, MPI or Slurm; and the environment that NCCL reads.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mmldlm.errors import UserError
from mmldlm.utils.environment import (
    check_platform_variables,
    check_rank_variables,
    int_from_env,
)
from mmldlm.utils.formatting import count_noun, describe_os_error
from mmldlm.utils.gpus import VISIBLE, count_visible_gpus
from mmldlm.utils.network import free_port

if TYPE_CHECKING:  # `mmldlm launch` starts without torch
    import torch


def rank_environment() -> tuple[int, int, int]:
    """Rank, local rank and world size set by the launcher (0, 0, 1 without one)."""
    return int_from_env("RANK", 0), int_from_env("LOCAL_RANK", 0), int_from_env("WORLD_SIZE", 1)


def hidden_gpu_note() -> str | None:
    """Return a warning if this machine has GPUs, or CUDA_VISIBLE_DEVICES names one, and torch can
    use none: the run would train on the CPU.
    """
    import torch

    visible = os.environ.get(VISIBLE)
    if torch.cuda.is_available():
        return None
    if visible is None and (num_gpus := count_visible_gpus()):
        return (
            f"{count_noun(num_gpus, 'GPU')} on {socket.gethostname()}, and torch can use none (a"
            " driver too old for torch's CUDA or not ready, or a torch for CPUs; `mmldlm preflight"
            " --level 1` looks for the cause): training on the CPU"
        )
    if (visible or "").strip() in ("", "-1", "NoDevFiles", "none", "void"):
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
    import torch

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


# Set by Open MPI, by MPICH and Intel MPI (PMI), and by PMIx launchers.
_MPI_RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def set_env_from_mpi() -> None:
    """Set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from MPI when mpirun started
    this process.

    Does nothing under another launcher. Variables that are already set stay: DeepSpeed's own
    discovery would overwrite an exported MASTER_ADDR. The one of rank 0 is the default of the
    others; without it, rank 0 looks up the name of its host, if there are others. mpi4py is
    imported here only, because it needs a libmpi.

    Raises:
        UserError: mpi4py, or the libmpi that it loads, is missing; on all ranks: rank 0 has no
            address that other hosts reach.
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
    is_first, has_other_hosts = world.Get_rank() == 0, world.Get_size() > node.Get_size()
    address, port, problem = world.bcast(
        _mpi_master(has_other_hosts) if is_first else None, root=0
    )
    if problem:
        raise UserError(
            "an address of rank 0's host for the other ranks",
            problem,
            "name it by mpirun -x MASTER_ADDR=ADDRESS, or give the host's name its address in"
            " /etc/hosts",
        )
    variables = {
        "RANK": world.Get_rank(),
        "LOCAL_RANK": node.Get_rank(),
        "LOCAL_WORLD_SIZE": node.Get_size(),
        "WORLD_SIZE": world.Get_size(),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    for name, value in variables.items():
        os.environ.setdefault(name, str(value))


def _mpi_master(has_other_hosts: bool) -> tuple[str, str, str]:
    """Return MASTER_ADDR and MASTER_PORT of this process, which is rank 0, with defaults; and what
    is wrong with the address, or "".
    """
    address, host = os.environ.get("MASTER_ADDR", ""), socket.gethostname()
    port = os.environ.get("MASTER_PORT") or str(free_port(""))
    source = f"MASTER_ADDR={address}"
    if not address and not has_other_hosts:
        return "127.0.0.1", port, ""
    if not address:
        try:
            address = socket.gethostbyname(host)
        except OSError as error:
            return "", port, f"its name {host} does not resolve there ({describe_os_error(error)})"
        source = f"its name {host} is {address} there"
    is_loopback = has_other_hosts and address.startswith("127.")
    return address, port, f"{source}, which no other host reaches" if is_loopback else ""


# Variables of (rank, number of ranks) of launchers that set neither RANK nor an address of rank 0.
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

    Sets nothing if RANK is set, and checks the launcher's variables in any case. Each of several
    processes would otherwise train as if it were alone.

    Raises:
        UserError: a variable is not a valid number, or another launcher started several processes
            without RANK.
    """
    if "RANK" not in os.environ:
        if _started_by_srun():
            _set_env_from_slurm()
        # A single task of srun may have variables of PMI.
        elif not _is_single_task_of_srun():
            set_env_from_mpi()
    check_rank_environment()


def check_rank_environment() -> None:
    """Check what the launcher states.

    Raises:
        UserError: a variable is not a valid number, RANK is the number of a node, or several
            processes were started without RANK.
    """
    check_rank_variables()
    check_platform_variables()
    if os.environ.get("RANK", "").strip():
        return
    size = int_from_env("WORLD_SIZE", 1)
    started: list[tuple[str, object]] = [("WORLD_SIZE", size)] if size > 1 else []
    for rank_name, size_name in _OTHER_LAUNCHERS:
        rank, num_ranks = (os.environ.get(name, "") for name in (rank_name, size_name))
        if rank_name == "SLURM_PROCID" and not _started_by_srun():
            continue  # a batch script or a shell in an allocation
        if rank.isdigit() and (int(rank) > 0 or (num_ranks.isdigit() and int(num_ranks) > 1)):
            started.append((rank_name, f"{rank} of {num_ranks or 'unknown'}"))
    if started:
        listed = ", ".join(f"{name}={value}" for name, value in started)
        raise UserError(
            "RANK for each of several processes",
            f"{listed} without RANK",
            "set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process"
            " (launchers/slurm.sh shows how), or start with torchrun, mpirun or mmldlm launch",
        )


def check_single_process(command: str) -> None:
    """Refuse a command that starts ranks itself, in each of several processes that srun started.

    Raises:
        UserError: srun started several processes, or the shell is that of a platform with several
            nodes.
    """
    check_platform_variables()
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
    # In a shell of an allocation, which has no RANK, these count other processes.
    values = (os.environ.get(name, "") for name in names if "RANK" in os.environ)
    return max(next((int(value) for value in values if value.isdigit()), 1), local_rank + 1)


# -- Slurm ----------------------------------------------------------------------------------------


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
    num_local = _slurm_size() if num_nodes == "1" else _tasks_on_this_node()
    if num_local is not None:
        environment.setdefault("LOCAL_WORLD_SIZE", str(num_local))
    address = "127.0.0.1" if num_nodes == "1" else first_host(nodes)
    environment.setdefault("MASTER_ADDR", address)
    environment.setdefault("MASTER_PORT", str(slurm_port()))
    environment.update(
        RANK=environment["SLURM_PROCID"], LOCAL_RANK=local_rank, WORLD_SIZE=str(_slurm_size())
    )


def slurm_port() -> int:
    """Return the port for the ranks of this job and step of Slurm: jobs may share nodes."""
    job, step = (
        int(re.sub(r"\D", "", os.environ.get(f"SLURM_{name}_ID", "")) or 0)
        for name in ("JOB", "STEP")
    )
    return _PORTS[(job * 31 + step) % len(_PORTS)]


def _tasks_on_this_node() -> int | None:
    """Return the number of this step's tasks on this node, from Slurm's list for all nodes, in
    which "4(x2),3" is 4, 4 and 3; None where there is none.
    """
    node, listed = (
        os.environ.get(f"SLURM_{name}", "") for name in ("NODEID", "STEP_TASKS_PER_NODE")
    )
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", listed)
    counts = [int(tasks) for tasks, times in groups for _ in range(int(times or 1))]
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list, for example n007 of "n[007-012,20],m1"."""
    name, depth = "", 0
    for letter in nodes:
        if letter == "," and depth == 0:
            break
        depth += (letter == "[") - (letter == "]")
        name += letter
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", name)


# Every spelling that torch 2.13 reads, the current one first (torch/csrc/distributed/c10d/*.hpp).
_FLIGHT_BUFFER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
FLIGHT_RECORDER_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
_BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
_MONITORING = "TORCH_NCCL_ENABLE_MONITORING"
_HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"

# Seconds, torch's own default: a CUDA call that blocks the watchdog longer hangs.
_MAX_HEARTBEAT = 480
_FALSE = ("0", "n", "no", "f", "false")


def prepare_environment(timeout: float, logs: Path | None = None) -> list[str]:
    """Set what NCCL and torch read when the process group starts. Variables that the user has set
    stay.

    Call it before init_process_group. gloo reads no time limit from the environment
    (`process_group.limit_collectives`).

    Args:
        timeout: Time limit in seconds (engine.collective_timeout).
        logs: Folder for the flight recorder's files, created here because torch does not create
            it.

    Returns:
        One warning per setting of the user that lets a hang outlast timeout.
    """
    # The last collectives of every rank, with their stacks: the only record of which rank did not
    # join one.
    _default(_FLIGHT_BUFFER, "2000")
    _default(("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1")
    if logs is not None and not _env_value(FLIGHT_RECORDER_FILE):
        # The ranks agree on such an error when they open the run's folder.
        with contextlib.suppress(OSError):
            logs.mkdir(parents=True, exist_ok=True)
        _default(FLIGHT_RECORDER_FILE, str(logs / "flight_rank_"))  # torch adds the rank
    # 3 ends the process when a collective fails or times out, without ncclCommAbort, which can
    # itself hang for ever.
    if not _env_value(_BLOCKING_WAIT):
        _default(_ERROR_HANDLING, "3")
    # The watchdog that enforces the time limit can itself be blocked in a CUDA call: a second
    # thread monitors it.
    _default((_MONITORING,), "1")
    _default((_HEARTBEAT,), str(max(int(min(timeout, _MAX_HEARTBEAT)), 1)))
    return [f"{sentence}; unset it" for sentence in settings_that_prolong_hangs(timeout)]


def settings_that_prolong_hangs(timeout: float) -> list[str]:
    """Return a sentence per variable of the user that lets a hang outlast the time limit."""
    found = []
    heartbeat = os.environ.get(_HEARTBEAT, "0")
    if not heartbeat.isdigit() or int(heartbeat) > max(timeout, _MAX_HEARTBEAT):
        found.append(
            f"{_HEARTBEAT}={heartbeat}: a rank blocked in CUDA ends only after that, "
            f"engine.collective_timeout is {timeout:g} s"
        )
    monitoring = os.environ.get(_MONITORING, "1")
    if monitoring.lower() in _FALSE:
        found.append(f"{_MONITORING}={monitoring}: a blocked NCCL watchdog is not detected")
    handling = _env_value(_ERROR_HANDLING)
    if handling is not None and os.environ[handling] == "0":
        found.append(f"{handling}=0: NCCL neither times out nor reports a dead peer")
    return found


def _env_value(names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in os.environ), None)


def _default(names: tuple[str, ...], value: str) -> None:
    if _env_value(names) is None:
        os.environ[names[0]] = value
