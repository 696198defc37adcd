"""Memory per rank under every engine, and the size of a checkpoint, calculated without torch.

The formulas follow arXiv 1910.02054 and the engines' code. The sizes of the model come from
Task.model_sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from mmldlm.config.schema import Config
from mmldlm.engines.deepspeed_config import (
    MAX_LIVE,
    SUB_GROUP,
    bucket_elements,
    max_live_elements,
    resolve_stage,
    sub_group_elements,
)

GIB = 1 << 30
# Memory of a process with torch loaded (measured: 0.35 GiB resident on CPU), and on a GPU of its
# context and NCCL's buffers.
BASE_CPU, BASE_GPU = int(0.4 * GIB), int(1.2 * GIB)
# What cuBLAS works in, which torch's allocator gives it (measured on an H200).
CUBLAS_WORKSPACE = 64 << 20
# Activations as allocated over their own bytes, which benchmarks/step.py measures.
ALLOCATOR = 1.1
# From most to least memory per rank.
PLANS = ("single", "zero0", "zero1", "zero2", "zero3", "fsdp")


def plan_of(config: Config) -> str:
    """Return the engine of a config as an entry of PLANS.

    Raises:
        UserError: the config and its DeepSpeed JSON name different stages.
    """
    kind = config.engine.kind
    if kind == "deepspeed":
        return f"zero{resolve_stage(config)}"
    return {"ddp": "zero0"}.get(kind, kind)


def sizes_of_run(sizes: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return Task.model_sizes, and as "single_moment" the elements that Muon updates."""
    is_muon = config.optimizer.kind == "muon"
    return {**sizes, "single_moment": sizes.get("matrices", 0) if is_muon else 0}


def rank_bytes(
    config: Config,
    sizes: dict,
    world_size: int,
    plan: str,
    on_gpu: bool,
    offload: Collection[str] = (),
) -> int:
    """Return what one rank of a run needs (`bytes_per_rank`) under its own plan or another one.

    The settings of the run's engine apply to its own plan only.

    Args:
        sizes: From `sizes_of_run`.
        world_size: Number of ranks of the run.
        offload: As of `demand`.
    """
    engine, is_own = config.engine, plan == plan_of(config)
    json_path = engine.deepspeed_config if is_own and engine.kind == "deepspeed" else None
    # HSDP shards within each group of ranks.
    replicas = engine.hsdp_replicas if is_own and plan == "fsdp" else 1
    # The buckets of DDP are the gradients themselves.
    has_buckets = plan.startswith("zero") and not (is_own and engine.kind == "ddp")
    return bytes_per_rank(
        plan,
        sizes,
        world_size // replicas,
        config.training.dtype,
        on_gpu,
        bucket_elements(int(plan[4:]), on_gpu, json_path) if has_buckets else 0,
        offload=offload,
        accumulates=config.training.grad_accum_steps > 1,
        max_live=max_live_elements(json_path),
        sub_group=sub_group_elements(json_path),
        shard_gradients=engine.shard_gradients,
    )


class Demand(NamedTuple):
    """Bytes on one rank, without activations and the process itself.

    Attributes:
        kept: Weights, masters and moments, which exist all the time.
        before: Gradients that exist when the last backward pass of a step begins.
        after: Gradients when it ends.
        working: Gathered weights, buckets, and copies of gradients that are being reduced, in the
            forward and backward passes.
        step: What exists beside `kept` during the optimizer step, where it is more than in the
            passes: gradients, copies of them, buckets.
    """

    kept: float
    before: float
    after: float
    working: float
    step: float = 0.0


