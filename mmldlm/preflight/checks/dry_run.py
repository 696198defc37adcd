"""Level 4: two real training steps through the launcher, a save, and a step after a resume."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import uuid
from datetime import datetime
from pathlib import Path

from mmldlm.cluster.agent import AgentPool
from mmldlm.cluster.launcher_commands import (
    TRAIN,
    pdsh_environment,
    torchrun_command,
    train_arguments,
)
from mmldlm.preflight.agent import run_command
from mmldlm.preflight.check import Result, check, fail, ok, skip
from mmldlm.preflight.checks.collectives import group_seconds
from mmldlm.preflight.context import Context
from mmldlm.preflight.memory_model import checkpoint_bytes, plan_of
from mmldlm.utils.input_files import read_text
from mmldlm.utils.run_files import STEPS

DRY_STEPS = 2
DRY_VALIDATION_SAMPLES = 64
# Bytes per second of a checkpoint on its way to a shared file system.
SLOW_DISK = 100e6
COMPILE_SECONDS = 600


def dry_seconds(context: Context) -> int:
    """Return the time limit of one launch in level 4: imports, two steps, compilation if enabled,
    a checkpoint.
    """
    config, sizes = context.run_config, context.data_facts
    seconds: float = 140 + 4 * (group_seconds(context.world_size) - 25)
    seconds += COMPILE_SECONDS if config.training.compile_model else 0
    if "trainable" in sizes:
        seconds += checkpoint_bytes(plan_of(config), sizes, config.training.dtype) / SLOW_DISK
    return int(seconds)


def dry_run_arguments(context: Context, name: str, more: list[str]) -> list[str]:
    """Return the arguments of train.py for the dry run: those of the run, with another run name,
    and without what may take longer than its steps. A run evaluates after its last step: here a
    few samples.
    """
    overrides = [
        f"logging.run_name={name}",
        "logging.trackers=[]",
        "logging.log_freq=1",
        f"logging.eval_freq={1 << 30}",
        "logging.eval_samples=0",
        "training.profile=null",
    ]
    # Of several stores all samples are used.
    if getattr(context.run_config.data, "mixture", None) is None:
        overrides.append(f"data.max_validation_samples={DRY_VALIDATION_SAMPLES}")
    return [*train_arguments(context.options), *overrides, *more]


def run_training(context: Context, pool: AgentPool) -> None:
    """Level 4: fill context.dry_run with two steps, a save, and a third step after a resume;
    delete their files.
    """
    name = f".preflight_{uuid.uuid4().hex[:8]}"
    folder = Path(context.run_config.logging.save_dir) / name
    results: dict = {}
    context.dry_run = results
    try:
        first = [
            f"training.num_train_steps={DRY_STEPS}",
            f"logging.save_freq={DRY_STEPS}",
            "training.resume=null",
        ]
        results["train"] = _launch(context, pool, dry_run_arguments(context, name, first))
        results["log"] = _read_log(folder)
        if results["train"]["code"] == 0:
            more = [
                f"training.num_train_steps={DRY_STEPS + 1}",
                "logging.save_freq=1000000",
                "training.resume=auto",
            ]
            results["resume"] = _launch(context, pool, dry_run_arguments(context, name, more))
            results["log"] = _read_log(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read_log(folder: Path) -> list[dict]:
    path = folder / STEPS
    return [json.loads(line) for line in read_text(path).splitlines()] if path.exists() else []


def _launch(context: Context, pool: AgentPool, train_args: list[str]) -> dict:
    """Run train.py through the selected launcher; return {"code", "output", "seconds"}."""
    started, limit = time.monotonic(), dry_seconds(context)
    run = _run_torchrun if context.launcher == "torchrun" else _run_launcher
    result = run(context, pool, [TRAIN, *train_args], limit)
    return {**result, "seconds": time.monotonic() - started}


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
    environment = pdsh_environment(context.options.ssh_option)
    if context.has_gpus() is False:
        environment["DS_ACCELERATOR"] = os.environ.get("DS_ACCELERATOR", "cpu")
    with tempfile.TemporaryDirectory(prefix="mmldlm_preflight_") as folder:
        command = context.launcher_command(script, Path(folder) / "hostfile")
        return run_command(command, environment, limit)


def _last_error(output: str) -> str:
    """Return the last line with an error, else the last line."""
    lines = [line.strip() for line in output.strip().splitlines() if line.strip()]
    marked = [line for line in lines if "error:" in line.lower()]
    return (marked or lines or ["no output"])[-1][:300]


@check("DRY001", 4, "cluster", "two training steps")
def two_steps_run(context: Context) -> Result:
    """Two real steps of this config and a save run through the launcher; the report shows step and
    total time.
    """
    result = context.dry_run.get("train")
    if result is None:
        return skip("not run (see the failures above)")
    log = context.dry_run.get("log", [])
    if result["code"] != 0 or len(log) < 2:
        status = "timed out" if result["code"] is None else f"status {result['code']}"
        return fail(
            f"{status}: {_last_error(result['output'])}",
            "two steps and status 0",
            "fix the cause in the message, then try again",
        )
    if any(record.get("loss") is None for record in log):
        return fail(
            "the loss is not finite", "a finite loss", "mmldlm verify-data; lower optimizer.lr"
        )
    rate, step = log[1]["tokens_per_second"], _step_seconds(log)
    hours = step * context.run_config.training.num_train_steps / 3600
    data_share = log[1].get("data_share")
    data_wait = "" if data_share is None else f", {data_share:.0%} of it waiting for data"
    speed = f"{step:.2f} s per step{data_wait}, {rate:.0f} tokens/s"
    return ok(f"{result['seconds']:.0f} s in total, {speed}: about {hours:.1f} h for the run")


def _step_seconds(log: list[dict]) -> float:
    first, second = (datetime.fromisoformat(record["time"]) for record in log[:2])
    return max((second - first).total_seconds(), 1e-3)


@check("DRY002", 4, "cluster", "save and resume")
def save_and_resume(context: Context) -> Result:
    """The launcher resumes the checkpoint of these steps, and a third step follows."""
    result = context.dry_run.get("resume")
    if result is None:
        return skip("no checkpoint to resume (see DRY001)")
    steps = [record["step"] for record in context.dry_run.get("log", [])]
    if result["code"] != 0 or steps[-1:] != [3]:
        return fail(
            f"status {result['code']}: {_last_error(result['output'])}",
            "a third step after the resume",
            "check the checkpoint folder (CKPT001, CKPT002) and the message",
        )
    return ok("saved, loaded, and one more step")
