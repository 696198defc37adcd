"""Command lines of the launchers, with what they need to work on many nodes (facts: preflight-and-launch.md, 3)."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from mmldlm.cluster import run_decoded, run_without_signals
from mmldlm.cluster.hostfile import Node
from mmldlm.errors import UserError

PACKAGE = Path(__file__).resolve().parents[1]
TRAIN = str(PACKAGE / "train.py")
# Means itself to every shell, and to pdsh, which expands %h, %n and %u.
_PLAIN = re.compile(r"[\w@+=:,./-]*")


def deepspeed_command(
    nodes: Sequence[Node],
    local: bool,
    hostfile: str | None,
    address: str,
    port: int,
    ssh_port: int | None,
    script: list[str],
    folder: str | None = None,
) -> list[str]:
    """`deepspeed` (pdsh) on the head. --force_multi: a hostfile of one node would be run here, whatever it names.

    Args:
        script: any text; words that are not plain go as base64, because DeepSpeed pastes them into a shell line.
        folder: where the line will be run (default: here), which DeepSpeed pastes too.

    Raises:
        UserError: a path that DeepSpeed pastes into that line is not plain text.
    """
    runner = ["-m", "deepspeed.launcher.runner", "--master_port", str(port), "--no_local_rank"]
    if local:
        # A path that does not exist: DeepSpeed would read /job/hostfile where there is one.
        more = ["--hostfile", "/nonexistent", "--num_gpus", str(nodes[0].slots), "--log_level", "error", *script]
        return [sys.executable, *runner, *more]
    if not all(_PLAIN.fullmatch(word) for word in script):
        script = [run_decoded.__file__, base64.urlsafe_b64encode(json.dumps(script).encode()).decode()]
    _check_plain(
        {
            "the python interpreter": sys.executable,
            "the checkout": script[0],
            "the working folder": folder or os.getcwd(),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "--master_addr": address,
        }
    )
    runner += ["--hostfile", str(hostfile), "--force_multi", "--no_ssh_check", "--master_addr", address]
    if ssh_port is not None:
        runner += ["--ssh_port", str(ssh_port)]
    return [sys.executable, run_without_signals.__file__, sys.executable, *runner, *script]


def _check_plain(texts: dict[str, str]) -> None:
    bad = {what: text for what, text in texts.items() if not _PLAIN.fullmatch(text)}
    if bad:
        raise UserError(
            "letters, digits and @+=:,./_- in what DeepSpeed's launcher hands to a shell on every node",
            "; ".join(f"{what} is {text!r}" for what, text in bad.items()),
            "use a path without other characters, or --launcher torchrun",
        )


def torchrun_command(nodes: Sequence[Node], number: int, address: str, port: int, script: list[str]) -> list[str]:
    """`torchrun` on one node; every node gets one. Static rendezvous: nobody has to guess who hosts the store."""
    node = nodes[number]
    line = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(nodes)), "--node_rank", str(number)]
    line += ["--nproc_per_node", str(node.slots), "--master_addr", address, "--master_port", str(port)]
    return [*line, *script]


def mpi_command(
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
    "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS MASTER_ADDR=$1 MASTER_PORT=$2; "
    'shift 2; exec "$@"'
)


def srun_command(nodes: Sequence[Node], address: str, port: int, script: list[str]) -> list[str]:
    """Slurm's `srun` inside an allocation; it exports the whole environment by default."""
    line = ["srun", "--nodes", str(len(nodes)), "--ntasks-per-node", str(nodes[0].slots), "--kill-on-bad-exit=1"]
    line += ["--nodelist", ",".join(node.name for node in nodes)]
    if "SLURM_CPUS_PER_TASK" in os.environ:  # of the batch job; srun does not take it over (Slurm 22.05 and later)
        line += ["--cpus-per-task", os.environ["SLURM_CPUS_PER_TASK"]]
    return [*line, "bash", "-c", _FROM_SLURM, "bash", address, str(port), sys.executable, "-u", *script]
