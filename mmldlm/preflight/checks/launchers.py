"""The launcher: is it there, does this version do it, and which variables does it leave behind?"""

from __future__ import annotations

import importlib.util
import os
import shutil
from importlib import metadata

from mmldlm.cluster.env_propagation import REQUIRED, env_files, is_secret, read_env_file, run_variables
from mmldlm.preflight.check import check, fail, ok, skip, warn

_PROGRAMS = {
    "deepspeed": ("pdsh", "apt-get install pdsh (or use --launcher torchrun)"),
    "mpi": ("mpirun", "apt-get install openmpi-bin (or load the site's MPI module)"),
    "slurm": ("srun", "run this inside a Slurm allocation, or choose another --launcher"),
}


@check("LNCH001", 0, "head", "launcher present")
def launcher_is_here(context):
    """The programs that the chosen launcher calls are on this machine."""
    program, fix = _PROGRAMS.get(context.launcher, (None, ""))
    if context.local and context.launcher == "deepspeed":
        return ok("one machine: no pdsh needed")
    if program is not None and shutil.which(program) is None:
        return fail(f"no {program} in PATH", f"{program} for --launcher {context.launcher}", fix)
    if context.launcher == "mpi" and importlib.util.find_spec("mpi4py") is None:
        return fail("no mpi4py", "mpi4py, which tells a rank its number", "pip install -c constraints.txt mpi4py")
    return ok(program or "torch.distributed.run")


@check("LNCH002", 0, "head", "launcher versions")
def versions_work_together(context):
    """The installed DeepSpeed can do what is asked of it with this launcher."""
    if context.config is None or context.config.engine.kind != "deepspeed":
        return skip("no DeepSpeed in this run")
    try:
        version = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return fail("deepspeed is not installed", "deepspeed >= 0.19.8", "pip install -c constraints.txt deepspeed")
    number = tuple(int(part) for part in version.split("+")[0].split(".")[:3])
    if number < (0, 19, 8):
        return fail(
            f"deepspeed {version}",
            "deepspeed >= 0.19.8 (older ones step on NaN, lose hosts of --include, and call srun wrongly)",
            "pip install -c constraints.txt deepspeed",
        )
    return ok(f"deepspeed {version}")


@check("ENV001", 0, "head", "harmful variables")
def no_harmful_variables(context):
    """No variable here makes a hang endless or a launch contradict itself."""
    found = os.environ
    if found.get("TORCH_NCCL_ENABLE_MONITORING") == "0":
        yield warn("TORCH_NCCL_ENABLE_MONITORING=0", "the NCCL watchdog on", "unset it: a hang would never end")
    beat = found.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "0")
    if beat.isdigit() and int(beat) > 7200:
        measured = f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={beat} ({int(beat) / 86400:.0f} days)"
        yield warn(measured, "minutes", "unset it: a dead rank would hold the others for that long")
    if found.get("NCCL_ASYNC_ERROR_HANDLING") == "0" or found.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
        yield warn("async error handling is off", "on", "unset it: a failed collective would hang")
    ranks = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in found]
    if ranks and "SLURM_JOB_ID" not in found:
        measured = f"{', '.join(ranks)} set in this shell"
        yield warn(measured, "unset where a launcher starts the ranks", f"unset {' '.join(ranks)}")
    for path in env_files():
        for problem in read_env_file(path)[1] if context.launcher == "deepspeed" else ():
            yield fail(problem, "NAME=value on every line", "correct or delete that line")
    yield ok("none")


@check("LNCH003", 2, "node", "launcher reaches the node")
def launcher_starts_processes(context):
    """The launcher itself, with this hostfile, starts a process on the node.

    One rank a node, in place of train.py: by `deepspeed` through pdsh, by mpirun, or by srun.
    """
    through = context.through
    if "code" not in through:
        yield skip(through.get("skipped", "the nodes were not asked"))
        return
    if through["code"] is None and not context.arrived:
        yield skip("the launcher took too long to start anything (an import from a slow disk?)")
        return
    for name in context.names:
        # pdsh puts the node's name before each line of it, and its own sum of them last.
        about = [line for line in through["lines"] if line.startswith(f"{name}: ")] or through["lines"]
        last = (about or ["no message"])[-1].strip()
        if name in context.arrived:
            yield ok(f"rank {context.arrived[name]['rank']} through {context.launcher}", name)
        else:
            how = "ran out of time" if through["code"] is None else f"status {through['code']}"
            fix = f"try by hand: {_BY_HAND[context.launcher].format(name=name)}"
            measured = f"no process of {context.launcher} there ({how}): {last[:200]}"
            yield fail(measured, "a process that the launcher started", fix, name)


_BY_HAND = {
    "deepspeed": "PDSH_RCMD_TYPE=ssh pdsh -w {name} hostname",
    "mpi": "mpirun --host {name} hostname",
    "slurm": "srun --nodelist {name} hostname",
}


@check("ENV002", 2, "node", "variables that stay behind")
def variables_arrive(context):
    """What is set here and matters to a run is the same for a rank on every node, through the chosen launcher.

    Compares this shell with what a process has that the launcher itself started on the node. Where it could not be
    started (LNCH003), with the node's own login plus what the launcher is known to export. DeepSpeed takes along names
    beginning with PYTHON, MLFLOW, MV2, UCX, on GPUs NCCL, and .deepspeed_env; mpirun what -x names; srun all. --fix
    adds what is missing to ./.deepspeed_env.
    """
    here = run_variables()
    for name in context.names:
        there = context.environment_on(name)
        if context.launcher == "torchrun" and not context.local and not context.options.carries_all:
            yield skip("torchrun is started on each node by a shell of its own: set variables there", name)
            continue
        if there is None:
            continue
        seen = "" if name in context.arrived or context.local else " (reckoned)"
        behind = sorted(key for key, value in here.items() if there.get(key) != value)
        if not behind:
            yield ok(f"{len(here)} variable(s) arrive{seen}", name)
            continue
        shown = ", ".join(
            k if is_secret(k) else f"{k} (here {here[k]}, there {there.get(k, 'unset')})" for k in behind[:6]
        )
        more = f" and {len(behind) - 6} more" if len(behind) > 6 else ""
        fix = {
            "deepspeed": "--fix writes them to ./.deepspeed_env, which DeepSpeed carries (or start with mmldlm launch)",
            "mpi": "mpirun " + " ".join(f"-x {key}" for key in behind) + " (or start with mmldlm launch)",
        }.get(context.launcher, "set them in the job script")
        verdict = fail if any(key in REQUIRED for key in behind) else warn
        yield verdict(f"stay behind{seen}: {shown}{more}", "the same variables on every node", fix, name)
