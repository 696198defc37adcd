"""The DeepSpeed JSON. Our config owns batch size, clipping, precision and optimizer: the JSON must
not disagree.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mmldlm.config.schema import LOSS_SCALE, LOSS_SCALE_WINDOW, Config
from mmldlm.engines.deepspeed_allowed_keys import check_keys, check_stage
from mmldlm.errors import UserError
from mmldlm.utils import json_files

DEFAULT_ZERO_STAGE = 2
# Elements of a bucket, if the JSON has "auto" or none. DeepSpeed's own 500M (2 GB, twice) cost
# memory and save no time (benchmarks/communication.py).
GPU_BUCKET, CPU_BUCKET = 50_000_000, 5_000_000
# MEMORY_OPT_ALLREDUCE_SIZE of DeepSpeed's engine.py, one flat copy of the gradients; no key sets
# it.
ZERO0_BUCKET = 500_000_000
# Default of stage3_max_live_parameters and stage3_max_reuse_distance in DeepSpeed, elements.
MAX_LIVE = 1_000_000_000
# Default of sub_group_size in DeepSpeed, elements.
SUB_GROUP = 1_000_000_000
_BUCKETS = {
    1: ("reduce_bucket_size", "allgather_bucket_size"),
    2: ("reduce_bucket_size", "allgather_bucket_size"),
    3: ("reduce_bucket_size", "stage3_prefetch_bucket_size"),
}


def read_json(path: str | None) -> dict[str, Any]:
    """Return the user's DeepSpeed JSON, {} without one."""
    if path is None:
        return {}
    values = json_files.read_json(
        Path(path),
        "correct it, or start from a file in ds_configs/ of `mmldlm init DIR`",
        finite=True,
    )
    check_stage(values, path)
    return values


def resolve_stage(config: Config) -> int:
    """Return the ZeRO stage of the run; engine.zero_stage and the JSON must not disagree."""
    values = read_json(config.engine.deepspeed_config)
    in_json = values.get("zero_optimization", {}).get("stage", "auto")
    stage = config.engine.zero_stage
    if stage is not None and in_json not in ("auto", stage):
        raise _disagree("engine.zero_stage", stage, "zero_optimization.stage", in_json, config)
    if stage is not None:
        return stage
    return DEFAULT_ZERO_STAGE if in_json == "auto" else int(in_json)


def check_fp16(config: Config, is_supported: bool) -> None:
    """Refuse fp16 under ZeRO-1 to 3 where DeepSpeed does not support it.

    Not part of check_engine, because the head may have other devices.

    Args:
        is_supported: Whether DeepSpeed's accelerator supports fp16: a GPU, or a CPU with fp16
            instructions.

    Raises:
        UserError: the run needs it.
    """
    needs_fp16 = (
        config.engine.kind == "deepspeed"
        and config.training.dtype == "fp16"
        and resolve_stage(config) > 0
    )
    if needs_fp16 and not is_supported:
        raise UserError(
            "GPUs (or CPUs with fp16 instructions) for training.dtype=fp16 under DeepSpeed ZeRO-1"
            " to 3",
            "none here",
            "set training.dtype=bf16 or fp32, or engine.kind=ddp, fsdp or single",
        )


def bucket_elements(stage: int, on_gpu: bool, json_path: str | None = None) -> int:
    """Return the elements of the largest communication bucket under a ZeRO stage: the JSON's, or
    our default.
    """
    if stage == 0:
        return ZERO0_BUCKET
    zero = read_json(json_path).get("zero_optimization", {})
    ours = GPU_BUCKET if on_gpu else CPU_BUCKET
    return max(
        int(ours if zero.get(key, "auto") == "auto" else zero[key]) for key in _BUCKETS[stage]
    )


def max_live_elements(json_path: str | None = None) -> int:
    """Return how many elements ZeRO-3 may keep gathered from the forward to the backward pass: the
    JSON's, or DeepSpeed's default.
    """
    zero = read_json(json_path).get("zero_optimization", {})
    limits = (
        zero.get(key, "auto")
        for key in ("stage3_max_live_parameters", "stage3_max_reuse_distance")
    )
    return min(MAX_LIVE if limit == "auto" else int(limit) for limit in limits)


def sub_group_elements(json_path: str | None = None) -> int:
    """Return how many elements of a rank ZeRO-3 updates at a time: the JSON's, or DeepSpeed's
    default.
    """
    found = read_json(json_path).get("zero_optimization", {}).get("sub_group_size", "auto")
    return SUB_GROUP if found == "auto" else int(found)


def offloaded(stage: int, json_path: str | None) -> dict[str, str]:
    """Return the state that the JSON offloads from the GPU: "optimizer" (ZeRO-1 to 3), "param"
    (ZeRO-3) -> "cpu" or "nvme".
    """
    zero = read_json(json_path).get("zero_optimization", {})
    possible = {0: (), 3: ("optimizer", "param")}.get(stage, ("optimizer",))
    devices = {
        name: (zero.get(f"offload_{name}") or {}).get("device", "none") for name in possible
    }
    return {name: device for name, device in devices.items() if device != "none"}


