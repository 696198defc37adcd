"""Command lines of the launchers, with what they need to work on many nodes (facts: preflight-and-launch.md, 3)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mmldlm.preflight.hostfile import Node

PACKAGE = Path(__file__).resolve().parents[1]
TRAIN = str(PACKAGE / "train.py")


def deepspeed_line(
    nodes: Sequence[Node],
    local: bool,
    hostfile: str | None,
    address: str,
    port: int,
    ssh_port: int | None,
    script: list[str],
) -> list[str]:
    """`deepspeed` (pdsh) on the head. --force_multi: a hostfile of one node would be run here, whatever it names."""
    line = [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", str(port), "--no_local_rank"]
    if local:
        # A path that does not exist: DeepSpeed would read /job/hostfile where there is one.
        return [*line, "--hostfile", "/nonexistent", "--num_gpus", str(nodes[0].slots), "--log_level", "error", *script]
    line += ["--hostfile", str(hostfile), "--force_multi", "--no_ssh_check", "--master_addr", address]
    if ssh_port is not None:
        line += ["--ssh_port", str(ssh_port)]
    return [*line, *script]


def torchrun_line(nodes: Sequence[Node], number: int, address: str, port: int, script: list[str]) -> list[str]:
    """`torchrun` on one node; every node gets one. Static rendezvous: nobody has to guess who hosts the store."""
    node = nodes[number]
    line = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(nodes)), "--node_rank", str(number)]
    line += ["--nproc_per_node", str(node.slots), "--master_addr", address, "--master_port", str(port)]
    return [*line, *script]


def mpi_line(
    nodes: Sequence[Node], local: bool, environment: dict[str, str], ssh_port: int | None, script: list[str]
) -> list[str]:
    """Open MPI's `mpirun` on the head: rank order of the hostfile, variables by name (their values need no quoting)."""
    hosts = ",".join(f"{'localhost' if local else node.name}:{node.slots}" for node in nodes)
    line = [
        "mpirun",
        "-np",
        str(sum(node.slots for node in nodes)),
        "--host",
        hosts,
        "--map-by",
        "slot",
        "--bind-to",
        "none",
    ]
    agent = "ssh -o BatchMode=yes" + (f" -p {ssh_port}" if ssh_port else "")
    line += ["--mca", "plm_rsh_agent", agent]
    if os.geteuid() == 0:
        line.append("--allow-run-as-root")
    for name in sorted(environment):
        line += ["-x", name]
    return [*line, sys.executable, *script]


# Slurm gives no RANK and no master; all five variables, so that no task has to discover anything.
_FROM_SLURM = (
    "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS "
    'MASTER_ADDR={address} MASTER_PORT={port}; exec "$0" "$@"'
)


def srun_line(nodes: Sequence[Node], address: str, port: int, script: list[str]) -> list[str]:
    """Slurm's `srun` inside an allocation; it exports the whole environment by default."""
    line = ["srun", "--nodes", str(len(nodes)), "--ntasks-per-node", str(nodes[0].slots), "--kill-on-bad-exit=1"]
    line += ["--nodelist", ",".join(node.name for node in nodes)]
    if "SLURM_CPUS_PER_TASK" in os.environ:  # of the batch job; srun does not take it over (Slurm 22.05 and later)
        line += ["--cpus-per-task", os.environ["SLURM_CPUS_PER_TASK"]]
    return [*line, "bash", "-c", _FROM_SLURM.format(address=address, port=port), sys.executable, "-u", *script]
