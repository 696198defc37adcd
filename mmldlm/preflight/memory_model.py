"""Memory per rank under every engine, and the size of a checkpoint, calculated without torch.

The formulas follow arXiv 1910.02054 and the engines' code. The sizes of the model come from
Task.model_sizes.
"""

from __future__ import annotations

from collections.abc import Collection

GIB = 1 << 30
# Memory of a process with torch loaded (measured: 0.35 GiB resident on CPU), and on a GPU of its
# context and NCCL's buffers.
BASE_CPU, BASE_GPU = int(0.4 * GIB), int(1.2 * GIB)
# From most to least memory per rank.
PLANS = ("single", "zero0", "zero1", "zero2", "zero3", "fsdp")


def state_bytes(
    plan: str, sizes: dict, world_size: int, dtype: str, bucket: int, offload: Collection[str] = ()
) -> int:
    """Return the peak bytes of weights, gradients, fp32 masters, the optimizer's moments and
    buckets on one rank.

    Muon's exchanges (at most 512 MiB, after the activations are freed) are not in the peak.

    Args:
        plan: Plan among PLANS.
        sizes: Sizes of Task.model_sizes in elements; "single_moment": trainable elements that Muon
            updates.
        world_size: Number of ranks.
        dtype: training.dtype.
        bucket: Elements of a communication bucket of DeepSpeed (engines/deepspeed_config.py); 0
            for DDP and FSDP.
        offload: "optimizer" and "param", if they are in another memory (see host_bytes).
    """
    trainable, weights = sizes["trainable"], sizes["trainable"] + sizes["frozen"]
    per_rank = trainable / world_size
    low = 4 if dtype == "fp32" else 2
    # There are two buckets with overlap_comm.
    buckets = min(bucket, trainable) * 4 * 2
    if plan in ("single", "zero0"):
        # Weights stay in fp32 under autocast.
        ddp_buckets = buckets // 2 if plan == "zero0" else 0
        return 4 * weights + 4 * trainable + moment_bytes(sizes) + ddp_buckets
    # Gradients, masters and moments are fp32; gradients sent to the host are in low precision.
    moments = moment_bytes(sizes) / world_size
    gradients, states = 4 * per_rank, 4 * per_rank + moments
    if "optimizer" in offload:
        gradients, states = low * per_rank, 0
    if plan == "zero1":
        # Gradients are unsharded, in low precision and accumulated in fp32.
        return int(low * weights + (4 + (low if low == 2 else 0)) * trainable + states + buckets)
    if plan == "zero2":
        return int(low * weights + gradients + states + buckets)
    # The block in use, and the one that is being prefetched.
    gathered = 2 * sizes["largest_block"] * low
    if plan == "zero3":
        weight_bytes = 0 if "param" in offload else low * weights / world_size
        return int(weight_bytes + gradients + states + gathered + buckets)
    assert plan == "fsdp", plan
    return int(4 * weights / world_size + 4 * per_rank + moments + gathered)


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
    plan: str,
    sizes: dict,
    world_size: int,
    dtype: str,
    on_gpu: bool,
    bucket: int,
    offload: Collection[str] = (),
) -> int:
    """Return all bytes of one rank: states, activations and logits of a micro-batch, and the
    process itself.

    benchmarks/step.py compares the activations and logits with measured peaks.
    """
    base = BASE_GPU if on_gpu else BASE_CPU
    passes = int(sizes["activations"] * 1.1) + sizes["logits_gpu" if on_gpu else "logits_cpu"]
    return state_bytes(plan, sizes, world_size, dtype, bucket, offload) + passes + base


def checkpoint_bytes(plan: str, sizes: dict, dtype: str) -> int:
    """Return the bytes of one checkpoint of all ranks: weights, moments, and separate fp32 masters
    if any.
    """
    weights, trainable = sizes["trainable"] + sizes["frozen"], sizes["trainable"]
    low = 4 if dtype == "fp32" else 2
    if plan in ("single", "zero0", "fsdp"):
        return 4 * weights + moment_bytes(sizes)
    return low * weights + 4 * trainable + moment_bytes(sizes)
