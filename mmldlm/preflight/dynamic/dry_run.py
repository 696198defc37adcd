"""Levels 3 and 4: run collectives on the nodes, and two real training steps through the launcher."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from mmldlm.cluster.launcher_commands import TRAIN, deepspeed_command, mpi_command, srun_command, torchrun_command
from mmldlm.preflight.checks.dry_run import CHECKPOINTS
from mmldlm.preflight.collect import data_address
from mmldlm.preflight.context import Context
from mmldlm.preflight.memory_model import checkpoint_bytes
from mmldlm.preflight.remote.ssh import ROOT, AgentPool

DRY_STEPS = 2
SLOW_DISK = 100e6  # bytes a second of a checkpoint on its way to a shared file system
COMPILE_SECONDS = 600


def group_seconds(world_size: int) -> int:
    """Time limit of a process group in level 3: NCCL's start takes longer with many ranks."""
    return 25 + world_size // 16


def collective_seconds(world_size: int) -> int:
    """Time limit of level 3: imports, up to four groups, and what they measure."""
    return 110 + 4 * (group_seconds(world_size) - 25)


def dry_seconds(context: Context) -> int:
    """Time limit of a launch in level 4: imports, two steps, a compilation where it is asked for, a checkpoint."""
    config, sizes = context.config, context.plan
    seconds = 140 + 4 * (group_seconds(context.world_size) - 25)
    seconds += COMPILE_SECONDS if config.training.compile_model else 0
    if "trainable" in sizes:
        seconds += checkpoint_bytes(context.engine_plan(), sizes, config.training.dtype) / SLOW_DISK
    return int(seconds)


def pair_rounds(names: list[str]) -> list[list[list[str]]]:
    """Two rounds of groups of two (a third joins where the count is odd): a bad node is in two bad groups (DLRover)."""
    if len(names) < 3:
        return [[names]]
    rotated = names[1:] + names[:1]
    return [_pairs(names), _pairs(rotated)]


def _pairs(names: list[str]) -> list[list[str]]:
    groups = [names[i : i + 2] for i in range(0, len(names) - 1, 2)]
    if len(names) % 2:
        groups[-1].append(names[-1])
    return groups


