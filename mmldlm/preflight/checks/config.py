"""Config against the DeepSpeed JSON, the world size and the data.

The data are opened in a child process, because their file system may hang, and torch, which
preflight itself works without, is imported there with the task. Run as a module, this child:
CONFIG.yaml WORLD_SIZE. It prints a JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

from mmldlm.config.load import to_yaml
from mmldlm.config.schema import Config
from mmldlm.distributed.error_reporting import exit_without_teardown
from mmldlm.engines.deepspeed_config import merged_config
from mmldlm.errors import UserError
from mmldlm.preflight.check import Result, check, fail, ok, skip
from mmldlm.preflight.context import Context
from mmldlm.preflight.memory_model import sizes_of_run
from mmldlm.tasks.base import Task
from mmldlm.tasks.registry import load_config
from mmldlm.utils.run_module import module_command

DATA_IDLE_SECONDS = 30
DATA_CHECKS = {"CFG003", "DATA001", "MEM001", "MEM002", "DISK001", "RES001", "GPU001"}
"""Checks that read data_facts or data_probe_error."""


@contextlib.contextmanager
def data_probe(context: Context) -> Iterator[None]:
    """Open the data in a child process while the block runs, then wait for it; store its result
    in the context, or why it has none. Without a check that reads it, start no child.
    """
    # At level 4 the dry run reads it, too.
    is_read = context.level >= 4 or bool(DATA_CHECKS & context.check_ids)
    if context.config is None or not is_read:
        yield
        return
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".yaml") as file:
        file.write(to_yaml(context.config))
        file.flush()
        child = subprocess.Popen(
            module_command(__name__, file.name, str(context.world_size)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            yield
        finally:
            _store_result(context, child)


def _store_result(context: Context, child: subprocess.Popen) -> None:
    try:
        output, errors = _communicate_while_active(child)
    except subprocess.TimeoutExpired:
        child.kill()
        context.data_probe_error = (
            f"reading the data stalled for {DATA_IDLE_SECONDS} s: its file system may hang"
        )
        return
    if child.returncode == 0:
        context.data_facts = json.loads(output.strip().splitlines()[-1])
    else:
        lines = errors.strip().splitlines()
        context.data_probe_error = lines[-1] if lines else f"status {child.returncode}"


def _communicate_while_active(child: subprocess.Popen) -> tuple[str, str]:
    """Return the child's output.

    Raises:
        subprocess.TimeoutExpired: it used no CPU time for DATA_IDLE_SECONDS. A slow child is not a
            hung one.
    """
    import psutil

    last_times, last_change = None, time.monotonic()
    while True:
        try:
            return child.communicate(timeout=1)
        except subprocess.TimeoutExpired:
            # User and system time.
            times = psutil.Process(child.pid).cpu_times()[:2]
            if times != last_times:
                last_times, last_change = times, time.monotonic()
            elif time.monotonic() - last_change > DATA_IDLE_SECONDS:
                raise


def measure(config: Config, world_size: int) -> dict:
    """Return samples and model sizes, or the errors of engine and data.

    Returns:
        {"engine_error"} and {"data_error"} as {"expected", "found", "fix"} if any; else "samples",
        "fingerprint", "longest" (tokens), "shape", "config" (with what the data decides) and the
        entries of Task.model_sizes.
    """
    from mmldlm.engines.build import check_engine
    from mmldlm.tasks.registry import find_task, open_run_data

    facts: dict = {}
    try:
        check_engine(config, world_size)
    except UserError as error:
        facts["engine_error"] = _to_json(error)
    try:
        data = open_run_data(config)
    except UserError as error:
        return {**facts, "data_error": _to_json(error)}
    config, task = data.config, find_task(config.task)
    facts["samples"] = {
        "train": len(data.train_lengths),
        "validation": len(data.validation_lengths),
    }
    if config.engine.kind == "deepspeed" and config.training.dtype == "fp16":
        facts["cpu_has_fp16"] = _cpu_has_fp16()
    facts["fingerprint"] = data.fingerprint()
    facts["longest"] = int(max(data.train_lengths.max(), data.validation_lengths.max()))
    facts["shape"] = data.shape()
    facts["config"] = config.model_dump(mode="json")
    try:
        facts.update(sizes_of_run(task.model_sizes(config, facts["longest"]) or {}, config))
        facts["checkpointed"] = _checkpointed_sizes(task, config, facts["longest"])
    except UserError as error:
        facts["engine_error"] = _to_json(error)
    return facts


def _checkpointed_sizes(task: Task, config: Any, longest: int) -> dict[str, dict]:
    """Return n -> what differs in the sizes of the model with model.gradient_checkpointing=n, from
    the least work to the least memory; {} where it is on or unknown.
    """
    if getattr(config.model, "gradient_checkpointing", True):
        return {}
    found = {}
    for every in (4, 2, 1):
        changed = config.model_copy(deep=True)
        changed.model.gradient_checkpointing = every
        sizes: Mapping[str, Any] = task.model_sizes(changed, longest) or {}
        found[str(every)] = {key: sizes[key] for key in ("activations", "working") if key in sizes}
    return found


def _cpu_has_fp16() -> bool:
    import torch

    return torch.ops.mkldnn._is_mkldnn_fp16_supported()


def _to_json(error: UserError) -> dict[str, str]:
    return {"expected": error.expected, "found": error.found, "fix": error.fix}


def main() -> int:
    """Print the facts of the config file in sys.argv; return the exit code."""
    path, world_size = sys.argv[1:]
    facts = measure(load_config(None, path, []), int(world_size))
    print("\n" + json.dumps(facts), flush=True)
    return 0


@check("CFG001", 0, "head", "config")
def config_is_valid(context: Context) -> Result:
    """Preset, file and overrides form a config without unknown keys or invalid values."""
    if context.script is not None:
        return skip(context.no_config)
    error = context.config_error
    return ok("valid") if error is None else fail(error.found, error.expected, error.fix)


@check("CFG002", 0, "head", "DeepSpeed JSON")
def deepspeed_json_agrees(context: Context) -> Result:
    """The DeepSpeed JSON agrees with the config; DeepSpeed knows, and mmldlm supports, all of its
    keys.
    """
    config = context.config
    if config is None:
        return skip(context.no_config)
    if config.engine.kind != "deepspeed":
        return skip(f"engine.kind={config.engine.kind}")
    error = _json_error(context)
    if error is not None:
        return fail(error.found, error.expected, error.fix)
    return ok(config.engine.deepspeed_config or "none given, defaults")


def _json_error(context: Context) -> UserError | None:
    """Return why the DeepSpeed JSON cannot be used; None if it can, or if the run has none."""
    if context.run_config.engine.kind == "deepspeed":
        try:
            merged_config(context.run_config, max(context.world_size, 1))
        except UserError as error:
            return error
    return None


@check("CFG003", 0, "head", "batch arithmetic")
def batch_arithmetic(context: Context) -> Result:
    """The data can fill a batch of micro-batch x accumulation x ranks, and the engine supports
    this number of ranks.
    """
    config, world_size = context.config, context.world_size
    if config is None or world_size == 0:
        return skip(context.no_config if config is None else "no nodes")
    if config.engine.kind == "single" and world_size > 1:
        return fail(
            f"{world_size} ranks",
            "one for engine.kind=single",
            "set engine.kind=deepspeed, or one slot on one node",
        )
    error = context.data_facts.get("engine_error")
    # CFG002 reports an error of the JSON.
    if error is not None and _json_error(context) is None:
        return fail(error["found"], error["expected"], error["fix"])
    training, batch = config.training, context.global_batch
    measured = (
        f"{batch} = {training.train_batch_size} per rank x {training.grad_accum_steps} accumulated"
        f" x {world_size} ranks"
    )
    samples = context.data_facts.get("samples", {}).get("train")
    if samples is not None and batch > samples:
        fix = "lower training.train_batch_size or grad_accum_steps"
        return fail(measured, f"at most {samples}, the training samples", fix)
    return ok(measured)


@check("DATA001", 0, "head", "data fits the config")
def data_fits_config(context: Context) -> Result:
    """The store exists, is complete, and agrees with model.latent_dim, vocabulary, tokenizer and
    max_seq_len.
    """
    error = context.data_facts.get("data_error")
    if context.config is None:
        return skip(context.no_config)
    if error is not None:
        return fail(error["found"], error["expected"], error["fix"])
    if context.data_probe_error is not None:
        return fail(
            context.data_probe_error,
            "a readable store",
            "run `mmldlm config` for the full message",
        )
    facts = context.data_facts
    return ok(", ".join([f"{facts['samples']['train']:,} samples", *facts["shape"]]))


if __name__ == "__main__":
    exit_without_teardown(main())  # that of torch takes half a second
