"""Command lines of the launchers, with the options that they need on many nodes."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from mmldlm.cluster import run_decoded, run_without_signals
from mmldlm.cluster.hostfile import Node
from mmldlm.errors import UserError
from mmldlm.utils.formatting import join_some
from mmldlm.utils.run_module import module_command

PACKAGE = Path(__file__).resolve().parents[1]
TRAIN = str(PACKAGE / "train.py")
# From the start of a launcher to its first process on every node, with imports from a slow disk on
# a busy node.
START_SECONDS = 90.0


def train_arguments(options: argparse.Namespace) -> list[str]:
    """Return the arguments of train.py that correspond to a command line."""
    options_of_train = (
        ("--config-name", options.config_name),
        ("--config", options.config),
        ("--deepspeed_config", options.deepspeed_config),
    )
    return [text for name, value in options_of_train if value for text in (name, value)] + list(
        options.overrides
    )


def deepspeed_command(
    nodes: Sequence[Node],
    local: bool,
    hostfile: str | None,
    address: str,
    port: int,
    ssh_port: int | None,
    script: list[str],
    folder: str | None = None,
    gpus: Sequence[int] = (),
) -> list[str]:
    """Return the `deepspeed` (pdsh) command for the head node.

    --force_multi: otherwise DeepSpeed runs a hostfile of one node on this machine, whatever host
    it names.

    Args:
        nodes: Hosts and slots.
        local: Whether the run is on this machine alone, without ssh.
        hostfile: Path of a hostfile with these nodes; unused if `local`.
        address: --master_addr.
        port: --master_port.
        ssh_port: Port of sshd; None for the default.
        script: Script and arguments. Arguments that are not plain are passed as base64, because
            DeepSpeed pastes them into a shell line.
        folder: Working folder of the command (default: the current one), which DeepSpeed pastes
            too.
        gpus: GPUs of this machine for the ranks, if `local`; by default the first ones.

    Raises:
        UserError: a path that DeepSpeed pastes into a shell line is not plain text.
    """
    runner = module_command(
        "deepspeed.launcher.runner", "--master_port", str(port), "--no_local_rank"
    )
    if local:
        # A missing path: DeepSpeed would read /job/hostfile if it exists.
        runner += ["--hostfile", "/nonexistent", "--log_level", "error"]
        # With --num_gpus it deletes CUDA_VISIBLE_DEVICES, and takes the first GPUs.
        chosen = f"localhost:{','.join(map(str, gpus))}"
        runner += ["--include", chosen] if gpus else ["--num_gpus", str(nodes[0].slots)]
        return [*runner, *script]
    script = run_decoded.encode(script)
    _check_plain(
        {
            "the python interpreter": sys.executable,
            "the checkout": script[0],
            "the working folder": folder or os.getcwd(),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "--master_addr": address,
        }
    )
    runner += [
        "--hostfile",
        str(hostfile),
        "--force_multi",
        "--no_ssh_check",
        "--master_addr",
        address,
    ]
    if ssh_port is not None:
        runner += ["--ssh_port", str(ssh_port)]
    return [sys.executable, run_without_signals.__file__, *runner, *script]


def _check_plain(texts: dict[str, str]) -> None:
    bad = {label: text for label, text in texts.items() if not run_decoded.PLAIN.fullmatch(text)}
    if bad:
        raise UserError(
            "only letters, digits and @+=:,./_- in values that DeepSpeed's launcher passes through"
            " shells on nodes",
            "; ".join(f"{label} is {text!r}" for label, text in bad.items()),
            "use a path without other characters, or --launcher torchrun",
        )


def plain_library_path() -> str:
    """Return the folders in LD_LIBRARY_PATH of this shell that DeepSpeed's launcher can pass
    through shells on nodes.
    """
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if run_decoded.PLAIN.fullmatch(folder))


def torchrun_command(
    nodes: Sequence[Node], node_rank: int, address: str, port: int, script: list[str]
) -> list[str]:
    """Return the `torchrun` command of one node, with a static rendezvous: the host of the store
    is given.
    """
    command = module_command("torch.distributed.run", "--nnodes", str(len(nodes)))
    command += ["--node_rank", str(node_rank), "--nproc_per_node", str(nodes[node_rank].slots)]
    command += ["--master_addr", address, "--master_port", str(port)]
    return [*command, *script]


def pdsh_environment(ssh_options: Sequence[str]) -> dict[str, str]:
    """Return the variable that gives pdsh, which DeepSpeed starts, options of ssh.

    Raises:
        UserError: as of `joined_ssh_options`.
    """
    given = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
    words = f"{joined_ssh_options(ssh_options)} {given}".strip()
    return {"PDSH_SSH_ARGS_APPEND": words} if ssh_options else {}


def joined_ssh_options(ssh_options: Sequence[str]) -> str:
    """Return options of ssh in one word, which pdsh and mpirun split at white space.

    Raises:
        UserError: an option has white space itself.
    """
    if spaced := [option for option in ssh_options if option.split() != [option]]:
        raise UserError(
            "--ssh-option without white space for --launcher deepspeed and mpi",
            join_some(map(repr, spaced)),
            "write it into ~/.ssh/config, or use --launcher torchrun",
        )
    return " ".join(ssh_options)


def mpi_command(
    nodes: Sequence[Node],
    local: bool,
    address: str,
    port: int,
    ssh_port: int | None,
    ssh_options: Sequence[str],
    script: list[str],
    carry: Sequence[str] = (),
) -> list[str]:
    """Return Open MPI's `mpirun` command, with ranks in hostfile order.

    It passes no variables by itself: a MASTER_PORT of this shell would reach only the ranks of
    this machine. `carry` names those of this shell that the ranks get, if they are set.
    """
    hosts = ",".join(f"{'localhost' if local else node.name}:{node.slots}" for node in nodes)
    num_ranks = sum(node.slots for node in nodes)
    command = [
        _mpirun(),
        "-np",
        str(num_ranks),
        "--host",
        hosts,
        "--map-by",
        "slot",
        "--bind-to",
        "none",
        "-x",
        f"MASTER_ADDR={address}",
        "-x",
        f"MASTER_PORT={port}",
    ]
    command += [word for name in carry if name in os.environ for word in ("-x", name)]
    # Of an option that is given twice, ssh takes the first.
    agent = " ".join(f"ssh {joined_ssh_options(ssh_options)} -o BatchMode=yes".split())
    agent += f" -p {ssh_port}" if ssh_port else ""
    command += ["--mca", "plm_rsh_agent", agent]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    return [*command, sys.executable, *script]


def _mpirun() -> str:
    """Return mpirun by the path from which Open MPI derives --prefix: where its daemon and
    libraries are on other nodes, whose logins may not know them. launchers/mpi.sh does the same.

    The system's own needs none, and with it would put /usr/lib before the libraries of packages.
    """
    path = shutil.which("mpirun") or "mpirun"
    folder = os.path.dirname(os.path.abspath(path))
    has_daemon = any(os.access(f"{folder}/{name}", os.X_OK) for name in ("orted", "prted"))
    return f"{folder}/mpirun" if has_daemon and folder not in ("/usr/bin", "/bin") else "mpirun"


# Slurm sets neither RANK nor a master address; with all five variables, tasks need no discovery.
# SLURM_PROCID is not the rank: Slurm numbers tasks in its own order of the nodes, by which another
# node than the first of the hostfile may have rank 0, and with it the master.
_FROM_SLURM = """\
case ,$4, in *,$SLURMD_NODENAME,*) ;; *)
    echo "error: Slurm's node $SLURMD_NODENAME is none of the hostfile's: $4" >&2; exit 1 ;;