def rehearse_collectives(context: Context, fleet: AgentPool) -> None:
    """Level 3. Fills context.collectives: rounds [(name, nodes)], ranks {(node, local rank): {round: found}}."""
    names = [name for name in context.names if name in context.facts and name not in fleet.failures]
    if not names:
        return
    groups = [(f"{number}.{index}", members) for number, found in enumerate(pair_rounds(names), 1)
              for index, members in enumerate(found, 1)]  # fmt: skip
    if len(names) > 2:
        groups.append(("all", names))
    if context.config is not None and context.config.engine.kind == "fsdp" and context.has_gpus():
        groups.append((CHECKPOINTS, names))  # its writers agree over gloo, beside NCCL (engines/fsdp.py)
    places: dict[tuple[str, int], list] = {(n, r): [] for n in names for r in range(context.slots(n))}
    for name, members in groups:
        opened = fleet.agents[members[0]].request("listen", {"ports": [0]})
        fleet.agents[members[0]].request("close")
        address = "127.0.0.1" if context.local else data_address(context, members[0])
        world, rank = sum(context.slots(member) for member in members), 0
        for member in members:
            for local_rank in range(context.slots(member)):
                place = {"name": name, "rank": rank, "world": world, "address": address}
                place |= {"seconds": group_seconds(world), "on_cpu": name == CHECKPOINTS}
                places[(member, local_rank)].append({**place, "port": opened["ports"][0]["port"]})
                rank += 1

    limit = collective_seconds(context.world_size)

    def asked(node: str) -> dict:
        commands = []
        for local_rank in range(context.slots(node)):
            command = [
                sys.executable,
                "-m",
                "mmldlm.preflight.dynamic.collective_test",
                json.dumps(places[(node, local_rank)]),
            ]
            environment = {"LOCAL_RANK": str(local_rank), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            commands.append(
                {"command": command, "environment": {**(context.environment_on(node) or {}), **environment}}
            )
        return {"commands": commands, "seconds": limit}

    answers = fleet.ask("run", asked, timeout=limit + 10)
    ranks = {}
    for node, outputs in answers.items():
        for local_rank, output in enumerate(outputs):
            lines = [json.loads(line) for line in output["output"].splitlines() if line.startswith("{")]
            found = {line["round"]: line for line in lines}
            if not found:
                last = (output["output"].strip().splitlines() or [f"status {output['code']}"])[-1]
                found["start"] = {"error": last}
            ranks[(node, local_rank)] = found
    context.collectives = {"rounds": groups, "ranks": ranks}
    context.failures.update(fleet.failures)


def dry_run_arguments(context: Context, name: str, more: list[str]) -> list[str]:
    """Words of train.py for the rehearsal: the run's own, with two steps, a save, and a folder of its own."""
    options = context.options
    words = [w for pair in (("--config-name", options.config_name), ("--config", options.config),
                            ("--deepspeed_config", options.deepspeed_config)) if pair[1] for w in pair]  # fmt: skip
    own = [
        f"logging.run_name={name}",
        "logging.wandb.mode=disabled",
        "logging.log_freq=1",
        f"logging.eval_freq={1 << 30}",
    ]
    return [*words, *options.overrides, *own, *more]


def rehearse_training(context: Context, fleet: AgentPool) -> None:
    """Level 4. Fills context.dry_run: steps, save, resume, losses, seconds a step; removes what it wrote."""
    name = f".preflight_{uuid.uuid4().hex[:8]}"
    folder = Path(context.config.logging.save_dir) / name
    found: dict = {}
    context.dry_run = found
    try:
        first = [f"training.num_train_steps={DRY_STEPS}", f"logging.save_freq={DRY_STEPS}", "training.resume=null"]
        found["train"] = _launch(context, fleet, dry_run_arguments(context, name, first))
        found["log"] = _log(folder)
        if found["train"]["code"] == 0:
            more = [f"training.num_train_steps={DRY_STEPS + 1}", "logging.save_freq=1000000", "training.resume=auto"]
            found["resume"] = _launch(context, fleet, dry_run_arguments(context, name, more))
            found["log"] = _log(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _log(folder: Path) -> list[dict]:
    path = folder / "training_log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _launch(context: Context, fleet: AgentPool, words: list[str]) -> dict:
    """Run train.py with these words through the chosen launcher: {"code", "output", "seconds"}."""
    options = context.options
    address = context.master_address()
    script = [TRAIN, *words]
    environment = {**os.environ, "DEEPSPEED_TIMEOUT": "2"}
    if not context.has_gpus():
        environment.setdefault("DS_ACCELERATOR", "cpu")
    started, limit = time.monotonic(), dry_seconds(context)
    if context.launcher == "torchrun":

        def asked(node: str) -> dict:
            line = torchrun_command(context.nodes, context.names.index(node), address, options.master_port, script)
            return {"commands": [{"command": line, "environment": {"OMP_NUM_THREADS": "1"}}], "seconds": limit}

        answers = fleet.ask("run", asked, timeout=limit + 10)
        outputs = [answer[0] for answer in answers.values()]
        bad = next((o for o in outputs if o["code"] != 0), outputs[0] if outputs else {"code": None, "output": ""})
        return {**bad, "seconds": time.monotonic() - started}
    if context.launcher == "mpi":
        line = mpi_command(context.nodes, context.local, {}, options.ssh_port, script)
    elif context.launcher == "slurm":
        line = srun_command(context.nodes, address, options.master_port, script)
    else:
        port = options.master_port
        hostfile = tempfile.NamedTemporaryFile("w", prefix="mmldlm_hostfile_")  # the user's may be a pipe, read once
        hostfile.write("".join(f"{node.name} slots={node.slots}\n" for node in context.nodes))
        hostfile.flush()
        line = deepspeed_command(context.nodes, context.local, hostfile.name, address, port, options.ssh_port, script)
    process = subprocess.Popen(
        line, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        code = None
    return {"code": code, "output": output[-8000:], "seconds": time.monotonic() - started}
