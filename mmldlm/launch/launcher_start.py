"""What a launch hands to its launcher and to its ranks: command line, variables, launch file."""

from __future__ import annotations

import os
from pathlib import Path

from mmldlm.cluster.env_propagation import DEEPSPEED_EXPORTS, env_files, read_env_file, run_variables
from mmldlm.cluster.launcher_commands import TRAIN, deepspeed_command, mpi_command, srun_command
from mmldlm.launch import rank_wrapper as rank_module
from mmldlm.preflight.context import Context


def rank_variables(context: Context) -> dict[str, str]:
    """Variables that every rank gets, by value and not through a shell: the head's, over those of .deepspeed_env."""
    found: dict[str, str] = {}
    through_deepspeed = context.launcher == "deepspeed" and not context.local
    if through_deepspeed:
        for path in env_files():
            found.update(read_env_file(path)[0])
        found["PYTHONPATH"] = _python_path()
        # What DeepSpeed exports beside what all launchers carry.
        found.update({k: v for k, v in os.environ.items() if k.startswith(DEEPSPEED_EXPORTS) and k != "PYTHONPATH"})
    found.update(run_variables())
    if not context.has_gpus():
        found.setdefault("DS_ACCELERATOR", "cpu")
        found.setdefault("OMP_NUM_THREADS", str(_threads(context)))
    return found


def _python_path() -> str:
    """PYTHONPATH as DeepSpeed's runner sets it, with this folder first; absolute, because the runner works in /."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([os.getcwd(), *(os.path.abspath(part) for part in given if part)])


def _threads(context: Context) -> int:
    cores = [found["cores"] // context.slots(n) for n, found in context.answered("memory").items()]
    return max(min(cores, default=1), 1)


def launch_values(words: list[str], logs: Path, variables: dict[str, str]) -> dict:
    """Content of the launch file that rank.py reads on every node."""
    folders = {"folder": os.getcwd(), "logs": str(logs.absolute())}
    return {"script": TRAIN, "words": words, "environment": variables, **folders}


def rank_script(launch: str) -> list[str]:
    """What every launcher starts in place of train.py: no word of it is the user's."""
    return [rank_module.__file__, launch]


def launcher_start(context: Context, logs: Path, script: list[str], variables: dict[str, str]) -> dict:
    """Arguments of Popen for the launcher on the head: "args", "env", "cwd".

    The hostfile is written beside the logs: the given one may be a pipe, which can be read only once.

    Raises:
        UserError: something that DeepSpeed would hand to a shell on every node is not plain text.
    """
    options, address = context.options, context.master_address()
    plain = {"env": {**os.environ, **variables}, "cwd": os.getcwd()}
    if context.launcher == "mpi":
        return {**plain, "args": mpi_command(context.nodes, context.local, {}, options.ssh_port, script)}
    if context.launcher == "slurm":
        return {**plain, "args": srun_command(context.nodes, address, options.master_port, script)}
    hostfile = logs.absolute() / "hostfile"
    hostfile.write_text("".join(f"{node.name} slots={node.slots}\n" for node in context.nodes))
    folder = plain["cwd"] if context.local else "/"
    line = deepspeed_command(
        context.nodes, context.local, str(hostfile), address, options.master_port, options.ssh_port, script, folder
    )
    return {"args": line, "env": plain["env"] if context.local else _runner_environment(), "cwd": folder}


def _runner_environment() -> dict[str, str]:
    """Environment of DeepSpeed's runner: without what it would paste into a shell line of every node.

    Its ranks get these variables, and those of .deepspeed_env, from the launch file. PYTHONPATH stays, as the node's
    launch.py may need it (deepspeed_command refuses one that is not plain).
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(DEEPSPEED_EXPORTS)}
    python_path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(part)]
    if python_path:
        kept["PYTHONPATH"] = os.pathsep.join(python_path)
    return {**kept, "DS_ENV_FILE": "/nonexistent"}
