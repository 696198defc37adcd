"""The launcher: installed, supported version, reachable nodes, and propagated variables.

Level 2 starts one process per node with the real launcher, and collects the environment that it
receives.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from mmldlm.cluster import print_environment
from mmldlm.cluster.env_propagation import (
    PREFIXES,
    REQUIRED,
    compared_variables,
    env_files,
    is_secret,
    names_not_passed,
    read_env_file,
    run_variables,
)
from mmldlm.cluster.launcher_commands import START_SECONDS, pdsh_environment
from mmldlm.config.schema import EngineConfig
from mmldlm.distributed.environment import settings_that_prolong_hangs
from mmldlm.preflight.agent import run_command
from mmldlm.preflight.check import Result, Results, check, fail, ok, skip, warn
from mmldlm.preflight.context import Context
from mmldlm.utils.environment import platform_variables
from mmldlm.utils.formatting import join_some
from mmldlm.utils.gpus import VISIBLE

CHECKS = {"ENV002", "LNCH003"}
OWN_SHELLS = "torchrun is started on each node by its own shell: set variables there"


def skip_reason(context: Context) -> str | None:
    """Return why the probe would measure nothing; None if it should run."""
    if not CHECKS & context.check_ids:
        return "its checks are not selected"
    if context.local:
        return "one machine: no variables are propagated"
    if context.options.propagates_all:
        return (
            "mmldlm launch passes the variables itself, and its watcher reports nodes that do not"
            " start"
        )
    if context.launcher == "torchrun":
        return OWN_SHELLS
    if context.failures or len(context.facts) < len(context.nodes):
        return "a node does not answer, so the launcher would not reach it either"
    machines = [identity["machine"] for identity in context.probe_values("identity").values()]
    if len(set(machines)) < len(machines):
        return "two names are one machine (see HOST004)"
    if context.launcher == "deepspeed" and any(read_env_file(path)[1] for path in env_files()):
        return "DeepSpeed fails on its .deepspeed_env (see ENV001)"
    return None


def run_launcher_probe(context: Context) -> None:
    """Start print_environment.py once per node through the launcher; fill context.launched and
    context.launcher_result.
    """
    reason = skip_reason(context)
    if reason is not None:
        context.launcher_result = {"skipped": reason}
        return
    nodes = [replace(node, slots=1) for node in context.nodes]
    with tempfile.TemporaryDirectory(prefix="mmldlm_preflight_") as folder:
        script = [print_environment.__file__, *PREFIXES]
        command = context.launcher_command(script, Path(folder) / "hostfile", nodes)
        environment = pdsh_environment(context.options.ssh_option)
        try:
            result = run_command(command, environment, START_SECONDS)
        except OSError:
            reason = "the launcher is not on this machine (see LNCH001)"
            context.launcher_result = {"skipped": reason}
            return
    context.launched, other_lines = _parse_output(context, result["output"])
    context.launcher_result = {"code": result["code"], "lines": other_lines[-20:]}


def _parse_output(context: Context, output: str) -> tuple[dict[str, dict], list[str]]:
    """Return node -> {"rank", "variables"} of the processes that started, and the other lines."""
    launched, other = {}, []
    identities = context.probe_values("identity").items()
    names = {identity["hostname"]: name for name, identity in identities}
    for line in output.splitlines():
        _, mark, report_json = line.partition(print_environment.MARK)
        if not mark:
            other.append(line)
            continue
        with contextlib.suppress(ValueError):
            # The timeout may have truncated the line.
            report = json.loads(report_json)
            if report["hostname"] in names:
                variables = report["variables"]
                if context.launcher == "deepspeed":
                    # It names the GPUs of the ranks that it starts, here of one per node.
                    variables.pop(VISIBLE, None)
                launched[names[report["hostname"]]] = {
                    "rank": report["rank"],
                    "variables": variables,
                }
    return launched, [line for line in other if line.strip()]


_PROGRAMS = {
    "deepspeed": ("pdsh", "apt-get install pdsh (or use --launcher torchrun)"),
    "mpi": ("mpirun", "apt-get install openmpi-bin (or load the site's MPI module)"),
    "slurm": ("srun", "run this inside a Slurm allocation, or choose another --launcher"),
}


@check("LNCH001", 0, "head", "launcher present")
def launcher_is_here(context: Context) -> Result:
    """The programs of the selected launcher are installed on this machine, and srun knows its
    nodes by name.
    """
    program, fix = _PROGRAMS.get(context.launcher, (None, ""))
    if context.local and context.launcher == "deepspeed":
        return ok("one machine: no pdsh needed")
    if program is not None and shutil.which(program) is None:
        return fail(f"no {program} in PATH", f"{program} for --launcher {context.launcher}", fix)
    if context.launcher == "slurm" and context.local:
        return fail(
            "no hostfile" if context.options.hostfile is None else "localhost in the hostfile",
            "the nodes of the allocation by Slurm's names of them",
            "--hostfile <(scontrol show hostnames | sed 's/$/ slots=RANKS_PER_NODE/')",
        )
    return ok(program or "torch.distributed.run")


@check("LNCH002", 0, "head", "launcher versions")
def versions_work_together(context: Context) -> Result:
    """The installed DeepSpeed supports this run and this launcher."""
    if context.config is None or context.config.engine.kind != "deepspeed":
        return skip("no DeepSpeed in this run")
    version = metadata.version("deepspeed")
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:3])
    if release < (0, 19, 8):
        return fail(
            f"deepspeed {version}",
            "deepspeed >= 0.19.8 (older ones step on NaN, lose hosts of --include, and call srun"
            " wrongly)",
            "pip install -c constraints.txt deepspeed",
        )
    return ok(f"deepspeed {version}")


@check("ENV001", 0, "head", "harmful variables")
def no_harmful_variables(context: Context) -> Results:
    """No variable on this machine makes a hang endless or contradicts the launch."""
    engine = EngineConfig() if context.config is None else context.config.engine
    for setting in settings_that_prolong_hangs(engine.collective_timeout):
        yield warn(setting, "a hang that ends at the time limit", "unset the variable")
    ranks = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in os.environ]
    if ranks and "SLURM_JOB_ID" not in os.environ:
        measured = f"{', '.join(ranks)} set in this shell"
        if platform_variables():
            measured += ", as by a platform that numbers its nodes"
        yield warn(measured, "unset: a launcher starts the ranks", f"unset {' '.join(ranks)}")
    if _drops_visible_gpus(context):
        yield warn(
            f"{VISIBLE}={os.environ[VISIBLE]} is not passed to other nodes: ranks use the first"
            " GPUs there, one for each slot",
            "unset: a launcher chooses the GPUs of each node",
            f"unset {VISIBLE}; to use other GPUs, set it on each node and start"
            " launchers/multi_node.sh there (NODE_RANK)",
        )
    for path in env_files():
        for problem in read_env_file(path)[1] if context.launcher == "deepspeed" else ():
            yield fail(problem, "NAME=value on every line", "correct or delete that line")
    if context.local or context.launcher == "slurm":
        yield ok("none")
        return
    names = names_not_passed()
    yield ok(
        f"none; {len(run_variables())} pass to the nodes"
        + (f", not {join_some(names, 8)}" if names else "")
    )


def _drops_visible_gpus(context: Context) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES of this shell names other GPUs than ranks on the nodes
    use. srun passes it, and shells that start torchrun have their own.
    """
    own_shells = context.launcher == "torchrun" and not context.options.propagates_all
    if VISIBLE not in os.environ or context.local or context.launcher == "slurm" or own_shells:
        return False
    # Within an allocation, the batch system sets the variable to all GPUs of the job.
    named = [name.strip() for name in os.environ[VISIBLE].split(",")]
    most_slots = max((node.slots for node in context.nodes), default=0)
    first_ones = [str(index) for index in range(most_slots)]
    return named[:most_slots] != first_ones and context.has_gpus() is not False


