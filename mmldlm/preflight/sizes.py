"""Bytes a rank needs under every engine, and bytes of a checkpoint (arXiv 1910.02054, and the engines' own code)."""

from __future__ import annotations

GIB = 1 << 30
# A rank's interpreter with torch loaded (measured: 0.35 GiB resident on CPU); on a GPU, its context and NCCL's buffers.
BASE_CPU, BASE_GPU = int(0.4 * GIB), int(1.2 * GIB)
PLANS = ("single", "zero0", "zero1", "zero2", "zero3", "fsdp")  # from most to least memory a rank


def state_bytes(plan: str, sizes: dict, world_size: int, dtype: str, bucket: int = 50_000_000) -> int:
    """Bytes of weights, gradients, fp32 masters, AdamW's moments and communication buckets on one rank, at the peak.

    Args:
        plan: one of PLANS. sizes: from plan_child.model_sizes (elements). dtype: training.dtype.
        bucket: elements of DeepSpeed's reduce_bucket_size.
    """
    trainable, weights = sizes["trainable"], sizes["trainable"] + sizes["frozen"]
    share = trainable / world_size
    low = 2 if dtype == "bf16" else 4
    buckets = min(bucket, trainable) * 4 * 2  # two with overlap_comm
    if plan in ("single", "zero0"):  # fp32 weights under autocast
        return 4 * weights + 4 * trainable + 8 * trainable + (buckets if plan == "zero0" else 0)
    if plan == "zero1":  # gradients are kept whole, in the low precision and accumulated in fp32
        return int(low * weights + (4 + (low if low == 2 else 0)) * trainable + 12 * share + buckets)
    if plan == "zero2":
        return int(low * weights + 4 * share + 12 * share + buckets)
    gathered = 2 * sizes["largest_block"] * low  # the block in use and the one being fetched
    if plan == "zero3":
        return int(low * weights / world_size + 4 * share + 12 * share + gathered + buckets)
    assert plan == "fsdp", plan
    return int(4 * weights / world_size + 4 * share + 8 * share + gathered)


def rank_bytes(plan: str, sizes: dict, world_size: int, dtype: str, on_gpu: bool) -> int:
    """Bytes one rank needs in all: states, activations and logits of a micro-batch, and what any process needs.

    benchmarks/step.py compares the activations and logits with measured peaks.
    """
    base = BASE_GPU if on_gpu else BASE_CPU
    passes = int(sizes["activations"] * 1.1) + sizes["logits"]["cuda" if on_gpu else "cpu"]
    return state_bytes(plan, sizes, world_size, dtype) + passes + base


def checkpoint_bytes(plan: str, sizes: dict, dtype: str) -> int:
    """Bytes of one checkpoint of the whole job: weights, fp32 masters where they are beside them, two moments."""
    weights, trainable = sizes["trainable"] + sizes["frozen"], sizes["trainable"]
    low = 2 if dtype == "bf16" else 4
    if plan in ("single", "zero0", "fsdp"):
        return 4 * weights + 8 * trainable
    return low * weights + 12 * trainable


def shown(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
