"""Levels 3 and 4: run collectives on the nodes, and two real training steps through the
launcher.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

from mmldlm.cluster.launcher_commands import (
    TRAIN,
    deepspeed_command,
    mpi_command,
    srun_command,
    torchrun_command,
)
from mmldlm.preflight.checks.dry_run import CHECKPOINTS
from mmldlm.preflight.collect import data_address
from mmldlm.preflight.context import Context, train_arguments
from mmldlm.preflight.memory_model import checkpoint_bytes
from mmldlm.preflight.remote.ssh import AgentPool
from mmldlm.utils.entry_point import module_command
from mmldlm.utils.input_files import read_text

DRY_STEPS = 2
SLOW_DISK = 100e6  # bytes per second of a checkpoint on its way to a shared file system
COMPILE_SECONDS = 600

Group = tuple[str, list[str]]  # name of a round, its nodes


def group_seconds(world_size: int) -> int:
    """Return the time limit of a process group in level 3; NCCL's start takes longer with many
    ranks.
    """
    return 25 + world_size // 16


def collective_seconds(world_size: int) -> int:
    """Return the time limit of level 3: imports, up to four groups and their measurements."""
    return 110 + 4 * (group_seconds(world_size) - 25)


def dry_seconds(context: Context) -> int:
    """Return the time limit of one launch in level 4: imports, two steps, compilation if enabled,
    a checkpoint.
    """
    config, sizes = context.config, context.data_facts
    seconds = 140 + 4 * (group_seconds(context.world_size) - 25)
    seconds += COMPILE_SECONDS if config.training.compile_model else 0
    if "trainable" in sizes:
        seconds += (
            checkpoint_bytes(context.engine_plan(), sizes, config.training.dtype) / SLOW_DISK
        )
    return int(seconds)


def pair_rounds(names: list[str]) -> list[list[list[str]]]:
    """Return two rounds of pairs (a group of three if the count is odd): a bad node fails in both
    rounds (DLRover).
    """
    if len(names) < 3:
        return [[names]]
    rotated = names[1:] + names[:1]
    return [_pairs(names), _pairs(rotated)]


def _pairs(names: list[str]) -> list[list[str]]:
    groups = [names[i : i + 2] for i in range(0, len(names) - 1, 2)]
    if len(names) % 2:
        groups[-1].append(names[-1])
    return groups


def run_collectives(context: Context, pool: AgentPool) -> None:
    """Level 3: fill context.collectives: "rounds" [(name, nodes)], "ranks" {(node, local rank):
    {round: result}}.
    """
    names = [name for name in context.names if name in context.facts and name not in pool.failures]
    if not names:
        return
    groups = _collective_groups(context, names)
    rounds = _rounds_per_rank(context, pool, names, groups)
    limit = collective_seconds(context.world_size)

    def run_args(node: str) -> dict:
        commands = []
        for local_rank in range(context.slots(node)):
            rounds_json = json.dumps(rounds[(node, local_rank)])
            command = module_command("mmldlm.preflight.dynamic.collective_test", rounds_json)
            environment = {"LOCAL_RANK": str(local_rank), "OMP_NUM_THREADS": "1"}
            environment = {**(context.environment_on(node) or {}), **environment}
            commands.append({"command": command, "environment": environment})
        return {"commands": commands, "seconds": limit}

    answers = pool.call("run", run_args, timeout=limit + 10)
    ranks = {
        (node, local_rank): _parse_rounds(output)
        for node, outputs in answers.items()
        for local_rank, output in enumerate(outputs)
    }
    context.collectives = {"rounds": groups, "ranks": ranks}
    context.failures.update(pool.failures)


def _collective_groups(context: Context, names: list[str]) -> list[Group]:
    """Return the groups of all rounds: two rounds of pairs, all nodes, and the group of FSDP's
    checkpoint writers.
    """
    groups = [(f"{number}.{index}", members) for number, found in enumerate(pair_rounds(names), 1)
              for index, members in enumerate(found, 1)]  # fmt: skip
    if len(names) > 2:
        groups.append(("all", names))
    if context.config is not None and context.config.engine.kind == "fsdp" and context.has_gpus():
        groups.append((CHECKPOINTS, names))  # the writers use gloo next to NCCL (engines/fsdp.py)
    return groups


def _rounds_per_rank(
    context: Context, pool: AgentPool, names: list[str], groups: list[Group]
) -> dict:
    """Return (node, local rank) -> list of rounds for collective_test.py, each with its rank,
    address and port.
    """
    rounds: dict[tuple[str, int], list] = {
        (n, r): [] for n in names for r in range(context.slots(n))
    }
    for name, members in groups:
        opened = pool.agents[members[0]].request("listen", {"ports": [0]})
        pool.agents[members[0]].request("close")
        address = "127.0.0.1" if context.local else data_address(context, members[0])
        world, rank = sum(context.slots(member) for member in members), 0
        for member in members:
            for local_rank in range(context.slots(member)):
                entry = {"name": name, "rank": rank, "world": world, "address": address}
                entry |= {"port": opened["ports"][0]["port"], "seconds": group_seconds(world)}
                rounds[(member, local_rank)].append({**entry, "on_cpu": name == CHECKPOINTS})
                rank += 1
    return rounds


def _parse_rounds(output: dict) -> dict[str, dict]:
    """Return round -> result from the output of one rank; an error as the round "start" if there
    is none.
    """
    lines = [json.loads(line) for line in output["output"].splitlines() if line.startswith("{")]
    found = {line["round"]: line for line in lines}
    if not found:
        last = (output["output"].strip().splitlines() or [f"status {output['code']}"])[-1]
        found["start"] = {"error": last}
    return found


def dry_run_arguments(context: Context, name: str, more: list[str]) -> list[str]:
    """Return the arguments of train.py for the dry run: those of the run, with another run
    name.
    """
    own = [
        f"logging.run_name={name}",
        "logging.wandb.mode=disabled",
        "logging.log_freq=1",
        f"logging.eval_freq={1 << 30}",
    ]
    return [*train_arguments(context.options), *own, *more]


def run_training(context: Context, pool: AgentPool) -> None:
    """Level 4: fill context.dry_run with two steps, a save, and a third step after a resume;
    delete their files.
    """
    name = f".preflight_{uuid.uuid4().hex[:8]}"
    folder = Path(context.config.logging.save_dir) / name
    found: dict = {}
    context.dry_run = found
    try:
        first = [
            f"training.num_train_steps={DRY_STEPS}",
            f"logging.save_freq={DRY_STEPS}",
            "training.resume=null",
        ]
        found["train"] = _launch(context, pool, dry_run_arguments(context, name, first))
        found["log"] = _read_log(folder)
        if found["train"]["code"] == 0:
            more = [
                f"training.num_train_steps={DRY_STEPS + 1}",
                "logging.save_freq=1000000",
                "training.resume=auto",
            ]
            found["resume"] = _launch(context, pool, dry_run_arguments(context, name, more))
            found["log"] = _read_log(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read_log(folder: Path) -> list[dict]:
    path = folder / "training_log.jsonl"
    return [json.loads(line) for line in read_text(path).splitlines()] if path.exists() else []


def _launch(context: Context, pool: AgentPool, train_args: list[str]) -> dict:
    """Run train.py through the selected launcher; return {"code", "output", "seconds"}."""
    started, limit = time.monotonic(), dry_seconds(context)
    run = _run_torchrun if context.launcher == "torchrun" else _run_launcher
    found = run(context, pool, [TRAIN, *train_args], limit)
    return {**found, "seconds": time.monotonic() - started}


def _run_torchrun(context: Context, pool: AgentPool, script: list[str], limit: int) -> dict:
    """Run torchrun on every node; return the result of the first node that failed, else of the
    first node.
    """
    address, port = context.master_address(), context.options.master_port

    def run_args(node: str) -> dict:
        command = torchrun_command(context.nodes, context.names.index(node), address, port, script)
        return {
            "commands": [{"command": command, "environment": {"OMP_NUM_THREADS": "1"}}],
            "seconds": limit,
        }

    answers = pool.call("run", run_args, timeout=limit + 10)
    outputs = [answer[0] for answer in answers.values()]
    return next(
        (o for o in outputs if o["code"] != 0),
        outputs[0] if outputs else {"code": None, "output": ""},
    )


def _run_launcher(context: Context, pool: AgentPool, script: list[str], limit: int) -> dict:
    """Run deepspeed, mpirun or srun on this machine."""
    options, address = context.options, context.master_address()
    environment = {**os.environ, "DEEPSPEED_TIMEOUT": "2"}
    if not context.has_gpus():
        environment.setdefault("DS_ACCELERATOR", "cpu")
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", prefix="mmldlm_hostfile_"
    ) as hostfile:  # the user's may be a pipe, read once
        hostfile.write("".join(f"{node.name} slots={node.slots}\n" for node in context.nodes))
        hostfile.flush()
        if context.launcher == "mpi":
            command = mpi_command(context.nodes, context.local, {}, options.ssh_port, script)
        elif context.launcher == "slurm":
            command = srun_command(context.nodes, address, options.master_port, script)
        else:
            command = deepspeed_command(
                context.nodes,
                context.local,
                hostfile.name,
                address,
                options.master_port,
                options.ssh_port,
                script,
            )
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit)
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            code = None
    return {"code": code, "output": output[-8000:]}