@check("LNCH003", 2, "node", "launcher reaches the node")
def launcher_starts_processes(context: Context) -> Results:
    """The launcher, with this hostfile, starts a process on the node.

    It starts one rank per node instead of train.py: `deepspeed` through pdsh, mpirun, or srun.
    """
    result = context.launcher_result
    if "code" not in result:
        yield skip(result.get("skipped", "the nodes were not asked"))
        return
    if result["code"] is None and not context.launched:
        yield skip("the launcher took too long to start anything (an import from a slow disk?)")
        return
    for name in context.names:
        # pdsh prefixes each line with the node's name, and prints a summary last.
        lines = [line for line in result["lines"] if line.startswith(f"{name}: ")] or result[
            "lines"
        ]
        last = (lines or ["no message"])[-1].strip()
        if name in context.launched:
            yield ok(f"rank {context.launched[name]['rank']} through {context.launcher}", name)
        else:
            status = "timed out" if result["code"] is None else f"status {result['code']}"
            fix = f"try manually: {_MANUAL_COMMANDS[context.launcher].format(name=name)}"
            measured = f"{context.launcher} started no process ({status}): {last[:200]}"
            yield fail(measured, "a process started by the launcher", fix, name)


_MANUAL_COMMANDS = {
    "deepspeed": "PDSH_RCMD_TYPE=ssh pdsh -w {name} hostname",
    "mpi": "mpirun --host {name} hostname",
    "slurm": "srun --nodelist {name} hostname",
}


def not_propagated(on_node: dict[str, str]) -> list[str]:
    """Return the variables of this shell whose values in the environment of a node differ."""
    here = compared_variables()
    return sorted(name for name, value in here.items() if on_node.get(name) != value)


@check("ENV002", 2, "node", "variables not propagated")
def variables_are_propagated(context: Context) -> Results:
    """Variables of this shell that affect a run have the same value for a rank on every node.

    Compares this shell with a process that the launcher started on the node. Without one
    (LNCH003), with the node's login plus the variables that the launcher is known to export.
    DeepSpeed propagates names beginning with PYTHON, MLFLOW, MV2, UCX, on GPUs NCCL, and
    .deepspeed_env; mpirun those named with -x; srun all. --fix adds missing ones to
    ./.deepspeed_env.
    """
    num_compared = len(compared_variables())
    for name in context.names:
        on_node = context.environment_on(name)
        if on_node is None:
            yield skip(OWN_SHELLS if context.launcher == "torchrun" else "no answer", name)
            continue
        source = "" if name in context.launched or context.local else " (inferred)"
        missing = not_propagated(on_node)
        if not missing:
            yield ok(f"{num_compared} variable(s) propagated{source}", name)
            continue
        values = (
            k if is_secret(k) else f"{k} (here {os.environ[k]}, there {on_node.get(k, 'unset')})"
            for k in missing
        )
        fix = {
            "deepspeed": (
                "--fix writes them to ./.deepspeed_env, which DeepSpeed propagates (or use mmldlm"
                " launch)"
            ),
            "mpi": (
                "mpirun " + " ".join(f"-x {key}" for key in missing) + " (or use mmldlm launch)"
            ),
        }.get(context.launcher, "set them in the job script")
        result = fail if any(key in REQUIRED for key in missing) else warn
        yield result(
            f"not propagated{source}: {join_some(values, 6)}",
            "the same variables on every node",
            fix,
            name,
        )