esac
before=,$4,; before=${before%%,"$SLURMD_NODENAME",*}; before=${before//[!,]/}
export RANK=$((${#before} * $3 + SLURM_LOCALID)) LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
export MASTER_ADDR=$1 MASTER_PORT=$2; shift 4
# A rank would divide the CPUs that it may use by those of the node; where Slurm binds tasks, they
# are its own already.
[ -z "$SLURM_CPUS_PER_TASK" ] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}
exec "$@"
"""


def srun_command(nodes: Sequence[Node], address: str, port: int, script: list[str]) -> list[str]:
    """Return Slurm's `srun` command inside an allocation, with ranks in hostfile order; it exports
    the full environment by default.

    Args:
        nodes: Hosts, by Slurm's names of them, all with the same slots.
        address: Address of the first node for the other ranks.
        port: Port there.
        script: Script and arguments.
    """
    slots, names = nodes[0].slots, ",".join(node.name for node in nodes)
    command = ["srun", "--nodes", str(len(nodes)), "--ntasks", str(slots * len(nodes))]
    command += ["--ntasks-per-node", str(slots), "--kill-on-bad-exit=1", "--nodelist", names]
    # A variable of the batch job, which srun does not inherit (since Slurm 22.05).
    if "SLURM_CPUS_PER_TASK" in os.environ:
        command += ["--cpus-per-task", os.environ["SLURM_CPUS_PER_TASK"]]
    return [
        *command,
        "bash",
        "-c",
        _FROM_SLURM,
        "bash",
        address,
        str(port),
        str(slots),
        names,
        sys.executable,
        "-u",
        *script,
    ]
