"""The DeepSpeed JSON: our config owns batch size, clipping, precision and optimizer; a disagreement is an error."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mmldlm.config.schema import Config
from mmldlm.engines.deepspeed.allowed_keys import check_keys, check_stage
from mmldlm.errors import UserError

DEFAULT_ZERO_STAGE = 2
# Buckets in elements, where the JSON says "auto" or nothing. DeepSpeed's own 500M (2 GB, twice) take memory and save no
# time. 50M keep the links of many GPUs busy and gather one block of a 0.9B model ahead; on CPUs 5M are the fastest
# (benchmarks/communication.py), probably because malloc takes more than 32 MiB anew at every step, page by page.
GPU_BUCKET, CPU_BUCKET = 50_000_000, 5_000_000
ZERO0_BUCKET = 500_000_000  # engine.py: MEMORY_OPT_ALLREDUCE_SIZE, one flat copy of the gradients; no key sets it
LOSS_SCALE, LOSS_SCALE_WINDOW = 65536.0, 1000  # where stability.* leaves them open (stability/loss_scale.py)
_BUCKETS = {
    1: ("reduce_bucket_size", "allgather_bucket_size"),
    2: ("reduce_bucket_size", "allgather_bucket_size"),
    3: ("reduce_bucket_size", "stage3_prefetch_bucket_size"),
}


def read_json(path: str | None) -> dict[str, Any]:
    """The user's DeepSpeed JSON, {} without one."""
    if path is None:
        return {}
    try:
        values = json.loads(Path(path).read_text())
    except OSError as error:
        raise UserError(
            "a readable DeepSpeed JSON", f"{path}: {error.strerror}", "see ds_configs/ for files to start from"
        ) from error
    except json.JSONDecodeError as error:
        raise UserError("valid JSON", f"{path}: {error}", "mend the line named above") from error
    if not isinstance(values, dict):
        raise UserError(
            "a JSON object", f"{path}: a {type(values).__name__}", "see ds_configs/ for files to start from"
        )
    check_stage(values, path)
    return values


def resolve_stage(config: Config) -> int:
    """ZeRO stage of the run; engine.zero_stage and the JSON must not disagree."""
    values = read_json(config.engine.deepspeed_config)
    in_json = values.get("zero_optimization", {}).get("stage", "auto")
    stage = config.engine.zero_stage
    if stage is not None and in_json not in ("auto", stage):
        raise _disagree("engine.zero_stage", stage, "zero_optimization.stage", in_json, config)
    if stage is not None:
        return stage
    return DEFAULT_ZERO_STAGE if in_json == "auto" else int(in_json)


def bucket_elements(stage: int, on_gpu: bool, json_path: str | None = None) -> int:
    """Elements of the largest communication bucket under a ZeRO stage: the JSON's own, or ours where it has none."""
    if stage == 0:
        return ZERO0_BUCKET
    zero, ours = read_json(json_path).get("zero_optimization", {}), GPU_BUCKET if on_gpu else CPU_BUCKET
    return max(int(ours if zero.get(key, "auto") == "auto" else zero[key]) for key in _BUCKETS[stage])


def offloaded(stage: int, json_path: str | None) -> dict[str, str]:
    """What the JSON moves out of the GPU's memory, and where to: "optimizer" (ZeRO-1 to 3), "param" (ZeRO-3) -> "cpu"
    or "nvme"."""
    zero = read_json(json_path).get("zero_optimization", {})
    possible = {0: (), 3: ("optimizer", "param")}.get(stage, ("optimizer",))
    devices = {what: (zero.get(f"offload_{what}") or {}).get("device", "none") for what in possible}
    return {what: device for what, device in devices.items() if device != "none"}


