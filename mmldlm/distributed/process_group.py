"""Start of the process group."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
from torch.distributed import Store

from mmldlm.distributed.error_reporting import log_line
from mmldlm.distributed.failure_attribution import FailureReport, report_failed_ranks
from mmldlm.distributed.stack_dump import (
    describe_error,
    exit_with_stacks,
    is_collective_error,
)
from mmldlm.errors import UserError
from mmldlm.utils.environment import int_from_env
from mmldlm.utils.formatting import join_some
from mmldlm.utils.job_store import RanksNotConnected, connect_job_store
from mmldlm.utils.network import free_port

WRITERS = "checkpoint writers"
"""Description of a process group that has a time limit of its own."""
# Seconds that a backend's own time limit has to raise its error before a rank is ended.
_AFTER_TIMEOUT = 30.0
# Time limits that a phase may take: the first step compiles.
_LONGEST_PHASE = 3
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
        UserError: GLOO_SOCKET_IFNAME names no interface of this machine; or, on all ranks, some
            have a GPU and some have none.
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
        check_same_backend(store, backend, rank, world_size)
        with end_if_not_connected(backend, rank, timeout + _AFTER_TIMEOUT):
            torch.distributed.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
                # Without it, NCCL guesses the GPU of a barrier from the global rank, and warns.
                device_id=device if backend == "nccl" else None,
            )
    except UserError:  # a ValueError, too
        raise
    except (RuntimeError, OSError, ValueError) as error:  # DistError is a RuntimeError
        fix = None
        if not is_collective_error(error):
            fix = "mend what this rank found; with NCCL_DEBUG=INFO, NCCL says more"
        raise RanksNotConnected(describe_error(error), fix) from error


def check_same_backend(store: Store, backend: str, rank: int, world_size: int) -> None:
    """Check that all ranks use one backend; NCCL and gloo would wait for each other. Collective.

    Args:
        store: The job's store.

    Raises:
        UserError: on all ranks, they do not.
    """
    store.set(f"backend/{rank}", f"{backend} on {socket.gethostname()}")
    keys = [f"backend/{other}" for other in range(world_size)]
    found = dict.fromkeys(value.decode() for value in store.multi_get(keys))
    if len({text.split()[0] for text in found}) > 1:
        # Rank 0 may hold the store: it stays until the others have read it, or not for long.
        num_read, deadline = store.add("backend/read", 1), time.monotonic() + 10
        while rank == 0 and num_read < world_size and time.monotonic() < deadline:
            time.sleep(0.05)
            num_read = store.add("backend/read", 0)
        without = [text for text in found if text.startswith("gloo")]
        raise UserError(
            "a GPU that torch can use for every rank, or for none",
            f"none (and so gloo) for ranks on {join_some(text.split()[-1] for text in without)},"
            " and GPUs (NCCL) for the others",
            "find out with `mmldlm preflight --level 1` why torch cannot use the GPUs there",
        )


@contextlib.contextmanager
def end_if_not_connected(backend: str, rank: int, timeout: float) -> Iterator[None]:
    """End this process if the context takes longer than `timeout` seconds.

    NCCL connects the ranks without a time limit, and no Heartbeat watches yet: with a wrong
    interface or a firewall between them they would wait for ever.
    """

    def end() -> None:
        sentence = f"{backend} did not connect the ranks in {timeout:.0f} s"
        # One process of a node speaks for all of its ranks.
        if int_from_env("LOCAL_RANK", 0) == 0:
            log_line(
                f"ERROR: rank {rank} on {socket.gethostname()}: {sentence}; `mmldlm preflight"
                " --level 3` tests the network between the nodes, NCCL_DEBUG=INFO shows NCCL's"
                " choice of interface (NCCL_SOCKET_IFNAME)"
            )
        report_failed_ranks(FailureReport(sentence))
        exit_with_stacks(rank, None)

    timer = threading.Timer(timeout, end)
    timer.daemon = True
    try:
        timer.start()
        # The same, should the call hold the GIL.
        faulthandler.dump_traceback_later(timeout + _AFTER_TIMEOUT, exit=True, file=2)
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def limit_collectives(timeout: float) -> None:
    """Give every process group the job's time limit; call it when the engine is built and a
    Heartbeat watches the ranks.

    DeepSpeed and device meshes make groups with torch's own limit, 10 minutes on NCCL and 30 on
    gloo. The Heartbeat, which counts neither the time for which a job was suspended nor that of a
    rank that still reports, ends a rank that stands still; NCCL's own limit is a second net.

    Args:
        timeout: Time limit of a collective in seconds.
    """
    c10d = torch.distributed.distributed_c10d
    for group in c10d._world.pg_map if torch.distributed.is_initialized() else ():
        if group.group_desc != WRITERS:
            limit = timedelta(seconds=timeout)
            is_gloo = torch.distributed.get_backend(group) == "gloo"
            limit = limit + _LONGEST_SUSPENSION if is_gloo else limit * _LONGEST_PHASE
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