def merged_config(config: Config, world_size: int, bucket: int = GPU_BUCKET) -> dict[str, Any]:
    """Return the dict for deepspeed.initialize.

    Args:
        config: Config of the run.
        world_size: Number of ranks.
        bucket: Number of elements of a communication bucket, if the JSON does not set it.

    Raises:
        UserError: the JSON has an unknown or unsupported key (deepspeed_allowed_keys.py), or sets
            a value that the config owns to another value; both places are named.
    """
    values = read_json(config.engine.deepspeed_config)
    check_keys(values, config.engine.deepspeed_config)
    stage = resolve_stage(config)
    merged = json.loads(json.dumps(values))
    for path, ours, value in _owned_values(config, stage, world_size):
        _set_owned(merged, path, ours, value, config)
    if stage:
        # ZeRO-1 and 2 overlap communication only if overlap_comm is set.
        zero = merged["zero_optimization"]
        defaults = {
            "overlap_comm": True,
            "contiguous_gradients": True,
            **dict.fromkeys(_BUCKETS[stage], bucket),
        }
        zero.update(
            {key: value for key, value in defaults.items() if zero.get(key, "auto") == "auto"}
        )
    _check_sections(merged, config)
    if config.training.dtype == "fp16":
        _check_loss_scaling(config, merged["fp16"])
    if merged["fp16"]["enabled"]:
        # DeepSpeed gets a fixed scale: ours (stability/guard.py) is set on its optimizer before
        # every step.
        merged["fp16"]["loss_scale"] = 1.0
    if merged["bf16"]["enabled"] or merged["fp16"]["enabled"]:
        # DeepSpeed's default is to accumulate and reduce in 16 bits; check_keys has rejected other
        # types in the JSON.
        merged.setdefault("data_types", {})["grad_accum_dtype"] = "fp32"
        merged["communication_data_type"] = "fp32"
    # Our AdamW is torch's own, which DeepSpeed calls untested; its CPUAdam would need a C++ build
    # on every node.
    merged["zero_allow_untested_optimizer"] = True
    merged.setdefault("zero_force_ds_cpu_optimizer", False)
    return _without_auto(merged)


def _owned_values(config: Config, stage: int, world_size: int) -> list[tuple[str, str, Any]]:
    """Return (path in the JSON, our key, value) of everything that our config owns."""
    training, batch_size = config.training, "training.train_batch_size"
    accum_steps = training.grad_accum_steps
    return [
        ("train_micro_batch_size_per_gpu", batch_size, training.train_batch_size),
        ("gradient_accumulation_steps", "training.grad_accum_steps", accum_steps),
        (
            "train_batch_size",
            f"{batch_size} * training.grad_accum_steps * world size",
            training.train_batch_size * accum_steps * world_size,
        ),
        ("gradient_clipping", "optimizer.grad_clip_norm", config.optimizer.grad_clip_norm or 0.0),
        # Under ZeRO-0 it is autocast around fp32 weights (deepspeed.py), so DeepSpeed itself runs
        # in fp32.
        (
            "bf16.enabled",
            "training.dtype and ZeRO stage > 0",
            training.dtype == "bf16" and stage > 0,
        ),
        (
            "fp16.enabled",
            "training.dtype and ZeRO stage > 0",
            training.dtype == "fp16" and stage > 0,
        ),
        ("zero_optimization.stage", "engine.zero_stage", stage),
    ]


def _set_owned(merged: dict[str, Any], path: str, ours: str, value: Any, config: Config) -> None:
    *parents, leaf = path.split(".")
    section = merged
    for parent in parents:
        section = section.setdefault(parent, {})
    json_value = section.get(leaf, "auto")
    if json_value != "auto" and json_value != value:
        raise _disagree(ours, value, path, json_value, config)
    section[leaf] = value


def _check_sections(merged: dict[str, Any], config: Config) -> None:
    """Reject sections of the JSON that our config replaces."""
    for section, ours in (
        ("optimizer", "optimizer"),
        ("scheduler", "optimizer.schedule"),
        ("amp", "training.dtype"),
    ):
        if merged.pop(section, None) is not None:
            raise UserError(
                f"the optimizer, its schedule and precision only in mmldlm's config ({ours}.*)",
                f"a section {section!r} in {config.engine.deepspeed_config}",
                f"delete that section from the JSON and set {ours}.*",
            )


def _check_loss_scaling(config: Config, section: dict[str, Any]) -> None:
    """Reject settings of DeepSpeed's loss scaling, which is off; ours halves at an overflow and
    never goes below 1.
    """
    initial = config.stability.loss_scale or LOSS_SCALE
    window = config.stability.loss_scale_window or LOSS_SCALE_WINDOW
    ours = {
        "loss_scale": 1,
        "initial_scale_power": math.log2(initial),
        "loss_scale_window": window,
        "hysteresis": 1,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1,
    }
    for key, value in ours.items():
        if section.get(key, "auto") not in ("auto", value):
            raise UserError(
                f"fp16.{key}={value:g}, as mmldlm scales the loss on every engine",
                f"fp16.{key}={section[key]} in {config.engine.deepspeed_config}",
                f"delete fp16.{key}; set stability.loss_scale and stability.loss_scale_window"
                " instead",
            )


def _without_auto(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value != "auto"
    }


def _disagree(key: str, value: Any, json_key: str, found: Any, config: Config) -> UserError:
    return UserError(
        f"one owner per value: {key}={value} (mmldlm's config)",
        f"{json_key}={found} in {config.engine.deepspeed_config}",
        f'set it in one place: write "auto" for {json_key} in the JSON, or change {key}',
    )
