"""The keys that a DeepSpeed JSON may have. DeepSpeed itself ignores unknown keys and obeys the
others.

The keys are those of DeepSpeed 0.19.8: runtime/config.py and what it calls,
runtime/precision_config.py, runtime/zero/config.py and runtime/zero/offload_config.py.
tests/engines/test_deepspeed_allowed_keys.py compares them with the installed DeepSpeed; it is not
imported here: preflight's level 0 reads the JSON without torch.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from mmldlm.errors import UserError
from mmldlm.utils.formatting import did_you_mean


class AllowedValue(NamedTuple):
    """A key that may have only the value without effect; `advice` says what to do instead."""

    value: Any
    advice: str


class Rejected(NamedTuple):
    """A key that is not supported; `advice` says what to do instead."""

    advice: str


SWITCH, SIZE, COUNT, NUMBER = "true or false", "an integer >= 0", "an integer >= 1", "a number"
TEXT, SECTION = "a string", "an object {...}"
_OWNED_BY_CONFIG = "it changes results that are the same on every engine: delete it"
_UNTESTED = "mmldlm's checkpoints and steps were never tested with it: delete it"
_OFF = 'delete it, or write {"enabled": false}; mmldlm does not use it'
_REMOVED = "DeepSpeed 0.19.8 removed it: delete it"

TOP: dict[str, str | AllowedValue | Rejected] = {
    # Keys that our config owns (deepspeed_config.merged_config compares them).
    "train_batch_size": NUMBER,
    "train_micro_batch_size_per_gpu": NUMBER,
    "gradient_accumulation_steps": NUMBER,
    "gradient_clipping": NUMBER,
    "bf16": SECTION,
    "fp16": SECTION,
    "zero_optimization": SECTION,
    "data_types": SECTION,
    "optimizer": SECTION,
    "scheduler": SECTION,
    "amp": SECTION,
    # Keys without an effect on the training.
    **dict.fromkeys(
        ("comms_logger", "tensorboard", "csv_monitor", "wandb", "comet", "timers", "aio"), SECTION
    ),
    **dict.fromkeys(("wall_clock_breakdown", "dump_state", "disable_python_gc"), SWITCH),
    "steps_per_print": NUMBER,
    "vocabulary_size": NUMBER,
    "log_level": TEXT,
    # Only with the value without effect.
    "communication_data_type": AllowedValue(
        "fp32", "gradients are reduced in fp32 on every engine"
    ),
    "seq_parallel_communication_data_type": AllowedValue(
        "fp32", "gradients are reduced in fp32 on every engine"
    ),
    "prescale_gradients": AllowedValue(False, _UNTESTED),
    "gradient_predivide_factor": AllowedValue(1.0, _UNTESTED),
    "gradient_allreduce_op": AllowedValue("mean", _OWNED_BY_CONFIG),
    "managed_gradient_accumulation": AllowedValue(True, _OWNED_BY_CONFIG),
    "disable_allgather": AllowedValue(False, _OWNED_BY_CONFIG),
    "zero_allow_untested_optimizer": AllowedValue(True, "mmldlm brings its own AdamW"),
    "zero_force_ds_cpu_optimizer": AllowedValue(False, "mmldlm brings its own AdamW"),
    "dataloader_drop_last": AllowedValue(False, "mmldlm has its own data loader: delete it"),
    "use_data_before_expert_parallelism": AllowedValue(
        False, "the model has no experts: delete it"
    ),
    "torch_autocast": AllowedValue({"enabled": False}, "set training.dtype instead"),
    "autotuning": AllowedValue({"enabled": False}, _OFF),
    "data_efficiency": AllowedValue({"enabled": False}, _OFF),
    "hybrid_engine": AllowedValue({"enabled": False}, _OFF),
    "expert_parallel": AllowedValue({"enabled": False}, _OFF),
    "flops_profiler": AllowedValue(
        {"enabled": False},
        "its hooks on rank 0 change the order in which that rank's gradients become ready, and"
        " ZeRO-1 and 2 would add gradients of different parameters: delete it (training.profile"
        " writes a trace)",
    ),
    "memory_breakdown": AllowedValue(
        False,
        "it prints a line in every forward pass, and an evaluation takes minutes: delete it"
        " (`mmldlm preflight` estimates the memory)",
    ),
    # Not supported.
    "bfloat16": Rejected('the name is "bf16" now: rename it'),
    "activation_checkpointing": Rejected(
        "it has no effect on this model, whose memory model.* governs: delete it"
    ),
    "checkpoint": Rejected("mmldlm writes the checkpoints (checkpoints.*): delete it"),
    "datastates_ckpt": Rejected("mmldlm writes the checkpoints (checkpoints.*): delete it"),
    "compile": Rejected("training.compile_model compiles the model: delete it"),
    "pipeline": Rejected("pipeline stages are not supported: delete it"),
    "tensor_parallel": Rejected("tensor parallelism is not supported: delete it"),
    "sequence_parallel_size": Rejected("sequence parallelism is not supported: delete it"),
    "data_parallel_size": Rejected("every rank is data-parallel: delete it"),
    "weight_quantization": Rejected(_OWNED_BY_CONFIG),
    "elasticity": Rejected(
        "DeepSpeed 0.19.8 removed it: delete it; use torchrun's --nnodes MIN:MAX"
    ),
    **dict.fromkeys(
        (
            "compression_training",
            "curriculum_learning",
            "eigenvalue",
            "graph_harvesting",
            "nebula",
            "progressive_layer_drop",
            "quantize_training",
            "sparse_attention",
            "sparse_gradients",
        ),
        Rejected(_REMOVED),
    ),
}

_STAGE3_SIZES = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
)
ZERO: dict[str, str | AllowedValue | Rejected] = {
    "stage": NUMBER,
    "offload_param": SECTION,
    "offload_optimizer": SECTION,
    # Keys that partition memory and messages; the sums stay the same.
    **dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size", "sub_group_size"), COUNT),
    **dict.fromkeys((*_STAGE3_SIZES, *(f"stage3_{name}" for name in _STAGE3_SIZES)), SIZE),
    **dict.fromkeys(
        (
            "contiguous_gradients",
            "reduce_scatter",
            "use_multi_rank_bucket_allreduce",
            "allgather_partitions",
            "overlap_comm",
            "round_robin_gradients",
            "ignore_unused_parameters",
            "memory_efficient_linear",
            "override_module_apply",
            "log_trace_cache_warnings",
            "enable_sanity_checks",
            "gather_16bit_weights_on_model_save",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
            "load_from_fp32_weights",
            "pipeline_loading_checkpoint",
            "use_all_reduce_for_fetch_params",
            "stage3_use_all_reduce_for_fetch_params",
            "allgather_sequential",
            "stage3_allgather_sequential",
            "save_muon_momentum_buffer_in_memory",
        ),
        SWITCH,
    ),
    # Only with the value without effect.
    **dict.fromkeys(
        (
            "zero_quantized_weights",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_gradients",
        ),
        AllowedValue(False, _OWNED_BY_CONFIG),
    ),
    **dict.fromkeys(
        ("parameter_alignment", "legacy_stage1", "elastic_checkpoint"),
        AllowedValue(False, _UNTESTED),
    ),
    "compute_grad_norm": AllowedValue(
        True, "the guard checks the gradient norm of every step: delete it"
    ),
    "zero_hpz_partition_size": AllowedValue(1, _UNTESTED),
    **dict.fromkeys(
        ("module_granularity_threshold", "stage3_module_granularity_threshold"),
        AllowedValue(0, "mmldlm sets the leaf modules of ZeRO-3 (its blocks): delete it"),
    ),
    # Not supported.
    "leaf_module": Rejected("mmldlm sets the leaf modules of ZeRO-3 (its blocks): delete it"),
    "zenflow": Rejected(_OWNED_BY_CONFIG),
    "cpu_offload": Rejected('deprecated: write "offload_optimizer": {"device": "cpu"}'),
    "cpu_offload_param": Rejected('deprecated: write "offload_param": {"device": "cpu"}'),
    "cpu_offload_use_pin_memory": Rejected(
        'deprecated: write "pin_memory" in offload_optimizer or offload_param'
    ),
    "mics_shard_size": Rejected(_REMOVED),
    "mics_hierarchical_params_gather": Rejected(_REMOVED),
    "zeropp_loco_param": Rejected(_REMOVED),
}

OFFLOAD_PARAM: dict[str, str | AllowedValue | Rejected] = {
    "device": TEXT,
    "pin_memory": SWITCH,
    "nvme_path": TEXT,
    "buffer_count": SIZE,
    "buffer_size": SIZE,
    "max_in_cpu": SIZE,
}
OFFLOAD_OPTIMIZER: dict[str, str | AllowedValue | Rejected] = {
    "device": TEXT,
    "pin_memory": SWITCH,
    "nvme_path": TEXT,
    "buffer_count": SIZE,
    "pipeline_read": SWITCH,
    "pipeline_write": SWITCH,
    "fast_init": SWITCH,
    "ratio": AllowedValue(1.0, _UNTESTED),
    "super_offload": AllowedValue(False, _UNTESTED),
    "cpuadam_cores_perc": NUMBER,
}
BF16: dict[str, str | AllowedValue | Rejected] = {
    "enabled": SWITCH,
    "immediate_grad_update": AllowedValue(False, _UNTESTED),
    "check_grad_overflow": AllowedValue(True, "mmldlm's guard checks every step: delete it"),
    "bf16_master_weights_and_grads": AllowedValue(
        False, "masters are fp32 on every engine: delete it"
    ),
    "bf16_optimizer_states": AllowedValue(
        False, "masters and moments are fp32 on every engine: delete it"
    ),
}
FP16: dict[str, str | AllowedValue | Rejected] = {
    "enabled": SWITCH,
    "auto_cast": AllowedValue(False, "mmldlm casts its inputs itself: delete it"),
    # Compared with stability.loss_scale in merged_config, if the run is in fp16.
    **dict.fromkeys(
        ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
        NUMBER,
    ),
    "consecutive_hysteresis": SWITCH,
    "fp16_master_weights_and_grads": AllowedValue(
        False, "masters are fp32 on every engine: delete it"
    ),
}
DATA_TYPES: dict[str, str | AllowedValue | Rejected] = {
    "grad_accum_dtype": AllowedValue("fp32", "gradients are accumulated in fp32 on every engine"),
    "param_dtype": Rejected("training.dtype sets it: delete it"),
    "buffer_dtype": Rejected("buffers keep their dtype: delete it"),
    "keep_in_fp32_modules": Rejected("training.dtype sets it: delete it"),
}  # fmt: skip

# Sections of DeepSpeed's monitors, and the packages that they import.
MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}

SECTIONS: dict[str, dict[str, str | AllowedValue | Rejected]] = {
    "zero_optimization": ZERO,
    "zero_optimization.offload_param": OFFLOAD_PARAM,
    "zero_optimization.offload_optimizer": OFFLOAD_OPTIMIZER,
    "bf16": BF16,
    "fp16": FP16,
    "data_types": DATA_TYPES,
}


def check_keys(values: Mapping[str, Any], file: str | None) -> None:
    """Reject keys that DeepSpeed would ignore, or that would change the training behind our
    config.

    Args:
        values: Values of the JSON.
        file: Name of the JSON, for the message.

    Raises:
        UserError: an unknown key (the closest one is named), a value of the wrong type, or one
            that is not allowed.
    """
    _check(values, TOP, "", file)
    for name, allowed in SECTIONS.items():
        section: Any = values
        for part in name.split("."):
            section = section.get(part) or {}
        _check(section, allowed, f"{name}.", file)
    check_stage(values, file)
    for name, package in MONITORS.items():
        if (values.get(name) or {}).get("enabled") is True and importlib.util.find_spec(
            package
        ) is None:
            raise UserError(
                f"the package {package}, which DeepSpeed's monitor needs",
                f"{name}.enabled=true in {file}, and no {package} in {sys.prefix}",
                f"pip install {package}, or delete {name} (mmldlm logs to training_log.jsonl and"
                " logging.trackers)",
            )
    for section_name in ("offload_param", "offload_optimizer"):
        device = (values.get("zero_optimization", {}).get(section_name) or {}).get(
            "device", "none"
        )
        if device not in ("none", "cpu", "auto"):
            raise UserError(
                f'zero_optimization.{section_name}.device "cpu" or "none"',
                f"{device!r} in {file}",
                'write "cpu" (mmldlm\'s checkpoints were never tested with another), or delete the'
                " section",
            )


def check_stage(values: Mapping[str, Any], file: str | None) -> None:
    """Check zero_optimization.stage, which more callers need than `check_keys`.

    Raises:
        UserError: zero_optimization is not an object, or its stage is not one of 0 to 3.
    """
    zero = values.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise _invalid_key_error("zero_optimization", SECTION, zero, file)
    stage = zero.get("stage", "auto")
    if stage != "auto" and (isinstance(stage, bool) or stage not in (0, 1, 2, 3)):
        raise _invalid_key_error(
            "zero_optimization.stage", 'a ZeRO stage 0, 1, 2 or 3, or "auto"', stage, file
        )


def _check(
    section: Mapping[str, Any],
    allowed: Mapping[str, str | AllowedValue | Rejected],
    prefix: str,
    file: str | None,
) -> None:
    for key, value in section.items():
        if key not in allowed:
            raise UserError(
                "keys of DeepSpeed 0.19.8 (it ignores others)",
                f"{prefix}{key}{did_you_mean(key, allowed)} in {file}",
                "correct it, or delete it (docs/engines.md lists the keys)",
            )
        rule = allowed[key]
        if isinstance(rule, Rejected):
            raise UserError(
                f"a DeepSpeed JSON without {prefix}{key}", f"{prefix}{key} in {file}", rule.advice
            )
        if isinstance(rule, AllowedValue):
            if value != "auto" and not _changes_nothing(value, rule.value):
                found = f"{prefix}{key}={value} in {file}"
                raise UserError(f"{prefix}{key}={rule.value}, or nothing", found, rule.advice)
        elif not _has_type(value, rule, is_top=prefix == ""):
            raise _invalid_key_error(f"{prefix}{key}", rule, value, file)


def _changes_nothing(value: Any, only: Any) -> bool:
    if isinstance(only, dict):
        # A disabled section is allowed, whatever else it contains.
        return isinstance(value, dict) and value.get("enabled", False) is False
    # The types are compared as well, because 0 == False.
    return value == only and isinstance(value, bool) == isinstance(only, bool)


def _has_type(value: Any, kind: str, is_top: bool) -> bool:
    if kind == SECTION:
        # An offload section may be null.
        return isinstance(value, dict) or (not is_top and value is None)
    if value == "auto":
        return True
    if value is None:
        # A size of a section may not be null; at the top that leaves it out.
        return is_top or kind in (SWITCH, TEXT)
    if kind == SWITCH:
        return isinstance(value, bool)
    if kind == TEXT:
        return isinstance(value, str)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and (kind == NUMBER or (value >= (kind == COUNT) and value == int(value)))


def _invalid_key_error(key: str, expected: str, value: Any, file: str | None) -> UserError:
    return UserError(
        f"{key}: {expected}",
        f"{value!r} in {file}",
        "fix it (ds_configs/ of `mmldlm init DIR` has examples)",
    )
