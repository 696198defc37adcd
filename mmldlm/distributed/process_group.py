"""Start of the process group."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch

from mmldlm.distributed.error_reporting import log_line
from mmldlm.distributed.failure_attribution import FailureReport, report_failed_ranks
from mmldlm.errors import UserError
from mmldlm.utils.formatting import first_line
from mmldlm.utils.job_store import RanksNotConnected, connect_job_store
from mmldlm.utils.network import free_port

WRITERS = "checkpoint writers"
"""Description of a process group that has a time limit of its own."""
# A job may be suspended for as long as this.
_LONGEST_SUSPENSION = timedelta(days=7)


def backend_for(device: torch.device) -> str:
    """NCCL on GPUs, gloo on CPUs."""
    return "nccl" if device.type == "cuda" else "gloo"


def start_process_group(device: torch.device, timeout: float) -> None:
    """Call init_process_group from the launcher's environment (or for this process alone).

    Args:
        device: Device of this rank.
        timeout: Time limit of a collective in seconds.

    Raises:
        RanksNotConnected: the ranks did not find one another in time.
        UserError: GLOO_SOCKET_IFNAME names no interface of this machine.
    """
    if torch.distributed.is_initialized():
        return
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(free_port()))
    backend = backend_for(device)
    if backend == "gloo":
        check_gloo_interfaces()
    try:
        store, rank, world_size = connect_job_store(timeout, log_line)
    except RanksNotConnected as error:
        # To the launch: a node whose launcher died before it had a rank is named by the others.
        report_failed_ranks(FailureReport(f"not all ranks came: {error.found}", error.missing))
        raise
    try:
        torch.distributed.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
            # Without it, NCCL guesses the GPU of a barrier from the global rank, and warns.
            device_id=device if backend == "nccl" else None,
        )
    except (RuntimeError, OSError, ValueError) as error:  # DistError is a RuntimeError
        raise RanksNotConnected(first_line(error)) from error


def limit_collectives(timeout: float) -> None:
    """Give every process group the job's time limit; call it when the engine is built and a
    Heartbeat watches the ranks.

    DeepSpeed and device meshes make groups with torch's own limit, 10 minutes on NCCL and 30 on
    gloo. gloo's would count the time for which a job was suspended: there the Heartbeat, which
    does not, ends a rank that stands still.

    Args:
        timeout: Time limit of a collective in seconds.
    """
    c10d = torch.distributed.distributed_c10d
    for group in c10d._world.pg_map if torch.distributed.is_initialized() else ():
        if group.group_desc != WRITERS:
            limit = timedelta(seconds=timeout)
            if torch.distributed.get_backend(group) == "gloo":
                limit += _LONGEST_SUSPENSION
            c10d._set_pg_timeout(limit, group)


def check_gloo_interfaces() -> None:
    """Check that this machine has the network interfaces that GLOO_SOCKET_IFNAME names.

    Raises:
        UserError: it has not; gloo would only report that it cannot find an address.
    """
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    present = [name for _, name in socket.if_nameindex()]
    if missing := [name for name in names if name not in present]:
        raise UserError(
            f"a network interface {', '.join(missing)} on {socket.gethostname()}, as"
            " GLOO_SOCKET_IFNAME says",
            ", ".join(present) or "none",
            "unset GLOO_SOCKET_IFNAME, or set it to one of those",
        )