def merged_config(config: Config, world_size: int, bucket: int = GPU_BUCKET) -> dict[str, Any]:
    """The dict handed to deepspeed.initialize.

    Args:
        bucket: elements of a communication bucket where the JSON leaves that to us.

    Raises:
        UserError: where the JSON has a key that is unknown or unsupported (deepspeed_keys.py), or sets something our
            config owns to another value; both places are named.
    """
    values = read_json(config.engine.deepspeed_config)
    check_keys(values, config.engine.deepspeed_config)
    training, optimizer = config.training, config.optimizer
    stage = resolve_stage(config)
    owned: list[tuple[str, str, Any]] = [
        ("train_micro_batch_size_per_gpu", "training.train_batch_size", training.train_batch_size),
        ("gradient_accumulation_steps", "training.grad_accum_steps", training.grad_accum_steps),
        (
            "train_batch_size",
            "training.train_batch_size * training.grad_accum_steps * world size",
            training.train_batch_size * training.grad_accum_steps * world_size,
        ),
        ("gradient_clipping", "optimizer.grad_clip_norm", optimizer.grad_clip_norm or 0.0),
        # Under ZeRO-0 it is autocast around fp32 weights (engines/deepspeed.py), so DeepSpeed itself runs in fp32.
        ("bf16.enabled", "training.dtype and ZeRO stage > 0", training.dtype == "bf16" and stage > 0),
        ("fp16.enabled", "training.dtype and ZeRO stage > 0", training.dtype == "fp16" and stage > 0),
        ("zero_optimization.stage", "engine.zero_stage", stage),
    ]
    merged = json.loads(json.dumps(values))
    for path, ours, value in owned:
        *parents, leaf = path.split(".")
        section = merged
        for parent in parents:
            section = section.setdefault(parent, {})
        theirs = section.get(leaf, "auto")
        if theirs != "auto" and theirs != value:
            raise _disagree(ours, value, path, theirs, config)
        section[leaf] = value
    zero = merged["zero_optimization"]
    if stage:
        # ZeRO-1 and 2 overlap communication only when told to.
        defaults = {"overlap_comm": True, "contiguous_gradients": True, **dict.fromkeys(_BUCKETS[stage], bucket)}
        zero.update({key: value for key, value in defaults.items() if zero.get(key, "auto") == "auto"})
    for forbidden, ours in (("optimizer", "optimizer"), ("scheduler", "optimizer.schedule"), ("amp", "training.dtype")):
        if merged.pop(forbidden, None) is not None:
            raise UserError(
                f"the optimizer, its schedule and precision only in mmldlm's config ({ours}.*)",
                f"a section {forbidden!r} in {config.engine.deepspeed_config}",
                f"delete that section from the JSON and set {ours}.*",
            )
    if training.dtype == "fp16":
        _check_loss_scaling(config, merged["fp16"])
    if merged["fp16"]["enabled"]:
        # A fixed scale for DeepSpeed: ours (stability/loss_scale.py) is set on its optimizer before every step.
        merged["fp16"]["loss_scale"] = 1.0
    if merged["bf16"]["enabled"] or merged["fp16"]["enabled"]:
        # DeepSpeed accumulates and reduces in 16 bits unless told otherwise (facts: trainers.md 0.5); where the JSON
        # itself says another type, check_keys has refused it.
        merged.setdefault("data_types", {})["grad_accum_dtype"] = "fp32"
        merged["communication_data_type"] = "fp32"
    # Our AdamW is torch's own, which DeepSpeed calls untested; its CPUAdam would need a C++ build on every node.
    merged["zero_allow_untested_optimizer"] = True
    merged.setdefault("zero_force_ds_cpu_optimizer", False)
    return _without_auto(merged)


def _check_loss_scaling(config: Config, section: dict[str, Any]) -> None:
    """DeepSpeed's own scaling is off; ours halves at the first overflow and never goes below 1."""
    first, window = config.stability.loss_scale or LOSS_SCALE, config.stability.loss_scale_window or LOSS_SCALE_WINDOW
    if section.get("loss_scale", "auto") not in ("auto", 1.0):
        found = section["loss_scale"]
        raise _disagree("stability.loss_scale", config.stability.loss_scale, "fp16.loss_scale", found, config)
    ours = {
        "initial_scale_power": math.log2(first),
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
                f"delete fp16.{key}; stability.loss_scale and stability.loss_scale_window are what can be set",
            )


def _without_auto(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value != "auto"
    }


def _disagree(ours: str, value: Any, theirs: str, found: Any, config: Config) -> UserError:
    return UserError(
        f"one owner for every number: {ours}={value} (mmldlm's config)",
        f"{theirs}={found} in {config.engine.deepspeed_config}",
        f'set it in one place: write "auto" for {theirs} in the JSON, or change {ours}',
    )
