"""Command line, environment and launch file that a launch passes to its launcher and its ranks."""

from __future__ import annotations

import os
from pathlib import Path

from mmldlm.cluster.env_propagation import (
    DEEPSPEED_EXPORTS,
    env_files,
    read_env_file,
    run_variables,
)
from mmldlm.cluster.launcher_commands import TRAIN, deepspeed_command, mpi_command, srun_command
from mmldlm.launch import rank_wrapper
from mmldlm.preflight.context import Context


def rank_variables(context: Context) -> dict[str, str]:
    """Return the variables that every rank gets, by value: those of the head override those of
    .deepspeed_env.
    """
    found: dict[str, str] = {}
    if context.launcher == "deepspeed" and not context.local:
        for path in env_files():
            found.update(read_env_file(path)[0])
        found["PYTHONPATH"] = _python_path()
        # Variables that DeepSpeed exports in addition to those of all launchers.
        found.update(
            {
                k: v
                for k, v in os.environ.items()
                if k.startswith(DEEPSPEED_EXPORTS) and k != "PYTHONPATH"
            }
        )
    found.update(run_variables())
    if not context.has_gpus():
        found.setdefault("DS_ACCELERATOR", "cpu")
        found.setdefault("OMP_NUM_THREADS", str(_threads_per_rank(context)))
    return found


def _python_path() -> str:
    """Return PYTHONPATH with absolute paths, because the runner works in /.

    Without this folder, which DeepSpeed's runner puts first: its modules would replace those of
    the same names.
    """
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(os.path.abspath(part) for part in parts if part)


def _threads_per_rank(context: Context) -> int:
    cores = [
        memory["cores"] // context.slots(node)
        for node, memory in context.probe_values("memory").items()
    ]
    return max(min(cores, default=1), 1)


def launch_file_values(train_args: list[str], log_dir: Path, variables: dict[str, str]) -> dict:
    """Return the content of the launch file that rank_wrapper.py reads on every node."""
    folders = {"folder": os.getcwd(), "logs": str(log_dir.absolute())}
    return {"script": TRAIN, "args": train_args, "environment": variables, **folders}


def rank_script(launch_id: str) -> list[str]:
    """Return the script that every launcher starts instead of train.py; it contains no text of the
    user.
    """
    return [rank_wrapper.__file__, launch_id]


def launcher_start(
    context: Context, log_dir: Path, script: list[str], variables: dict[str, str]
) -> dict:
    """Return the Popen arguments of the launcher on the head: "args", "env", "cwd".

    The hostfile is written to the log folder, because the given one may be a pipe that can be read
    only once.

    Raises:
        UserError: a value that DeepSpeed would pass through a shell on every node is not plain
            text.
    """
    options, address = context.options, context.master_address()
    plain = {"env": {**os.environ, **variables}, "cwd": os.getcwd()}
    if context.launcher == "mpi":
        return {
            **plain,
            "args": mpi_command(context.nodes, context.local, {}, options.ssh_port, script),
        }
    if context.launcher == "slurm":
        return {**plain, "args": srun_command(context.nodes, address, options.master_port, script)}
    hostfile = log_dir.absolute() / "hostfile"
    hostfile.write_text(
        "".join(f"{node.name} slots={node.slots}\n" for node in context.nodes), encoding="utf-8"
    )
    command = deepspeed_command(
        context.nodes,
        context.local,
        str(hostfile),
        address,
        options.master_port,
        options.ssh_port,
        script,
        "/",
    )
    return {
        "args": command,
        "env": plain["env"] if context.local else _runner_environment(),
        "cwd": "/",
    }


def _runner_environment() -> dict[str, str]:
    """Return the environment of DeepSpeed's runner, without variables that it would paste into
    shell lines.

    Ranks get these variables, and those of .deepspeed_env, from the launch file. PYTHONPATH is
    kept for the node's launch.py; deepspeed_command rejects one that is not plain.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(DEEPSPEED_EXPORTS)}
    python_path = [
        part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(part)
    ]
    if python_path:
        kept["PYTHONPATH"] = os.pathsep.join(python_path)
    return {**kept, "DS_ENV_FILE": "/nonexistent"}