def demand(
    plan: str,
    sizes: dict,
    world_size: int,
    dtype: str,
    bucket: int,
    offload: Collection[str] = (),
    accumulates: bool = False,
    max_live: int = MAX_LIVE,
    sub_group: int = SUB_GROUP,
    shard_gradients: bool = False,
    on_gpu: bool = True,
) -> Demand:
    """Return what an engine keeps of the parameters, and when.

    Muon's exchanges (at most 768 MiB, after the activations are freed) are not in it.

    Args:
        plan: Plan among PLANS.
        sizes: Sizes of Task.model_sizes in elements; "single_moment": trainable elements that Muon
            updates.
        world_size: Number of ranks over which the plan shards.
        dtype: training.dtype.
        bucket: Elements of a communication bucket of DeepSpeed (engines/deepspeed_config.py); 0
            for DDP and FSDP.
        offload: "optimizer" and "param", if they are in another memory (see host_bytes).
        accumulates: Whether a step has several micro-batches.
        max_live: Elements that ZeRO-3 may keep gathered (stage3_max_live_parameters).
        sub_group: Elements of a rank that ZeRO-3 updates at a time (sub_group_size).
        shard_gradients: engine.shard_gradients, of FSDP2.
        on_gpu: Whether NCCL communicates, not gloo.
    """
    trainable, weights = sizes["trainable"], sizes["trainable"] + sizes["frozen"]
    per_rank, unit = trainable / world_size, sizes["largest_block"]
    low = 4 if dtype == "fp32" else 2
    # There are two buckets with overlap_comm.
    buckets = min(bucket, trainable) * 4 * 2
    # FSDP2 gathers the unit in use and what is outside the units, or prefetches another;
    # autocast copies as much of fp32 weights.
    gathered = low * min(2 * unit, weights)
    if plan in ("single", "zero0"):
        kept, gradients = 4 * weights + moment_bytes(sizes), 4 * trainable
        casts = gathered if low == 2 else 0
        if plan == "single":
            return Demand(kept, gradients if accumulates else 0, gradients, casts)
        # Both reduce through flat copies, which stay from step to step.
        return Demand(kept, 2 * gradients, 2 * gradients, casts)
    # Gradients, masters and moments are fp32; gradients sent to the host are in low precision.
    moments = moment_bytes(sizes) / world_size
    gradients, states = 4 * per_rank, 4 * per_rank + moments
    if "optimizer" in offload:
        gradients, states = low * per_rank, 0
    if plan == "zero1":
        # Gradients are unsharded, in low precision and accumulated in fp32; the step copies its
        # part of them.
        whole = (4 + (low if low == 2 else 0)) * trainable
        step = whole + gradients + buckets
        return Demand(low * weights + states, whole, whole, buckets, step)
    if plan == "zero2":
        return Demand(low * weights + states, gradients, gradients, buckets)
    if plan == "zero3":
        kept = (0 if "param" in offload else low * weights / world_size) + states
        # Weights stay gathered from the forward to the backward pass, up to the limit.
        resident = low * min(weights, max(max_live, 2 * unit))
        # The step copies the gradients of one sub-group at a time; on the host, if offloaded.
        copied = 0 if "optimizer" in offload else 4 * min(sub_group, per_rank)
        step = gradients + copied + buckets
        return Demand(kept, gradients, gradients, resident + buckets, step)
    assert plan == "fsdp", plan
    # Unsharded gradients until the last micro-batch reduces them. A unit is copied to be reduced,
    # and once more by gloo, which has no reduce-scatter.
    before = 0.0
    if accumulates:
        before = gradients if shard_gradients else 4 * trainable
    reduced = min(unit, trainable) * 4 * (1 if on_gpu else 2)
    kept = 4 * weights / world_size + moments
    return Demand(kept, before, max(before, gradients) + reduced, gathered)


def state_bytes(
    plan: str, sizes: dict, world_size: int, dtype: str, bucket: int, **more: Any
) -> int:
    """Return the peak bytes of one rank without activations; arguments as of `demand`."""
    found = demand(plan, sizes, world_size, dtype, bucket, **more)
    return int(found.kept + max(max(found.before, found.after) + found.working, found.step))


def moment_bytes(sizes: dict) -> int:
    """Return the bytes of the moments of all ranks: two fp32 numbers per trained element, one
    where Muon updates it.
    """
    return 8 * sizes["trainable"] - 4 * sizes.get("single_moment", 0)


def host_bytes(sizes: dict, world_size: int, dtype: str, offload: Collection[str]) -> int:
    """Return the bytes of host memory of one GPU rank's process, with its offloaded tensors."""
    low, weights = 4 if dtype == "fp32" else 2, sizes["trainable"] + sizes["frozen"]
    optimizer, parameters = 0.0, 0.0
    if "optimizer" in offload:
        optimizer = (8 * sizes["trainable"] + moment_bytes(sizes)) / world_size
    if "param" in offload:
        parameters = low * weights / world_size
    return int(optimizer + parameters) + BASE_CPU


def bytes_per_rank(
    plan: str, sizes: dict, world_size: int, dtype: str, on_gpu: bool, bucket: int, **more: Any
) -> int:
    """Return all bytes of one rank at the peak of a step: states, activations and logits of a
    micro-batch, and the process itself.

    The backward pass frees activations as it makes gradients. Its peak is at its beginning, where
    all activations exist, or at its end, where all gradients exist and one block's activations.
    The optimizer step, without activations, may need more than both.

    Args:
        plan, sizes, world_size, dtype, bucket, more: As of `demand`.
        on_gpu: Whether the rank computes on a GPU.
    """
    found = demand(plan, sizes, world_size, dtype, bucket, on_gpu=on_gpu, **more)
    logits = sizes["logits_gpu" if on_gpu else "logits_cpu"]
    beginning = found.before + sizes["activations"] * ALLOCATOR + logits
    end = found.after + sizes.get("working", sizes["activations"]) * ALLOCATOR
    base = BASE_GPU + CUBLAS_WORKSPACE if on_gpu else BASE_CPU
    return int(found.kept + max(max(beginning, end) + found.working, found.step)) + base


def checkpoint_bytes(plan: str, sizes: dict, dtype: str) -> int:
    """Return the bytes of one checkpoint of all ranks: weights, moments, and separate fp32 masters
    if any.
    """
    weights, trainable = sizes["trainable"] + sizes["frozen"], sizes["trainable"]
    low = 4 if dtype == "fp32" else 2
    if plan in ("single", "zero0", "fsdp"):
        return 4 * weights + moment_bytes(sizes)
    return low * weights + 4 * trainable + moment_bytes(sizes)
