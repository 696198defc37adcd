"""Memory and disk space of the run, calculated from the model sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mmldlm.checkpoints.locate import list_checkpoints
from mmldlm.engines.deepspeed_config import offloaded
from mmldlm.errors import UserError
from mmldlm.preflight import memory_model
from mmldlm.preflight.check import Result, check, fail, ok, skip, warn
from mmldlm.preflight.context import Context
from mmldlm.utils.formatting import format_bytes

# Fractions of the available memory: the limit, and the limit without a warning.
USABLE, COMFORTABLE = 0.95, 0.8


def _missing_sizes(context: Context) -> str | None:
    """Return why memory and disk space cannot be calculated; None if they can."""
    if context.script is not None:
        return context.no_config
    if context.config is None or "trainable" not in context.data_facts:
        if "longest" in context.data_facts:
            return "the task has no model_sizes, which docs/tasks.md describes"
        return "no model sizes (see CFG001 and DATA001)"
    try:
        memory_model.plan_of(context.config)
    except UserError:
        return "no ZeRO stage (see CFG002)"
    return None


@check("MEM001", 0, "cluster", "memory")
def memory_fits(context: Context) -> Result:
    """Weights, gradients, optimizer and activations of a rank fit into the smallest node, for the
    ZeRO stage.

    Elements are counted for the meta-device model; activations are the tensors that autograd keeps
    for one micro-batch of the longest text. If they do not fit, the fix names the first ZeRO stage
    (or FSDP) that does.
    """
    if (reason := _missing_sizes(context)) is not None:
        return skip(reason)
    smallest = _smallest_memory(context)
    if smallest is None:
        return skip("no node reported the memory of its ranks")
    location, available, on_gpu = smallest
    config = context.run_config
    plan = memory_model.plan_of(config)
    # Without a GPU, offloaded tensors would stay in the same memory.
    offloaded = _offloaded(context) if on_gpu else {}

    def rank_bytes(other: str, changed: Mapping[str, float] | None = None) -> int:
        sizes = {**context.data_facts, **(changed or {})}
        offload = offloaded if other == plan else ()
        world_size = context.world_size
        return memory_model.rank_bytes(config, sizes, world_size, other, on_gpu, offload)

    needed = {other: rank_bytes(other) for other in memory_model.PLANS}
    name = f"{plan} with offload" if offloaded else plan
    measured = (
        f"{name} needs {format_bytes(needed[plan])} per rank; {location} has"
        f" {format_bytes(available)}"
    )
    if needed[plan] <= COMFORTABLE * available:
        return ok(measured)
    table = ", ".join(f"{other} {format_bytes(needed[other])}" for other in memory_model.PLANS[1:])
    if needed[plan] <= USABLE * available:
        fix = f"watch the memory of the first steps; per rank: {table}"
        return warn(measured, "some spare memory (allocators fragment)", fix)
    fixes = [
        f"use {other} (engine.zero_stage or engine.kind)"
        for other in memory_model.PLANS[1:]
        if needed[other] <= USABLE * available
    ][:1]
    for every, sizes in context.data_facts.get("checkpointed", {}).items():
        then = rank_bytes(plan, sizes)
        if then <= USABLE * available:
            key = "model.gradient_checkpointing"
            fixes.append(f"set {key}={every} ({name} then needs {format_bytes(then)})")
            break
    if fixes:
        fix = ", or ".join(fixes)
    else:
        fix = "lower training.train_batch_size, set model.gradient_checkpointing=true, "
        if config.training.grad_accum_steps > 1 and plan == "fsdp":
            fix += "engine.shard_gradients=true, "
        fix += "offload (ds_configs/zero3_offload.json), " if on_gpu and not offloaded else ""
        fix += f"or use more ranks{'' if on_gpu else ', fewer of them per node'}"
    expected = f"at most {format_bytes(USABLE * available)} (per rank: {table})"
    return _fail_or_warn(context)(measured, expected, fix)


@check("MEM002", 0, "cluster", "memory for offload")
def hosts_hold_offloaded_tensors(context: Context) -> Result:
    """The tensors that the DeepSpeed JSON offloads to CPU memory fit next to the processes of each
    node's ranks.
    """
    if (reason := _missing_sizes(context)) is not None:
        return skip(reason)
    offloaded = [tensors for tensors, device in _offloaded(context).items() if device == "cpu"]
    if not offloaded:
        return skip("nothing is offloaded to CPU memory")
    smallest = _smallest_memory(context, of_hosts=True)
    if smallest is None:
        return skip("no node reported its memory and GPUs")
    location, available, _ = smallest
    needed = memory_model.host_bytes(
        context.data_facts, context.world_size, context.run_config.training.dtype, offloaded
    )
    measured = (
        f"{' and '.join(offloaded)}: {format_bytes(needed)} per rank; {location} has"
        f" {format_bytes(available)}"
    )
    if needed <= USABLE * available:
        return ok(measured)
    expected = f"at most {format_bytes(USABLE * available)}"
    return _fail_or_warn(context)(measured, expected, "use more nodes, or offload less")


def _fail_or_warn(context: Context) -> Callable[[str, str, str], Result]:
    """Return warn at level 0 with a hostfile: only this machine is known, and the nodes may be
    larger.
    """
    return fail if context.local or context.level > 0 else warn


def _offloaded(context: Context) -> dict[str, str]:
    """Return "optimizer" and "param" -> device of what the DeepSpeed JSON offloads."""
    engine, plan = context.run_config.engine, memory_model.plan_of(context.run_config)
    return offloaded(int(plan[4:]), engine.deepspeed_config) if engine.kind == "deepspeed" else {}


def _smallest_memory(context: Context, of_hosts: bool = False) -> tuple[str, float, bool] | None:
    """Return (location, bytes per rank, whether on a GPU) of the node with the least memory.

    Args:
        context: Facts of the nodes, or of this machine at level 0.
        of_hosts: Whether to take the host memory of nodes with GPUs instead of their GPU memory.
    """
    candidates = []
    for node in context.nodes:
        facts = context.facts.get(node.name) or (context.head if context.level == 0 else {})
        location = node.name if context.level or context.local else "a node like this machine"
        gpus = facts.get("gpus", {}).get("value", {}).get("gpus", ())
        # Lost GPUs have none, and some do not tell it.
        free = [gpu["memory_free"] for gpu in gpus if gpu.get("memory_free") is not None]
        memory = facts.get("memory", {}).get("value")
        if gpus and not of_hosts:
            if free:
                candidates.append((f"a GPU of {location}", min(free[: node.slots]), True))
        elif memory and (gpus or not of_hosts):
            candidates.append(
                (
                    f"{location} for each of {node.slots} rank(s)",
                    memory["available"] / node.slots,
                    False,
                )
            )
    return min(candidates, key=lambda entry: entry[1], default=None)


@check("DISK001", 0, "cluster", "checkpoints fit")
def checkpoints_fit(context: Context) -> Result:
    """The checkpoints that this run keeps, plus one being written, fit on the disk of
    logging.save_dir; those that a resumed run has there already need no more space.
    """
    if (reason := _missing_sizes(context)) is not None:
        return skip(reason)
    config = context.run_config
    checkpoints, num_steps = config.checkpoints, config.training.num_train_steps
    each = memory_model.checkpoint_bytes(
        memory_model.plan_of(config), context.data_facts, config.training.dtype
    )
    kept = (
        checkpoints.keep_last
        + (checkpoints.keep_best is not None)
        + (num_steps // checkpoints.keep_every if checkpoints.keep_every else 0)
    )
    saved = min(_num_saved(config.run_dir()), kept)
    count = kept - saved + 1
    folders = context.probe_values("checkpoints") or {"": context.head_value("checkpoints") or {}}
    node, folder = min(folders.items(), key=lambda item: item[1].get("free", float("inf")))
    if "free" not in folder:
        return skip("free space could not be measured (see CKPT001)")
    more = f" beside the {saved} saved" if saved else ""
    needed = f"{count} x {format_bytes(each)} = {format_bytes(count * each)} needed{more}"
    measured = f"{needed}, {format_bytes(folder['free'])} free"
    if folder.get("bytes_per_second"):
        measured += f"; about {each / folder['bytes_per_second']:.1f} s per save from one node"
    if count * each > folder["free"]:
        fix = (
            "free some space, lower checkpoints.keep_last, or set logging.save_dir to a larger"
            " disk"
        )
        return fail(
            measured,
            f"space for all of them in {folder['folder']}{f' on {node}' if node else ''}",
            fix,
        )
    return ok(measured)


def _num_saved(run_dir: Path) -> int:
    try:
        return len(list_checkpoints(run_dir))
    except UserError:
        # RES001 reports it.
        return 0
